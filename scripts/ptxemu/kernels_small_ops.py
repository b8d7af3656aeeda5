"""kv_append, kv_copy_pages and merge_state against numpy: byte for byte where that is promised, else against f64."""

import struct

import numpy as np

from launch import FULL, Device, kernels

BITS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16, "e4m3": np.uint8}
TOLERANCE = {"f32": 2e-6, "f16": 1e-3, "bf16": 2e-2}
# Every finite e4m3 magnitude, and the ties between neighbours.
E4M3 = np.array([m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])
TIES = (E4M3[1:] + E4M3[:-1]) / 2
# f32: zero, subnormals, the largest, infinity, NaN, and negative NaN.
ENDS = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0xFF800001], np.uint32)


def f32_bits(dtype, codes):
    """As the host's `half` widens: a NaN is made quiet and keeps its payload."""
    wide = codes.astype(np.uint32)
    if dtype == "f32":
        return wide
    if dtype == "bf16":
        return np.where(wide & 0x7FFF > 0x7F80, wide << 16 | 0x400000, wide << 16).astype(np.uint32)
    nan = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    return np.where(wide & 0x7FFF > 0x7C00, nan, codes.view(np.float16).astype(np.float32).view(np.uint32)).astype(np.uint32)


def encoded(dtype, bits, k_scale=1.0):
    """f32 bits as the host rounds them; for e4m3 the exact x / k_scale, whose f64 quotient is on its side of every tie."""
    x, is_nan = bits.view(np.float32), bits & 0x7FFFFFFF > 0x7F800000
    if dtype == "e4m3":
        x = np.where(is_nan, np.float32(0), x)
        quotient = np.abs(x.astype(np.float64)) / np.float64(np.float32(k_scale))
        below = np.searchsorted(TIES, quotient)
        is_tie = (below < len(TIES)) & (TIES[np.minimum(below, len(TIES) - 1)] == quotient)
        codes = below + (is_tie & (below % 2 == 1)) | bits >> 31 << 7
        return np.where(is_nan, 0x7F, codes).astype(np.uint8)
    if dtype == "f32":
        return np.where(is_nan, bits | 0x400000, bits).astype(np.uint32)
    if dtype == "bf16":
        rounded = bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1) >> 16
        return np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16)
    nan = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF
    with np.errstate(all="ignore"):
        return np.where(is_nan, nan, x.astype(np.float16).view(np.uint16)).astype(np.uint16)


def random_bits(rng, count, dtype):
    return rng.integers(0, 256, count * np.dtype(BITS[dtype]).itemsize, np.uint8).view(BITS[dtype])


