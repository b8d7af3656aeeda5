"""merge_states and correct_attn_out against f64: any number of sets, both bases, rows by quads and by elements, empty sets and weights of 0."""

import struct

import numpy as np

from kernels_small_ops import BITS, TOLERANCE, divisor
from launch import Device, kernels

CODES = {"f32": 0, "f16": 1, "bf16": 2}
THREADS = 256


def narrow(dtype, x):
    """f32 values to codes and what these stand for."""
    if dtype == "bf16":
        codes = (x.view(np.uint32) >> 16).astype(np.uint16)
        return codes, (codes.astype(np.uint32) << 16).view(np.float32)
    codes = x.astype({"f32": np.float32, "f16": np.float16}[dtype])
    return codes.view(BITS[dtype]), codes.astype(np.float32)


def widened(dtype, codes):
    if dtype == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    return codes.view({"f32": np.float32, "f16": np.float16}[dtype]).astype(np.float32)


def problem(dtype, sets, tokens, heads, size):
    """Rows of all kinds: plain, with an empty set, of one set, of none, with a finite LSE so far below that its weight is 0, and each set
    far above the last. What has no weight holds NaN."""
    random = np.random.default_rng(sets * tokens * size)
    lse = random.standard_normal((sets, tokens * heads)).astype(np.float32) * 3
    for row in range(tokens * heads):
        kind = row % 6
        if kind == 1:
            lse[row % sets, row] = [-np.inf, np.inf, np.nan][row // 6 % 3]
        elif kind == 2:
            lse[np.arange(sets) != row % sets, row] = -np.inf
        elif kind == 3:
            lse[:, row] = np.nan
        elif kind == 4 and sets > 1:
            lse[row % sets, row] = -10000
        elif kind == 5:
            lse[:, row] += 60 * np.arange(sets)
    states = random.standard_normal((sets, tokens * heads, size)).astype(np.float32) / 10
    with np.errstate(invalid="ignore"):
        top = np.where(np.isfinite(lse), lse, -np.inf).max(axis=0)
        states[~np.isfinite(lse) | (lse < top - 170)] = np.nan
    codes, values = narrow(dtype, states)
    return lse, codes, values.astype(np.float64)


def expected(lse, values, base):
    """Weights [sets, rows] and LSEs, in f64; weights that are 0 in f32 are 0."""
    natural = np.where(np.isfinite(lse), lse.astype(np.float64), -np.inf) * (np.log(2) if base == 2 else 1)
    with np.errstate(all="ignore"):
        top = natural.max(axis=0)
        weights = np.exp(natural - np.where(np.isfinite(top), top, 0))
        total = weights.sum(axis=0)
        whole = (top + np.log(total)) / (np.log(2) if base == 2 else 1)
        weights = np.where((total > 0) & (weights.astype(np.float32) > 0), weights / np.where(total > 0, total, 1), 0)
    return weights, whole


def place(address, token, head):
    return struct.pack("<3Q", address, token, head)


def scaled(base):
    return struct.pack("<2f", 1 if base == 2 else np.log2(np.e), np.log2(np.e) if base == 2 else 1)


def compare(dtype, got, want):
    assert not np.isnan(got).any()
    error = np.abs(got - want)
    assert (error <= TOLERANCE[dtype] * np.maximum(np.abs(want), 1)).all(), error.max()


def merge(dtype, sets, tokens, heads, size, base, first=0, output_scale=1.0):
    lse, codes, values = problem(dtype, sets, tokens, heads, size)
    units, elem = (size // 4 if size % 8 == 0 else size), codes.dtype.itemsize
    device = Device()
    at, lses = device.buffer(codes, False), device.buffer(lse, False)
    out, out_lse = device.buffer(np.full(codes[0].shape, 0xFFFFFFFF & (1 << 8 * elem) - 1, codes.dtype)), device.buffer(np.full(lse.shape[1], np.nan, np.float32))
    count = tokens - first
    table = device.buffer(np.array([count, first, sets], np.uint32), False)
    rows = heads * size * elem
    args = place(at, rows, size * elem) + place(lses, heads * 4, 4) + place(out, rows, size * elem) + place(out_lse, heads * 4, 4)
    args += struct.pack("<3Q5I", table, tokens * rows, tokens * heads * 4, tokens, sets, heads, units, CODES[dtype])
    args += scaled(base) + struct.pack("<f4I", output_scale, *divisor(units), *divisor(heads))
    entry = "merge_states" if size % 8 == 0 else "merge_states_elements"
    blocks = -(-tokens * heads * units // THREADS)
    device.launch(kernels("shaders/cuda/ptx/merge_states.ptx")[entry], (blocks, 1, 1), [args])
    weights, whole = expected(lse, values, base)
    want = np.einsum("sr,srd->rd", weights, np.where(weights[..., None] > 0, values, 0)) * output_scale
    got_codes, got_lse = device.read(out), device.read(out_lse)
    rows = slice(first * heads, None)
    compare(dtype, widened(dtype, got_codes)[rows].astype(np.float64), want[rows])
    assert np.allclose(got_lse[rows], whole[rows], rtol=2e-6, atol=2e-6)
    assert np.isnan(got_lse[: first * heads]).all()
    for row in range(first * heads, tokens * heads):
        some = np.flatnonzero(np.isfinite(lse[:, row]))
        if len(some) == 1 and output_scale == 1:
            assert (got_codes[row] == codes[some[0], row]).all()
    return got_codes


def correct(dtype, world, tokens, heads, size, base):
    lse, codes, values = problem(dtype, world, tokens, heads, size)
    units, elem = (size // 4 if size % 8 == 0 else size), codes.dtype.itemsize
    weights, whole = expected(lse, values, base)
    total = 0
    for rank in range(world):
        device = Device()
        at, lses = device.buffer(codes[rank], False), device.buffer(lse, False)
        out, out_lse = device.buffer(np.zeros(codes[0].shape, codes.dtype)), device.buffer(np.full(lse.shape[1], np.nan, np.float32))
        table = device.buffer(np.array([tokens, 0], np.uint32), False)
        rows = heads * size * elem
        # Written as [heads, tokens, size].
        args = place(at, rows, size * elem) + place(lses, heads * 4, 4) + place(out, size * elem, tokens * size * elem) + place(out_lse, heads * 4, 4)
        args += struct.pack("<2Q6I", table, tokens * heads * 4, tokens, world, rank, heads, units, CODES[dtype])
        args += scaled(base) + struct.pack("<4I", *divisor(units), *divisor(heads))
        entry = "correct_attn_out" if size % 8 == 0 else "correct_attn_out_elements"
        device.launch(kernels("shaders/cuda/ptx/correct_attn_out.ptx")[entry], (-(-tokens * heads * units // THREADS), 1, 1), [args])
        got = widened(dtype, device.read(out)).astype(np.float64).reshape(heads, tokens, size).transpose(1, 0, 2).reshape(-1, size)
        want = weights[rank][:, None] * np.where(weights[rank][:, None] > 0, values[rank], 0)
        compare(dtype, got, want)
        assert np.allclose(device.read(out_lse), whole, rtol=2e-6, atol=2e-6)
        total = total + got
    compare(dtype, total, np.einsum("sr,srd->rd", weights, np.where(weights[..., None] > 0, values, 0)))


def test_merges_of_sets():
    for dtype in CODES:
        merge(dtype, 3, 7, 2, 40, "e")
        merge(dtype, 8, 2, 3, 37, 2)
    merge("f32", 11, 4, 3, 8, 2, first=1)
    merge("f16", 3, 7, 2, 8, "e", output_scale=0.25)
    merge("bf16", 3, 7, 2, 7, 2, output_scale=0.25)
    merge("f32", 1, 3, 2, 1, "e")


def test_corrections_of_ranks():
    for dtype in CODES:
        correct(dtype, 3, 7, 2, 40, 2)
    correct("f32", 8, 2, 3, 37, "e")
    correct("f16", 1, 6, 2, 3, "e")
