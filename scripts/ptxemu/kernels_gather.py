"""kv_gather and kv_calibrate against numpy: bytes and counts."""

import struct

import numpy as np

from kernels_small_ops import BITS, divisor, encoded, f32_bits, random_bits
from launch import Device, kernels

# The exact value of each positive e4m3 code; the NaN code is treated apart.
VALUES = np.array([m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)], np.float32)


def dequantised(codes, k_scale):
    """f32 bits of the f32 product, and a quiet NaN of the code's sign."""
    magnitude, sign = codes & 0x7F, codes.astype(np.uint32) >> 7 << 31
    with np.errstate(all="ignore"):
        bits = (VALUES[magnitude] * np.float32(k_scale)).astype(np.float32).view(np.uint32)
    return np.where(magnitude == 0x7F, 0x7FC00000, bits).astype(np.uint32) | sign


def gather(dtype, output, row=288, page_size=16, k_scale=1.0, pad=0, room=0, max_rows=40, first_page=0):
    """Pieces of pages to rows, some past the output's end; a table with `room` for more pieces, which must write nothing."""
    rng = np.random.default_rng(row + page_size)
    size, out = np.dtype(BITS[dtype]).itemsize, np.dtype(BITS[output]).itemsize
    num_pages, stride, out_stride = 7, page_size * row + 8, row + pad
    kv = random_bits(rng, 8 + (num_pages - 1) * stride + page_size * row, dtype)
    before = random_bits(rng, 4 + (max_rows - 1) * out_stride + row, output)
    # (slot, out_row, tokens): in the middle of a page, a whole one, rows past the output, a slot past the pool
    half = page_size // 2
    pieces = [(5 * page_size + half, 3, page_size - half), (page_size, 4 + page_size - half, page_size), (6 * page_size, max_rows - 1, page_size)]
    unused = [(0, 0, page_size)] * room
    # The slab is pages first_page to first_page + 6 of a pool; pieces of other slabs write nothing.
    elsewhere = [(page * page_size, 0, page_size) for page in (first_page - 1, first_page + num_pages) if first_page]
    listed = [(slot + first_page * page_size, *rest) for slot, *rest in pieces] + elsewhere
    words = np.concatenate([[len(listed)], np.ravel(listed + unused)]).astype(np.uint32)
    device = Device()
    at, to, table = device.buffer(kv, False), device.buffer(before), device.buffer(words, False)
    args = struct.pack("<5Q", at + 8 * size, to + 4 * out, table, stride * size, out_stride * out)
    numbers = max_rows, len(listed) + room, num_pages * page_size, first_page * page_size, 0, page_size, row // 4
    args += struct.pack("<7If", *numbers, np.float32(k_scale))
    args += struct.pack("<4I", *divisor(row // 4), *divisor(page_size))
    entry = kernels("shaders/cuda/ptx/kv_gather.ptx")[f"kv_gather_{dtype}_{output}"]
    items = -(-(len(listed) + room) * page_size // 8) * (row // 4)
    device.launch(entry, (-(-items // 256), 1, 1), [args])

    want = before.copy()
    for slot, out_row, tokens in pieces:
        for t in range(min(tokens, max_rows - out_row)):
            first = 8 + (slot + t) // page_size * stride + (slot + t) % page_size * row
            codes = kv[first : first + row]
            if dtype != output:
                codes = encoded(output, dequantised(codes, k_scale) if dtype == "e4m3" else f32_bits(dtype, codes))
            want[4 + (out_row + t) * out_stride :][:row] = codes
    wrong = np.flatnonzero(device.read(to) != want)
    assert not len(wrong), f"{dtype} to {output}, k_scale {k_scale}: {len(wrong)} elements, the first is {wrong[0]}"


def test_gather_every_pair():
    turn = 0
    for dtype in BITS:
        for output in BITS:
            if output != "e4m3" or dtype == "e4m3":
                turn += 1
                gather(dtype, output, [288, 576, 320][turn % 3], [16, 3, 8][turn % 3], 0.37, pad=4 * (turn % 2), room=turn % 3)
    gather("f16", "f16", page_size=1)
    gather("bf16", "f32", page_size=64, max_rows=102)
    gather("f32", "f16", room=1, first_page=7)
    gather("e4m3", "e4m3", page_size=3, first_page=1)


def test_gather_scales():
    for output in ("f32", "f16", "bf16"):
        for k_scale in (1.0, 171.3, 1.3e-4, 2.7e-40, 3e38, 1e-45, 2.0**-126):
            gather("e4m3", output, k_scale=k_scale)


def calibrate(dtype, tokens, first=0, latent=256, rope=32, k_scale=1.0, pad=0, room=0):
    rng = np.random.default_rng(tokens + latent)
    size = np.dtype(BITS[dtype]).itemsize
    most = first + tokens + room

    def part(dim):
        values = encoded(dtype, (rng.standard_normal((most, dim + pad)) * 100).astype(np.float32).view(np.uint32))
        some = rng.random(values.shape) < 0.1
        values[some] = random_bits(rng, int(some.sum()), dtype)
        return values

    kv_c, k_pe = part(latent), part(rope)
    # The count of saturated elements is about to exceed 32 bits.
    stats = np.array([np.float32(0.5).view(np.uint32), 77, 0xFFFFFFFF, 5, 0, 0, 12, 0], np.uint32)
    device = Device()
    rows = [device.buffer(part.ravel(), False) for part in (kv_c, k_pe)]
    table, counters = device.buffer(np.array([tokens, first], np.uint32), False), device.buffer(stats)
    with np.errstate(all="ignore"):
        limit = np.float32(448) * np.float32(k_scale)
    args = struct.pack("<6Q", *rows, table, counters, (latent + pad) * size, (rope + pad) * size)
    args += struct.pack("<4I", most, latent // 4, (latent + rope) // 4, int(limit.view(np.uint32)))
    args += struct.pack("<2I", *divisor((latent + rope) // 4))
    items = -(-most // 8) * ((latent + rope) // 4)
    entry = kernels("shaders/cuda/ptx/kv_calibrate.ptx")[f"kv_calibrate_{dtype}"]
    device.launch(entry, (-(-items // 256), 1, 1), [args])

    seen = np.concatenate([part[first : first + tokens, :dim].ravel() for part, dim in ((kv_c, latent), (k_pe, rope))])
    bits = f32_bits(dtype, seen) & 0x7FFFFFFF
    finite = bits[bits < 0x7F800000]
    words = stats.view(np.uint64)
    counts = np.array([(finite > limit.view(np.uint32)).sum(), (bits >= 0x7F800000).sum(), len(bits)], np.uint64)
    amax = max(int(finite.max(initial=0)), int(stats[0]))
    want = np.concatenate([[np.uint64(amax | 77 << 32)], words[1:] + counts]).astype(np.uint64)
    got = device.read(counters).view(np.uint64)
    assert (got == want).all(), f"{dtype}: {got} instead of {want}"


def test_calibrate():
    for dtype in ("f32", "f16", "bf16"):
        calibrate(dtype, 37, first=2, k_scale=0.3)
        calibrate(dtype, 9, pad=4, room=5, k_scale=1e37)
        calibrate(dtype, 0, first=3)
    calibrate("bf16", 21, latent=512, rope=0, k_scale=0.01)
