"""The interpreter's results of the kernels in small.cu."""

import struct

import numpy as np

from convert import E4M3, bf16_bits, bf16_value, e4m3_code
from launch import Device, compiled, parse
from tensor import cut

SMALL = "scripts/ptxemu/tests/small.cu"


def small(name, arch="compute_80"):
    return parse(compiled(SMALL, arch))[name]


def go(name, given, out, n=0, grid=1, more=(), arch="compute_80", **options):
    """Runs a kernel of `Args`; returns its `out`, and the device with the addresses of `more`."""
    device = Device()
    given, out = device.buffer(np.asarray(given, np.float32), False), device.buffer(out)
    rest = [device.buffer(array) for array in more]
    args = [struct.pack("<QQi4x", given, out, n), *(struct.pack("<Q", address) for address in rest)]
    device.launch(small(name, arch), (grid, 1, 1), args, **options)
    return device.read(out), [device.read(address) for address in rest]


def normal(count, seed=3):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def nans(count):
    return np.full(count, np.nan, np.float32)


def test_a_barrier_passes_data_on():
    x = normal(3 * 128)
    out, _ = go("pass_on", x, nans(3 * 128), grid=3)
    assert (out.reshape(3, 128) == np.roll(x.reshape(3, 128), -32, 1)).all()


def test_two_rounds_over_one_buffer():
    x = normal(5 * 128)
    out, _ = go("two_rounds", x, nans(128), n=5)
    assert np.allclose(out, np.roll(x.reshape(5, 128), -32, 1).sum(0), atol=1e-5)


def test_copies_land_and_what_is_beyond_is_zero():
    x = normal(900)
    out, _ = go("fly", x, nans(1024), n=900, shared=4096)
    whole = np.pad(x, (0, 124)).reshape(2, 512)
    assert (out.reshape(2, 512) == np.roll(whole, -64, 1)).all()


def test_lanes_part_and_meet():
    x = normal(150)
    out, _ = go("part", x, nans(150), n=150, grid=4, beside=3)
    want = x.copy()
    for lane in range(150):
        for step in range(lane % 7):
            want[lane] = want[lane] * np.float32(2) if step & 1 else want[lane] + np.float32(1)
        want[lane] = [-want[lane], want[lane] ** 2, max(want[lane], 3), want[lane]][lane % 4]
    assert (out == want).all()


def test_a_warp_together():
    x = np.abs(normal(128)) + np.float32(0.01)
    out, _ = go("together", x, nans(512), grid=2)
    for warp, lanes in enumerate(x.reshape(4, 32)):
        total, prefix, votes, rest = out.reshape(4, 32, 4)[warp].T
        assert np.allclose(total, lanes.sum(), rtol=1e-5) and (total == total[0]).all()
        assert np.allclose(prefix, np.cumsum(lanes), rtol=1e-5)
        assert (votes == (lanes < 0.5).sum() + 100 * (lanes > 2).any() + 1000).all()
        down = [lanes[lane + 3] if lane % 8 < 5 else lanes[lane] for lane in range(32)]
        most = np.float32((lanes * np.float32(1000)).astype(np.uint32).max())
        assert np.allclose(rest, most + lanes[5] + down, rtol=1e-6)


def tile(name, rounded):
    x = normal(256 + 128)
    out, _ = go(name, x, nans(128))
    values = rounded(x).astype(np.float64)
    want = values[:256].reshape(16, 16) @ values[256:].reshape(16, 8) + 1
    assert np.allclose(out.reshape(16, 8), want, atol=1e-5), np.abs(out.reshape(16, 8) - want).max()


def test_a_tile_of_f16():
    tile("tile_f16", lambda x: x.astype(np.float16))


def test_a_tile_of_bf16():
    tile("tile_bf16", lambda x: bf16_value(bf16_bits(x)))


def test_a_tile_of_e4m3():
    x = normal(512 + 256) * 30
    out, _ = go("tile_e4m3", x, nans(128), arch="compute_89")
    values = E4M3[e4m3_code(x)].astype(np.float64)
    want = values[:512].reshape(16, 32) @ values[512:].reshape(8, 32).T + 1
    assert np.allclose(out.reshape(16, 8), want, rtol=1e-6, atol=1e-6), np.abs(out.reshape(16, 8) - want).max()


def test_sums_of_few_bits():
    values = np.array([0.0, 1.0, -1.75, 255.99, 2.0**-140])
    assert (cut(values, 3) == [0, 1, -1.75, 224, 2.0**-140]).all()