def divisor(by):
    shift = 31 + (by - 1).bit_length()
    return -(-(1 << shift) // by), shift


def e4m3_scale(k_scale):
    """`Scale::new` of src/cuda/ops/kv_append.rs."""
    k = float(np.float32(k_scale))
    margin = 0 if np.float32(k).view(np.uint32) << 9 & 0xFFFFFFFF == 0 else 2.0**-22
    if not 2.0**-100 <= k < 2.0**100:
        return k, 0, 0, 0
    largest = int(np.float32(456 * k).view(np.uint32))
    return k, float(np.float32(128 * (1 - margin) / k)), float(np.float32(128 * (1 + margin) / k)), largest


def append(dtype, cache, codes, latent=512, rope=64, page_size=64, k_scale=1.0, offset=0, pad=0, room=0, first_page=0):
    """Cuts codes into rows, appends most of them to random slots, and compares the whole cache. Tables and inputs have `room` for more
    tokens, which must write nothing."""
    rng = np.random.default_rng(len(codes) + page_size)
    row, size, out = latent + rope, np.dtype(BITS[dtype]).itemsize, np.dtype(BITS[cache]).itemsize
    tokens = -(-len(codes) // row)
    rows = np.resize(codes, (tokens + room, row)).astype(BITS[dtype])
    num_pages = -(-tokens // page_size) + 2
    slots = np.resize(rng.permutation(num_pages * page_size), tokens + room)
    slots[1::9] = -1
    # The slab begins at a page of the pool; tokens of other slabs are not written.
    first = first_page * page_size
    listed = np.where(slots < 0, -1, slots + first)
    if first:
        listed[2::9], slots[2::9] = first - 1, -1
        listed[3::9], slots[3::9] = first + num_pages * page_size, -1
    strides = latent + pad, rope + pad

    def spread(part, stride):
        """Rows `stride` apart, behind `offset` elements."""
        array = random_bits(rng, offset + (len(part) - 1) * stride + part.shape[1], dtype)
        for token in range(len(part)):
            array[offset + token * stride :][: part.shape[1]] = part[token]
        return array

    stride = page_size * row + 8
    before = random_bits(rng, 8 + (num_pages - 1) * stride + page_size * row, cache)
    device = Device()
    kv_c = device.buffer(spread(rows[:, :latent], strides[0]), False) + offset * size
    k_pe = device.buffer(spread(rows[:, latent:], strides[1]), False) + offset * size if rope else 0
    kv = device.buffer(before)
    table = device.buffer(np.concatenate([[tokens], listed]).astype(np.uint32), False)
    most = tokens + room
    steps = [stride * size if most > 1 else 0 for stride in strides]
    is_wide = all(number % 16 == 0 for number in [kv_c, k_pe, *steps])
    args = struct.pack("<7Q", kv_c, k_pe, kv + 8 * out, table, *steps, stride * out)
    args += struct.pack("<8I", most, num_pages * page_size, first, 0, page_size, latent // 8, row // 8, is_wide)
    args += struct.pack("<4I3fI", *divisor(row // 8), *divisor(page_size), *e4m3_scale(k_scale))
    entry = kernels("shaders/cuda/ptx/kv_append.ptx")[f"kv_append_{dtype}_{cache}"]
    device.launch(entry, (-(-(-(-most // 4) * (row // 8)) // 256), 1, 1), [args])

    want = before.copy()
    new = rows if dtype == cache else encoded(cache, f32_bits(dtype, rows), k_scale)
    for token in np.flatnonzero(slots[:tokens] >= 0):
        at = 8 + slots[token] // page_size * stride + slots[token] % page_size * row
        want[at : at + row] = new[token]
    wrong = np.flatnonzero(device.read(kv) != want)
    assert not len(wrong), f"{dtype} to {cache}, k_scale {k_scale}: {len(wrong)} elements, the first is {wrong[0]}"


def usual(count):
    return (np.random.default_rng(2).standard_normal(count) * 20).astype(np.float32).view(np.uint32)


def with_signs(bits):
    return np.concatenate([bits, bits ^ np.uint32(1 << 31)])


def hard():
    """f32 patterns on and next to ties, and NaN and infinities."""
    halves = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = ((halves[1:] + halves[:-1]) / 2).astype(np.float32).view(np.uint32)
    tops = np.arange(0x7F80, dtype=np.uint32) << 16 | 0x8000
    ties = np.concatenate([middles, tops, TIES.astype(np.float32).view(np.uint32)])
    return with_signs(np.concatenate([ties, ties - 1, ties + 1, ENDS]))


def every_code():
    return np.arange(1 << 16).astype(np.uint16)


def test_append_shapes_of_every_pair():
    for dtype in ("f32", "f16", "bf16"):
        codes = encoded(dtype, usual(1500))
        for cache in BITS:
            scale = 0.37 if cache == "e4m3" else 1.0
            append(dtype, cache, codes, page_size=3, k_scale=scale)
            append(dtype, cache, codes[:900], 256, 32, 48, k_scale=scale, offset=4, pad=4)
            append(dtype, cache, codes[:512], 512, 0, 1, k_scale=scale)
            append(dtype, cache, codes, 256, 32, 3, k_scale=scale, first_page=5)


def test_append_of_fewer_tokens_than_a_grid_is_for():
    for dtype, cache in [("bf16", "e4m3"), ("f16", "f16"), ("f32", "bf16")]:
        for tokens, room in [(1, 1), (3, 9), (4, 1), (5, 6), (0, 3)]:
            append(dtype, cache, encoded(dtype, usual(tokens * 576)), page_size=3, room=room)


def test_append_every_code_of_16_bits():
    for dtype, others in [("f16", ("f32", "bf16")), ("bf16", ("f32", "f16"))]:
        for cache in others:
            append(dtype, cache, every_code())


def test_append_hard_f32():
    for cache in ("f16", "bf16"):
        append("f32", cache, hard())


def test_append_divides_exactly_by_any_scale():
    scales = [1.0, 1.75, 0.37, 2.0**-126, 3e38]
    more = [0.4375, 1.375, 0.037, 448.0, 0.01, 300.0, 64.0, 2.0**-101, 2.0**-100, 2.0**-99.5, 2.0**99.5, 2.0**100, 2.0**127, 4e-38]
    for k_scale in scales + (more if FULL else []):
        with np.errstate(all="ignore"):
            near = (TIES * np.float64(np.float32(k_scale))).astype(np.float32)
        near = near[np.isfinite(near) & (near > 0)].view(np.uint32)
        append("f32", "e4m3", with_signs(np.concatenate([near, near - 1, near + 1, ENDS, usual(500)])), k_scale=k_scale)
        for dtype in ("f16", "bf16"):
            append(dtype, "e4m3", every_code(), k_scale=k_scale)


def merge(dtype, body, tokens, heads, dim, offset=0, pads=(0, 0), by_head=False, wants_lse=True, threads=128, output_scale=1.0):
    """One merge with empty sides, extreme LSEs, NaN in empty sides, and gaps that must not change."""
    rng = np.random.default_rng(tokens * 1000 + heads * 100 + dim)
    size = np.dtype(BITS[dtype]).itemsize
    near, far = dim + pads[0], (tokens if by_head else heads) * (dim + pads[0]) + pads[1]
    strides = (near, far) if by_head else (far, near)
    row_at = offset + np.arange(tokens)[:, None] * strides[0] + np.arange(heads)[None] * strides[1]
    at, count = row_at[..., None] + np.arange(dim), row_at.max() + dim
    lse_at = np.arange(tokens)[:, None] + 1 + np.arange(heads)[None] * (tokens + 1)

    def side():
        lse = (rng.standard_normal((tokens, heads)) * 5).astype(np.float32)
        kind = rng.integers(0, 14, lse.shape)
        for i, value in enumerate([-np.inf, np.inf, np.nan, 3e38, -3e38, 0, 100, -100]):
            lse[kind == i] = value
        codes = encoded(dtype, rng.standard_normal(at.shape).astype(np.float32).view(np.uint32))
        codes[~np.isfinite(lse)] = encoded(dtype, np.array([0x7FC00000], np.uint32))
        array, lses = random_bits(rng, count, dtype), np.full(lse_at.max() + 1, np.nan, np.float32)
        array[at], lses[lse_at] = codes, lse
        return codes, lse, array, lses

    device, sides = Device(), [side(), side()]
    before, lse_before = random_bits(rng, count, dtype), random_bits(rng, lse_at.max() + 1, "f32")
    output, output_lse = device.buffer(before), device.buffer(lse_before)
    unit = 1 if body == "elements" else 16 // size
    form = "<QQQ" if body == "elements" else "<QII"

    def rows(address, elements, strides, unit, size):
        used = [stride // unit if number > 1 else 0 for number, stride in zip((tokens, heads), strides)]
        return struct.pack(form, address + elements * size, *used)

    items = tokens * heads * dim // unit
    args = struct.pack("<3If4I", items, dim // unit, heads, output_scale, *divisor(dim // unit), *divisor(heads))
    for _, _, _, lses in sides:
        args += rows(device.buffer(lses, False), 1, (1, tokens + 1), 1, 4)
    for address in [device.buffer(array, False) for _, _, array, _ in sides] + [output]:
        args += rows(address, offset, strides, unit, size)
    args += rows(output_lse, 1, (1, tokens + 1), 1, 4) if wants_lse else struct.pack(form, 0, 0, 0)
    entry = kernels("shaders/cuda/ptx/merge_state.ptx")[f"merge_state_{body}_{dtype}"]
    grid = -(-items // (threads * (2 if body == "units2" else 1)))
    device.launch(entry, (grid, 1, 1), [args], block=(threads, 1, 1))

    got, got_lse = device.read(output), device.read(output_lse)
    has = [np.isfinite(lse) for _, lse, _, _ in sides]
    both = has[0] & has[1]
    want, want_lse = np.zeros(at.shape, BITS[dtype]), np.full((tokens, heads), 0xFF800000, np.uint32)
    for (codes, lse, _, _), mine in zip(sides, has):
        want[mine], want_lse[mine] = codes[mine], lse.view(np.uint32)[mine]
    if output_scale != 1:
        scaled = f32_bits(dtype, want).view(np.float32) * np.float32(output_scale)
        want = encoded(dtype, scaled.view(np.uint32))
    assert (got[at][~both] == want[~both]).all(), "rows of one side or none"
    x, y = (f32_bits(dtype, codes[both]).view(np.float32).astype(np.float64) for codes, _, _, _ in sides)
    lses = np.array([lse[both] for _, lse, _, _ in sides], np.float64)
    shares = np.exp(lses - lses.max(0))
    merged, weights = lses.max(0) + np.log(shares.sum(0)), (shares / shares.sum(0))[..., None]
    close(f32_bits(dtype, got[at][both]).view(np.float32), (weights[0] * x + weights[1] * y) * output_scale, TOLERANCE[dtype])
    if wants_lse:
        assert (got_lse[lse_at][~both] == want_lse[~both]).all(), "LSEs of one side or none"
        close(got_lse[lse_at][both].view(np.float32), merged, 2e-6)
        lse_before[lse_at] = got_lse[lse_at]
    before[at] = got[at]
    assert (got == before).all() and (got_lse == lse_before).all(), "a gap was written"


def close(got, want, tolerance):
    error = np.abs(got - want) / np.maximum(1, np.abs(want))
    assert (error <= tolerance).all(), f"{error.max()} is over {tolerance}"


def test_merge_units():
    for dtype in TOLERANCE:
        unit = 16 // np.dtype(BITS[dtype]).itemsize
        for body in ("units1", "units2"):
            merge(dtype, body, 5, 6, 128)
            merge(dtype, body, 7, 3, 96, offset=unit, pads=(unit, 2 * unit), threads=64)
            merge(dtype, body, 9, 2, unit, pads=(0, unit), by_head=True, threads=32)
            merge(dtype, body, 1, 4, 128, wants_lse=False, threads=256)
            merge(dtype, body, 6, 1, 5 * unit, output_scale=0.25)


def test_merge_elements():
    for dtype in TOLERANCE:
        for dim in (1, 7, 33, 100):
            merge(dtype, "elements", 5, 3, dim, offset=1, pads=(1, 3))
        merge(dtype, "elements", 6, 3, 33, offset=3, pads=(0, 5), by_head=True, wants_lse=False)
        merge(dtype, "elements", 1, 5, 17)
        merge(dtype, "elements", 5, 1, 17, output_scale=0.25)


def copy_pages(dtype, body, row, page_size, pad, cut=None):
    rng = np.random.default_rng(row + page_size)
    size, stride, num_pages = np.dtype(BITS[dtype]).itemsize, page_size * row + pad, 7
    before = random_bits(rng, 8 + (num_pages - 1) * stride + page_size * row, dtype)
    copies = [(3, 0), (3, 6), (1, 2)]
    wild = [(9, 4), (4, 9)]
    device = Device()
    # A table with room for two more, of what an earlier step copied.
    used = np.array(copies + wild, np.uint32)
    words = np.concatenate([[len(used)], used.ravel(), [0, 5], [1, 3]]).astype(np.uint32)
    kv, table = device.buffer(before), device.buffer(words, False)
    units = page_size * row * size // (16 if body == "wide" else 4)
    blocks = -(-units // 1024)
    # With a cut, from the pages before it to a slab of those from it on.
    source, target = (0, num_pages), (0, num_pages)
    if cut:
        source, target = (0, cut), (cut, num_pages - cut)
    at = kv + 8 * size
    args = struct.pack("<4Q", at, at + target[0] * stride * size, table, stride * size)
    args += struct.pack("<8I", *source, *target, units, blocks, len(used) + 2, 0)
    entry = kernels("shaders/cuda/ptx/kv_copy_pages.ptx")[f"kv_copy_pages_{body}"]
    # a block more than there is work for
    device.launch(entry, ((len(used) + 2) * blocks + 1, 1, 1), [args])
    want = before.copy()
    for source, target in [copy for copy in copies if not cut or copy[0] < cut <= copy[1]]:
        want[8 + target * stride :][: page_size * row] = before[8 + source * stride :][: page_size * row]
    assert (device.read(kv) == want).all(), f"{dtype} {body} {row} x {page_size}"


def test_copy_pages():
    copy_pages("f16", "wide", 576, 16, 0)
    copy_pages("f32", "wide", 576, 2, 8)
    copy_pages("e4m3", "words", 576, 1, 8)
    copy_pages("e4m3", "words", 4, 1, 8)
    copy_pages("bf16", "words", 288, 16, 8)
    copy_pages("bf16", "wide", 288, 16, 8, cut=2)
