"""rope and rope_append against numpy, bit for bit."""

import struct

import numpy as np

from kernels_small_ops import BITS, divisor, e4m3_scale, encoded, f32_bits, random_bits
from launch import Device, kernels

MAX_POSITION = 40
NAN = np.uint32(0x7FC00000)
CODES = {"f32": 0, "f16": 1, "bf16": 2}


def size_of(dtype):
    return np.dtype(BITS[dtype]).itemsize


def values(rng, dtype, shape):
    """Codes of usual numbers, of non-finite ones, and of subnormals."""
    x = rng.standard_normal(shape).astype(np.float32)
    kind = rng.integers(0, 40, shape)
    for i, value in enumerate([np.inf, -np.inf, np.nan, 0, 3e-8, 300, -1e4]):
        x[kind == i] = value
    return encoded(dtype, x.view(np.uint32))


def angles(rng, dim):
    return rng.uniform(-1, 1, (MAX_POSITION, dim)).astype(np.float32)


def positions(rng, tokens):
    some = rng.integers(0, MAX_POSITION, tokens).astype(np.int32)
    some[::3] = np.resize([-1, MAX_POSITION, 2**31 - 1, -(2**31), 0], len(some[::3]))
    return some


def fused(a, b, c):
    """An f32 fma: products of two f32 are exact in f64."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def rotated(dtype, codes, places, table, interleaved):
    """[tokens, heads, dim] codes."""
    half = codes.shape[-1] // 2
    rows = table[np.clip(places, 0, MAX_POSITION - 1)][:, None, :]
    cos, sin = rows[..., :half], rows[..., half:]
    bits = f32_bits(dtype, codes)
    x, y = (bits[..., 0::2], bits[..., 1::2]) if interleaved else (bits[..., :half], bits[..., half:])
    both = (x & 0x7F800000 != 0x7F800000) & (y & 0x7F800000 != 0x7F800000)
    x, y = (np.where(both, part, 0).astype(np.uint32).view(np.float32) for part in (x, y))
    turned = [fused(x, cos, -(y * sin)), fused(y, cos, x * sin)]
    turned = [np.where(both, part.view(np.uint32), NAN) for part in turned]
    out = np.empty_like(bits)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = turned
    else:
        out[..., :half], out[..., half:] = turned
    return encoded(dtype, out)


class Rows:
    """[tokens, heads, dim] in a buffer with gaps, behind `offset` elements."""

    def __init__(self, rng, dtype, shape, offset, pads):
        tokens, heads, dim = shape
        near, far = dim + pads[0], heads * (dim + pads[0]) + pads[1]
        at = offset + np.arange(tokens)[:, None] * far + np.arange(heads)[None] * near
        self.dtype, self.offset, self.strides = dtype, offset, (far if tokens > 1 else 0, near if heads > 1 else 0)
        self.at, self.count = at[..., None] + np.arange(dim), int(at.max()) + dim
        self.before = random_bits(rng, self.count, dtype)

    def holding(self, codes):
        array = self.before.copy()
        array[self.at] = codes
        return array

    def first(self, address):
        return address + self.offset * size_of(self.dtype)

    def steps(self):
        return [stride * size_of(self.dtype) for stride in self.strides]


def rope_args(x, x_address, y, y_address, places, table, dim, heads, interleaved, scale=1.0):
    args = struct.pack("<6Q", x.first(x_address), y.first(y_address), *x.steps(), *y.steps())
    return args + struct.pack("<2Q4IfI2I", places, table, MAX_POSITION, dim // 8, dim // 8 * heads, interleaved, scale, 0, *divisor(dim // 8))


def rope(dtype, tokens, heads, dim, interleaved, in_place, first=0, count=None, offset=0, pads=(0, 0), scale=1.0):
    rng = np.random.default_rng(tokens * 100 + heads * 10 + dim)
    count = tokens if count is None else count
    device, shape = Device(), (tokens, heads, dim)
    codes, table, places = values(rng, dtype, shape), angles(rng, dim), positions(rng, tokens)
    x, y = Rows(rng, dtype, shape, offset, pads), Rows(rng, dtype, shape, 2 * offset, (pads[1], pads[0]))
    if in_place:
        y = x
        x_address = y_address = device.buffer(x.holding(codes))
        before = x.holding(codes)
    else:
        x_address, y_address = device.buffer(x.holding(codes), False), device.buffer(y.before)
        before = y.before.copy()
    at = device.buffer(places, False), device.buffer(table, False)
    args = rope_args(x, x_address, y, y_address, *at, dim, heads, interleaved, scale)
    ranges = device.buffer(np.array([count, first], np.uint32), False)
    args += struct.pack("<Q4I", ranges, *divisor(dim // 8 * heads), tokens, 0)
    grid = -(-tokens * (dim // 8 * heads) // 128)
    device.launch(kernels("shaders/cuda/ptx/rope.ptx")[f"rope_{dtype}"], (grid, 1, 1), [args])
    some = slice(first, min(first + count, tokens))
    before[y.at[some]] = rotated(dtype, codes[some], places[some], table * np.float32(scale), interleaved)
    wrong = np.flatnonzero(device.read(y_address) != before)
    assert not len(wrong), f"{dtype} {shape}: {len(wrong)} elements, the first is {wrong[0]}"


def test_rope():
    for dtype in CODES:
        for interleaved in (0, 1):
            rope(dtype, 5, 3, 64, interleaved, False)
            rope(dtype, 7, 1, 32, interleaved, True, offset=4, pads=(4, 8))
            rope(dtype, 3, 2, 8, interleaved, False, offset=8, pads=(4, 12), scale=0.25)


def test_rope_of_a_range():
    rope("bf16", 9, 2, 64, 1, True, first=2, count=3)
    rope("f16", 9, 2, 64, 0, False, first=7, count=2)
    # A table for more than the binding has.
    rope("f32", 4, 2, 32, 1, False, first=3, count=9)
    rope("f32", 4, 2, 32, 1, False, count=0)


def append(query, dtype, cache, interleaved, in_place, tokens, room=0, heads=3, latent=256, rope=32, page_size=3, k_scale=1.0, pad=0, first_page=0, q_pe_scale=1.0):
    """Compares the whole cache and all queries. Tables and inputs have `room` for more tokens, which must write nothing."""
    rng = np.random.default_rng(tokens + page_size)
    most, row = tokens + room, latent + rope
    device, table, places = Device(), angles(rng, rope), positions(rng, most)
    codes = values(rng, query, (most, heads, rope))
    x, y = Rows(rng, query, (most, heads, rope), pad, (pad, 0)), Rows(rng, query, (most, heads, rope), 4, (4, 4))
    q = device.buffer(x.holding(codes), in_place)
    y, out = (x, q) if in_place else (y, device.buffer(y.before))
    want_out = x.holding(codes) if in_place else y.before.copy()

    latents, keys = values(rng, dtype, (most, 1, latent)), values(rng, dtype, (most, 1, rope))
    kv_c_rows, k_pe_rows = Rows(rng, dtype, (most, 1, latent), pad, (pad, 0)), Rows(rng, dtype, (most, 1, rope), pad, (pad, 0))
    kv_c, k_pe = device.buffer(kv_c_rows.holding(latents), False), device.buffer(k_pe_rows.holding(keys), False)
    num_pages = -(-most // page_size) + 2
    slots = rng.permutation(num_pages * page_size)[:most]
    slots[1::5] = -1
    # The slab begins at a page of the pool; tokens of other slabs are not written, and queries are rotated with the first slab only.
    first = first_page * page_size
    listed = np.where(slots < 0, -1, slots + first)
    if first:
        listed[2::5], slots[2::5] = first - 1, -1
    stride = page_size * row + 8
    before = random_bits(rng, 8 + (num_pages - 1) * stride + page_size * row, cache)
    kv = device.buffer(before)
    words = device.buffer(np.concatenate([[tokens], listed]).astype(np.uint32), False)

    args = rope_args(x, q, y, out, device.buffer(places, False), device.buffer(table, False), rope, heads, interleaved, q_pe_scale)
    firsts = kv_c_rows.first(kv_c), k_pe_rows.first(k_pe)
    steps = kv_c_rows.steps()[0], k_pe_rows.steps()[0]
    is_wide = all(number % 16 == 0 for number in [*firsts, *steps])
    args += struct.pack("<7Q", *firsts, kv + 8 * size_of(cache), words, *steps, stride * size_of(cache))
    args += struct.pack("<8I", most, num_pages * page_size, first, 0, page_size, latent // 8, row // 8, is_wide)
    args += struct.pack("<4I3fI", *divisor(row // 8), *divisor(page_size), *e4m3_scale(k_scale))
    items = [-(-units // 32) * 32 for units in (rope // 8 * heads, rope // 8)]
    items.append(sum(items) + latent // 8)
    args += struct.pack("<4I2I", CODES[query], *items, *divisor(items[2]))
    entry = kernels("shaders/cuda/ptx/rope_append.ptx")[f"rope_append_{dtype}_{cache}"]
    device.launch(entry, (-(-most * items[2] // 128), 1, 1), [args])

    if not first:
        want_out[y.at[:tokens]] = rotated(query, codes[:tokens], places[:tokens], table * np.float32(q_pe_scale), interleaved)
    wrong = np.flatnonzero(device.read(out) != want_out)
    assert not len(wrong), f"q_pe of {query}: {len(wrong)} elements, the first is {wrong[0]}"
    new = np.concatenate([latents, rotated(dtype, keys, places, table, interleaved)], -1)[:, 0]
    new = new if dtype == cache else encoded(cache, f32_bits(dtype, new), k_scale)
    want = before.copy()
    for token in np.flatnonzero(slots[:tokens] >= 0):
        at = 8 + slots[token] // page_size * stride + slots[token] % page_size * row
        want[at : at + row] = new[token]
    wrong = np.flatnonzero(device.read(kv) != want)
    assert not len(wrong), f"{dtype} to {cache}, k_scale {k_scale}: {len(wrong)} elements, the first is {wrong[0]}"


def test_append_of_every_pair():
    turn = 0
    for dtype in CODES:
        for cache in BITS:
            query = list(CODES)[(turn + turn // 4) % 3]
            scale = (0.37, 2.0**-126)[turn % 2] if cache == "e4m3" else 1.0
            append(query, dtype, cache, turn % 2, turn // 2 % 2 == 0, 4, k_scale=scale, pad=4 * (turn % 3))
            turn += 1


def test_append_of_fewer_tokens_than_a_grid_is_for():
    for tokens, room in [(0, 2), (1, 3), (5, 1)]:
        append("bf16", "bf16", "e4m3", 1, True, tokens, room, heads=16, latent=512, rope=64, page_size=64, k_scale=0.25, q_pe_scale=0.25)
    append("f16", "f32", "bf16", 0, False, 2, 1, heads=20)
    append("f16", "bf16", "f16", 0, True, 7, 1, first_page=4)
