"""mla_merge against the sum in f64: query rows of many partial results and of one, with empty ones among them, and of empty ones only.

Its kernels cut the work differently (`few`: a block for 32 columns, `many`: a warp for 128) and give the same bits.
"""

import struct

import numpy as np

from launch import Device, kernels

EMPTY = np.float32(-1.0e38)
HEADS, TOKENS = 3, 5
PTX = "shaders/cuda/ptx/mla_merge.ptx"


def merge(name, latent, out_dtype, counts, seed, large=None):
    """`large`: what all weights are relative to."""
    random = np.random.default_rng(seed)
    indices = random.permutation(sum(counts)).astype(np.uint32) * HEADS
    partials = np.full((len(indices) * HEADS, latent + 4), np.nan, np.float32)
    sums = random.uniform(1, 4000, len(partials)).astype(np.float32)
    partials[:, :latent] = random.standard_normal((len(partials), latent)) * sums[:, None]
    partials[:, latent], partials[:, latent + 1] = random.standard_normal(len(partials)) * 30, sums
    # All partial results of the third row are empty, and some of others; an empty one has zeros.
    ends = np.cumsum(counts)
    empty = np.zeros(len(indices), bool)
    empty[ends[1] : ends[2]] = True
    empty[1::4] = True
    rows = (indices[empty, None] + np.arange(HEADS)).reshape(-1)
    partials[rows, :latent], partials[rows, latent], partials[rows, latent + 1] = 0, EMPTY, 0
    if large:
        partials[partials[:, latent] > EMPTY, latent] = large
    tokens = [4, 0, 3, 1]
    merges = np.array([(token, end - count, end) for token, count, end in zip(tokens, counts, ends)], np.uint32)
    device = Device()
    dtype = {0: np.float32, 1: np.float16}[out_dtype]
    header = np.array([0, len(merges), 16, 1], np.uint32)
    out, lse = device.buffer(np.full((TOKENS, HEADS, latent), np.nan, dtype)), device.buffer(np.full((TOKENS, HEADS), np.nan, np.float32))
    unused = np.zeros(8, np.uint32)
    read = [device.buffer(array, False) for array in (header, unused, unused, merges, indices, unused, partials)]
    strides = [0, 0, 0, 0, 0, HEADS * latent, latent, HEADS, 1]
    args = struct.pack("<12Q9Q3f11I", *read, 0, 0, 0, out, lse, *strides, 1, 0.5, np.log(2), HEADS, TOKENS, 0, out_dtype, 0, 0, 1, 1, 0, 0, 0)
    # A grid of one merge more than there are, which writes nothing.
    rows = (len(merges) + 1) * HEADS
    blocks = -(-rows * (latent // 128) // 8) if "_many_" in name else rows * (latent // 32)
    device.launch(kernels(PTX)[name], (blocks, 1, 1), [args])
    got, got_lse = device.read(out).astype(np.float64) / 0.5, device.read(lse) / np.log(2)
    for token, (begin, end) in zip(tokens, merges[:, 1:]):
        for head in range(HEADS):
            part = partials[indices[begin:end] + head].astype(np.float64)
            part = part[part[:, latent] > EMPTY]
            if len(part) == 0:
                assert (got[token, head] == 0).all() and np.isneginf(got_lse[token, head])
                continue
            weights = np.exp2(part[:, latent] - part[:, latent].max())
            total = weights @ part[:, latent + 1]
            want = weights @ part[:, :latent] / total
            assert np.allclose(got[token, head], want, rtol=1e-5, atol=1e-5 if out_dtype == 0 else 4e-3)
            assert np.isclose(got_lse[token, head], part[:, latent].max() + np.log2(total), atol=1e-4)
            if len(part) == 1:
                # The division is that of an item that has all of the row.
                alone = partials[indices[begin:end] + head][partials[indices[begin:end] + head, latent] > EMPTY][0]
                factor = np.float32(1) / alone[latent + 1]
                same = (alone[:latent] * factor * np.float32(0.5)).astype(dtype)
                assert (device.read(out)[token, head] == same).all(), "other bits than a row of one split"
    untouched = [token for token in range(TOKENS) if token not in tokens]
    assert np.isnan(got[untouched]).all()
    return device.read(out), device.read(lse)


def same_bits(latent, out_dtype, counts, large=None):
    names = [name for name in kernels(PTX) if name.endswith(f"_{latent}")]
    assert names
    results = [merge(name, latent, out_dtype, counts, latent, large) for name in names]
    for name, result in zip(names, results):
        for array, first in zip(result, results[0]):
            assert array.tobytes() == first.tobytes(), f"{name} gives other bits than {names[0]}"


def test_merges_of_512():
    same_bits(512, 0, [2, 1, 9, 310])


def test_merges_of_256():
    same_bits(256, 1, [1, 3, 2, 70])


def test_merges_of_thousands():
    same_bits(256, 0, [577, 5, 3, 2900])


def test_equal_large_logits():
    """Each partial result weighs by its sum, which an LSE in f32 does not hold beside such a maximum."""
    for large in (3001.7, 1e6):
        same_bits(256, 0, [3, 9, 1, 40], np.float32(large))
