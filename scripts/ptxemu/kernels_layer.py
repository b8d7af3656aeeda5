"""head_project and mla_prefill against f64."""

import struct

import numpy as np

from kernels_rope import CODES, Rows, size_of
from kernels_small_ops import divisor, encoded, f32_bits
from launch import Device, kernels
from tma import tensor_map

# The allowed error as a share of a row's largest magnitude: f32 sums, and half a unit in the last place.
ERROR = {"f32": 1e-5, "f16": 2.0**-10, "bf16": 2.0**-7}
POISON = 0xFF
MOST = 3.402823466e38  # of f32


def codes(dtype, x):
    return encoded(dtype, np.asarray(x, np.float32).view(np.uint32))


def wide(dtype, array):
    return f32_bits(dtype, array).view(np.float32).astype(np.float64)


def place(rows, address):
    return struct.pack("<3Q", rows.first(address), *rows.steps())


def near(what, dtype, got, want, share=1.0):
    """Elements of rows; the last axis is a row's."""
    allowed = ERROR[dtype] * share * np.abs(want).max(-1, keepdims=True) + (1e-7 if dtype == "f16" else 0)
    wrong = ~(np.abs(got - want) <= allowed)
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size}, the first at {np.argwhere(wrong)[0]}, off by {np.nanmax(np.abs(got - want) / allowed):.2f} of what is allowed"