def test_the_last_block_sees_all():
    x = normal(20)
    out, (counter,) = go("last_block", x, nans(21), grid=20, more=[np.zeros(1, np.uint32)], same=False)
    assert counter[0] == 20 and np.isclose(out[0], x.sum(), atol=1e-5)


def c_division(x, by):
    return abs(x) // abs(by) * (1 if (x < 0) == (by < 0) else -1)


def integers_of(x, t, by):
    """What the kernel `integers` writes, in Python's integers."""
    u32, bits = lambda v: v & 0xFFFFFFFF, f"{x & 0xFFFFFFFF:032b}"  # noqa: E731
    s8, s16 = ((x & 255) ^ 128) - 128, ((x >> 8 & 0xFFFF) ^ 0x8000) - 0x8000
    ffs = (x & -x).bit_length() if x else 0
    a, b = u32(x).to_bytes(4, "little"), u32(by).to_bytes(4, "little")
    permuted = int.from_bytes([(a + b)[5], (a + b)[1], (a + b)[7], a[3]], "little")
    funnel = u32((u32(by) << 32 | u32(x)) << 9 >> 32)
    shifted = u32(x >> (t % 32) | u32(x << 3))
    return [
        c_division(x, by),
        x - c_division(x, by) * by,
        u32(x) // 7 + u32(x) % 10 * 1000000000,
        shifted,
        bits.count("1") + 100 * (32 - u32(x).bit_length()) + 10000 * ffs,
        c_division(x * by, 3) + (x * by >> 32),
        permuted ^ funnel ^ int(bits[::-1], 2),
        s8 + s16 * 1000 + min(x, by) + max(u32(x), u32(by)),
    ]


def test_integers_are_those_of_c():
    x = np.random.default_rng(5).integers(-(2**31), 2**31, 32).astype(np.int32)
    x[:6] = [0, 1, -1, -(2**31), 2**31 - 1, 255]
    for by in (7, -13, 1000003):
        device = Device()
        given, out = device.buffer(x, False), device.buffer(np.zeros((32, 8), np.int64))
        device.launch(small("integers"), (1, 1, 1), [struct.pack("<Q", given), struct.pack("<Q", out), struct.pack("<i", by)])
        for t, row in enumerate(device.read(out)):
            want = integers_of(int(x[t]), t, by)
            assert row.tolist() == want, f"{x[t]} by {by}: {row.tolist()} is not {want}"


def test_formats():
    x = np.concatenate([normal(20) * 300, normal(20) / 100, [0.0, -0.0, 448, 500, 2.0**-9, 2.0**-10, 17, 19, 0.5, 1, 3, -7]])
    x = np.concatenate([x, np.abs(normal(64 - len(x), 9))]).astype(np.float32)
    y = x.reshape(32, 2)[:, 1]
    x = x.reshape(32, 2)[:, 0]
    out, (bits,) = go("formats", np.stack([x, y], 1), nans(128), more=[np.zeros((32, 4), np.uint32)], arch="compute_89")
    assert (bits[:, 0] == (bf16_bits(x) | bf16_bits(y).astype(np.uint32) << 16)).all()
    half = lambda v: v.astype(np.float16).view(np.uint16).astype(np.uint32)  # noqa: E731
    assert (bits[:, 1] == (half(x) | half(y) << 16)).all()
    whole = np.rint(x).astype(np.int32).view(np.uint32) ^ np.clip(np.trunc(y), 0, None).astype(np.uint32)
    assert (bits[:, 2] == whole).all()
    # The nearest of all codes, found by looking at each; ties go to the even code.
    sizes = E4M3[:127].astype(np.float64)
    for column, shift in ((x, 0), (y, 8)):
        distance = np.abs(np.abs(column[:, None]).astype(np.float64) - sizes)
        nearest = [min(range(127), key=lambda code: (row[code], code & 1)) for row in distance]
        want = np.array(nearest) | np.signbit(column) * 128
        assert ((bits[:, 3] >> shift & 255) == want).all()
    assert (out[:32] == E4M3[bits[:, 3] & 255] + E4M3[bits[:, 3] >> 8]).all()
    with np.errstate(all="ignore"):
        assert np.allclose(out[32:64], np.exp2(x)) and np.allclose(out[64:96], np.log2(y), equal_nan=True)
        halves = x.astype(np.float16) + y.astype(np.float16)
        want = (x.astype(np.float64) * y + halves.astype(np.float64)).astype(np.float32)
        assert (out[96:128] == want).all()