def project(dtypes, tokens, heads, k, n, is_kn, first=0, count=None, shared=False, entry=None, tile=None, pads=(8, 16), scale=1.0, limit=MOST):
    """`tile` is that of a variant on tensor cores: tokens and columns."""
    rng = np.random.default_rng(tokens * 100 + k + n)
    count = tokens if count is None else count
    x_dtype, w_dtype, y_dtype = dtypes
    device = Device()
    x = Rows(rng, x_dtype, (tokens, 1 if shared else heads, k), 8, pads)
    w = Rows(rng, w_dtype, (k if is_kn else n, heads, n if is_kn else k), 16, pads)
    y = Rows(rng, y_dtype, (tokens, heads, n), 8, pads)
    x_codes = codes(x_dtype, rng.standard_normal((tokens, 1 if shared else heads, k)))
    w_codes = codes(w_dtype, rng.standard_normal((k if is_kn else n, heads, n if is_kn else k)))
    for rows in (x, w):
        rows.before[:] = np.frombuffer(bytes([POISON]) * rows.before.nbytes, rows.before.dtype)
    out = device.buffer(y.before)
    args = place(x, device.buffer(x.holding(x_codes), False)) + place(w, device.buffer(w.holding(w_codes), False)) + place(y, out)
    name, block, width, ptx, shared_limit = *(("head_project_few", 16) if tokens <= 16 else ("head_project_many", 64)), 64, "head_project", 0
    if entry:
        name, block = entry
    if tile:
        (block, width), by = tile, "wgmma" if tile in WGMMA else "mma"
        ptx = f"head_project_{by}_{w_dtype}"
        name = f"head_project_{by}_m{block}n{width}_{'kn' if is_kn else 'nk'}_{w_dtype}"
    kernel = kernels(f"shaders/cuda/ptx/{ptx}.ptx")[name]
    if tile:
        shared_limit = int.from_bytes(kernel.data[f"{name}_shared_bytes"], "little")
    columns, tiles = -(-n // width), -(-tokens // block)
    args += struct.pack("<Q", device.buffer(np.array([count, first], np.uint32), False))
    args += struct.pack("<11I2fI", tokens, k // 4, n // 4, *(CODES[dtype] for dtype in dtypes), is_kn, columns, tiles, columns * tiles * heads, 0, scale, limit, 0)
    args += struct.pack("<4I", *divisor(columns), *divisor(tiles))
    grid, params, shared_bytes = columns * tiles * heads, [args], min(shared_limit, -(-k // 64) * (block + width) * 128)
    if tile in WGMMA:
        # Persistent blocks.
        box = (64, width // 64) if is_kn else (width, 1)
        params.append(maps(args[:24], k, tokens, heads, block, 1) + maps(args[24:48], n if is_kn else k, k if is_kn else n, heads, *box))
        grid, shared_bytes = min(grid, 3), shared_limit
    device.launch(kernel, (grid, 1, 1), params, shared=shared_bytes)

    got = device.read(out)
    some = slice(first, min(first + count, tokens))
    want = np.einsum("thk,khn->thn" if is_kn else "thk,nhk->thn", np.broadcast_to(wide(x_dtype, x_codes), (tokens, heads, k)), wide(w_dtype, w_codes))
    want = np.clip(want * scale, -limit, limit)
    near(f"{dtypes} {tokens} {k} {n}", y_dtype, wide(y_dtype, got[y.at[some]]), want[some])
    kept = y.before.copy()
    kept[y.at[some]] = got[y.at[some]]
    assert (got == kept).all(), "written outside of the range"
    return got[y.at[some]]


def test_project():
    project(("f32", "f32", "f32"), 3, 2, 40, 72, 1)
    project(("f16", "bf16", "f32"), 5, 2, 24, 136, 0, shared=True)
    project(("bf16", "f16", "bf16"), 17, 2, 64, 64, 1)
    project(("f32", "bf16", "f16"), 70, 1, 8, 8, 0, scale=0.25, limit=1.5)


def test_project_of_a_range():
    project(("bf16", "bf16", "bf16"), 9, 2, 40, 24, 1, first=2, count=3)
    project(("bf16", "bf16", "f32"), 20, 1, 16, 8, 0, first=18, count=9)
    project(("f32", "f16", "f16"), 4, 2, 8, 16, 0, count=0)


def test_project_of_few_and_many_gives_the_same_bits():
    few = project(("f16", "f16", "f32"), 11, 2, 72, 72, 1)
    many = project(("f16", "f16", "f32"), 11, 2, 72, 72, 1, entry=("head_project_many", 64))
    assert (few == many).all()


WGMMA = [(256, 128), (128, 256)]  # by `is_kn`
TILES = [(16, 32), (64, 32), (64, 64), (128, 128)]


def project_mma(dtype):
    """Each tile: k and n that fill it, and ends of both; more slices of k than stages, and fewer; every dtype of y."""
    for turn, (tokens, columns) in enumerate(TILES):
        y_dtype = (dtype, "f32", "f16", "bf16")[turn % 4]
        for is_kn in (0, 1):
            project((dtype, dtype, y_dtype), tokens + 3, 2, 72, columns + 40, is_kn, tile=(tokens, columns))
            project((dtype, dtype, "f32" if y_dtype == dtype else dtype), 5, 1, (8, 640)[is_kn ^ turn % 2], (8, 136)[turn % 2], is_kn, tile=(tokens, columns), shared=True)


def test_project_mma_bf16():
    project_mma("bf16")


def test_project_mma_f16():
    project_mma("f16")


def test_project_mma_of_a_range():
    for is_kn, tile in ((1, (16, 32)), (0, (64, 64))):
        project(("bf16", "bf16", "bf16"), 39, 2, 40, 24, is_kn, first=2, count=33, tile=tile)
        project(("bf16", "bf16", "f32"), 70, 1, 16, 8, is_kn, first=68, count=0xFFFFFFFF, tile=tile)
        project(("f16", "f16", "f16"), 40, 2, 8, 16, is_kn, first=30, count=7, tile=tile, scale=0.5, limit=1.0)
        project(("f16", "f16", "f16"), 40, 2, 8, 16, is_kn, first=0xFFFFFFFF, count=7, tile=tile)
        project(("f16", "f16", "f16"), 40, 2, 8, 16, is_kn, count=0, tile=tile)


def test_project_wgmma():
    """Parts of tiles, more slices than stages, more tiles than blocks; every dtype of y."""
    for is_kn, tile in enumerate(WGMMA):
        project(("f16", "f16", "f32"), tile[0] + 3, 2, 64, tile[1] + 64, is_kn, tile=tile)
        project(("bf16", "bf16", "bf16"), 70, 2, 384, 64, is_kn, tile=tile, shared=True)
        project(("bf16", "bf16", "f16"), 70, 1, 128, 64, is_kn, first=68, count=0xFFFFFFFF, tile=tile, scale=8.0, limit=100.0)
        project(("f16", "f16", "f16"), 300, 1, 64, 64, is_kn, first=2, count=9, tile=tile)
        project(("f16", "f16", "f16"), 40, 2, 64, 64, is_kn, count=0, tile=tile)


def test_project_mma_of_each_tile_gives_the_same_bits():
    for is_kn in (0, 1):
        few, *others = [project(("f16", "f16", "f32"), 35, 2, 128, 64, is_kn, tile=tile) for tile in [*TILES, WGMMA[is_kn]]]
        assert all((few == other).all() for other in others)


def tiles(sequences, rows, shift):
    """Tiles as src/ops/mla_prefill/tiles.rs cuts them, of (q_begin, q_len, kv_begin, kv_len, first or None); output rows are `shift` further."""
    for q_begin, q_len, kv_begin, kv_len, first in sequences:
        for begin in range(0, q_len, rows):
            count = min(rows, q_len - begin)
            keys = kv_len if first is None else min(max(first + begin + count - 1, 0), kv_len)
            seen = keys if first is None else min(max(first + begin, -rows), keys)
            yield q_begin + begin, count, kv_begin, keys, seen & 0xFFFFFFFF, q_begin + begin + shift


SEQUENCES = [(1, 5, 2, 9, 5), (7, 3, 12, 67, None), (10, 4, 80, 3, -2), (14, 2, 3, 0, None), (17, 40, 83, 40, 1)]


VALUES = 0.3  # their standard deviation


def prefill(dtype, out_dtype, heads, nope, rope, value, sequences=SEQUENCES, room=1, size=1.0, max_tokens=None, shift=0, variant="simple", section=1, alike=False, v_scale=1.0):
    """`alike`: all values are the same row."""
    rng = np.random.default_rng(nope + value)
    ptx = "mla_prefill" if variant == "simple" else f"mla_prefill_{variant.split('_')[0]}_{dtype}"
    name, block = ("mla_prefill_exact", 32) if dtype == "f32" else ("mla_prefill_128", 64) if value <= 128 else ("mla_prefill_256", 32)
    if variant != "simple":
        name = f"mla_prefill_{variant}_{nope + rope}_{value}_{dtype}"
        block = int(variant.split("_m")[1])
    tokens = max(q + n for q, n, *_ in sequences) + 1
    keys = max(begin + n for _, _, begin, n, _ in sequences) + 1
    limit = tokens if max_tokens is None else max_tokens
    scale, device = 0.1147, Device()
    seen = {s: (k, min(max(k if f is None else f + i, 0), k)) for b, n, s0, k, f in sequences for i in range(n) for s in [(b + i, s0)]}
    queried, used = np.zeros(tokens, bool), np.zeros(keys, bool)
    for (token, begin), (_, visible) in seen.items():
        queried[token] = True
        used[begin : begin + visible] = True

    def array(flags, shared, dim, factor):
        rows = Rows(rng, dtype, (len(flags), 1 if shared else heads, dim), 8, (8, 16))
        rows.before[:] = np.frombuffer(bytes([POISON]) * rows.before.nbytes, rows.before.dtype)
        drawn = rng.standard_normal((len(flags), 1 if shared else heads, dim)) * factor
        if alike and factor == VALUES:
            drawn[:] = 0.1 + 0.0137 * np.arange(dim)
        values = codes(dtype, drawn)
        holding = rows.before.copy()
        holding[rows.at[flags]] = values[flags]
        return place(rows, device.buffer(holding, False)), np.broadcast_to(wide(dtype, values), (len(flags), heads, dim))

    q_nope, k_nope, v = array(queried, False, nope, size), array(used, False, nope, 1.0), array(used, False, value, VALUES)
    q_pe, k_pe = (array(queried, False, rope, size), array(used, True, rope, 1.0)) if rope else (q_nope, k_nope)
    out, lse = Rows(rng, out_dtype, (tokens + shift, heads, value), 8, (8, 0)), Rows(rng, "f32", (tokens + shift, heads, 1), 1, (0, 3))
    out_at, lse_at = device.buffer(out.before), device.buffer(lse.before)
    work = list(tiles(sequences, block, shift))
    words = np.array([len(work), *np.ravel(work), *[0] * (6 * room)], np.uint32)
    args = q_nope[0] + q_pe[0] + k_nope[0] + k_pe[0] + v[0] + place(out, out_at) + place(lse, lse_at)
    args += struct.pack("<Qf", device.buffer(words, False), np.float32(scale * np.log2(np.e)))
    args += struct.pack("<5I", limit, keys, limit + shift, len(work) + room, heads)
    args += struct.pack("<6I", nope // 4, (nope + rope) // 4, value // 4, CODES[dtype], CODES[out_dtype], section)
    args += struct.pack("<fI2I", v_scale, 0, *divisor(heads))
    entry = kernels(f"shaders/cuda/ptx/{ptx}.ptx")[name]
    shared = int.from_bytes(entry.data.get(f"{name}_shared_bytes", b""), "little")
    params = [args]
    if variant.startswith("wgmma"):
        block_keys = int.from_bytes(entry.data[f"{name}_tokens"], "little")
        params.append(b"".join([maps(q_nope[0], nope, limit, heads, block), maps(q_pe[0], rope, limit, heads, block)] + [maps(array[0], dim, keys, heads, block_keys) for array, dim in ((k_nope, nope), (k_pe, rope), (v, value))]))
    device.launch(entry, ((len(work) + room) * heads, 1, 1), params, shared=shared)

    got, got_lse = device.read(out_at), device.read(lse_at)
    kept, kept_lse = out.before.copy(), lse.before.copy()
    for (token, begin), (_, visible) in seen.items():
        if token >= limit:
            continue
        kept[out.at[token + shift]], kept_lse[lse.at[token + shift]] = got[out.at[token + shift]], got_lse[lse.at[token + shift]]
        if visible == 0:
            assert (got[out.at[token + shift]] == 0).all() and (got_lse[lse.at[token + shift]] == 0xFF800000).all(), f"token {token} sees no key"
            continue
        some = slice(begin, begin + visible)
        logits = np.einsum("hd,shd->hs", q_nope[1][token], k_nope[1][some])
        if rope:
            logits += np.einsum("hd,shd->hs", q_pe[1][token], k_pe[1][some])
        logits *= np.float32(scale)
        top = logits.max(-1, keepdims=True)
        powers = np.exp(logits - top)
        want = np.einsum("hs,shd->hd", powers / powers.sum(-1, keepdims=True), v[1][some]) * v_scale
        # On tensor cores weights are rounded too, to the inputs' dtype; their errors are those of values larger than their mean.
        coarser, share = (out_dtype, 0.1 if alike else 1.0) if variant == "simple" else (dtype, 4.0)
        near(f"token {token}", coarser, wide(out_dtype, got[out.at[token + shift]]), want, share)
        want_lse = top[:, 0] + np.log(powers.sum(-1))
        error = np.abs(got_lse[lse.at[token + shift]].view(np.float32)[:, 0] - want_lse)
        assert (error <= 1e-5 + 2e-6 * np.abs(want_lse)).all(), f"token {token}: lse off by {error.max()}"
    assert (got == kept).all() and (got_lse == kept_lse).all(), "written outside of the sequences"


def maps(array, dim, tokens, heads, box, lines=None):
    """The TMA tensor map of an array's rows: see src/cuda/kernels/tensor_map.rs."""
    if dim == 0:
        return bytes(128)
    address, token_stride, head_stride = struct.unpack("<3Q", array)
    one = heads == 1 or head_stride == 0
    return tensor_map(address, 2, dims=[64, tokens, dim // 64, 1 if one else heads], strides=[token_stride, 128, 128 if one else head_stride], box=[64, box, lines or dim // 64, 1], swizzle=128)


def test_prefill():
    prefill("f32", "f32", 2, 16, 32, 16)
    prefill("bf16", "bf16", 3, 24, 0, 72, shift=5, section=2)
    prefill("f16", "f32", 1, 40, 8, 136, v_scale=8.0)


def test_prefill_of_large_logits():
    prefill("f32", "f32", 3, 16, 32, 16, size=40.0)


def test_prefill_of_many_keys():
    """One running sum is off by 4e-6 over 500 keys."""
    prefill("f32", "f32", 1, 8, 0, 136, sequences=[(0, 2, 1, 500, None)], size=0.0, alike=True)


def test_prefill_of_a_binding_for_less():
    prefill("f16", "f16", 1, 8, 8, 8, max_tokens=12, sequences=SEQUENCES[:3])


# Tiles of several blocks of keys, a whole tile and a part of one, rows that see nothing.
LONG = [(1, 5, 2, 9, 5), (7, 3, 12, 167, None), (10, 4, 180, 3, -2), (14, 2, 3, 0, None), (17, 140, 183, 140, 1)]


def test_prefill_mma_f16():
    prefill("f16", "f16", 2, 128, 64, 128, LONG, variant="mma_m128")
    prefill("f16", "f32", 1, 192, 64, 256, LONG, variant="mma_m64", shift=5, v_scale=8.0)


def test_prefill_mma_bf16():
    prefill("bf16", "bf16", 2, 64, 32, 64, LONG, variant="mma_m64")
    prefill("bf16", "f32", 1, 128, 0, 128, LONG[:3], variant="mma_m128", max_tokens=12)
    prefill("bf16", "bf16", 1, 128, 64, 128, LONG, variant="mma_m64")


def test_prefill_wgmma_f16():
    prefill("f16", "f16", 3, 128, 64, 128, LONG, variant="wgmma_m128", section=2)
    prefill("f16", "f32", 1, 192, 64, 256, LONG, variant="wgmma_m128", shift=5)


def test_prefill_wgmma_bf16():
    prefill("bf16", "bf16", 1, 64, 64, 128, [*LONG, (160, 3, 330, 600, None)], variant="wgmma_m128", max_tokens=161)
