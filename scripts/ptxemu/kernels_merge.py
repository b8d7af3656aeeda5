"""mla_merge against the sum in f64: query rows of many partial results and of one, with empty ones among them, and of empty ones only.

Its kernels cut the work differently (`few`: a block for 32 columns, `many`: a warp for 128) and give the same bits.
"""

import struct

import numpy as np

from launch import Device, kernels

EMPTY = np.float32(-1.0e38)
HEADS, TOKENS = 3, 5
PTX = "shaders/cuda/ptx/mla_merge.ptx"


def merge(name, latent, out_dtype, counts, seed):
    random = np.random.default_rng(seed)
    indices = random.permutation(sum(counts)).astype(np.uint32) * HEADS
    partials = np.full((len(indices) * HEADS, latent + 4), np.nan, np.float32)
    partials[:, :latent] = random.standard_normal((len(partials), latent))
    partials[:, latent] = random.standard_normal(len(partials)) * 30
    # All partial results of the third row are empty, and some of others; an empty one has zeros.
    ends = np.cumsum(counts)
    empty = np.zeros(len(indices), bool)
    empty[ends[1] : ends[2]] = True
    empty[1::4] = True
    rows = (indices[empty, None] + np.arange(HEADS)).reshape(-1)
    partials[rows, :latent], partials[rows, latent] = 0, EMPTY
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
            want = weights @ part[:, :latent] / weights.sum()
            assert np.allclose(got[token, head], want, atol=1e-5 if out_dtype == 0 else 4e-3)
            assert np.isclose(got_lse[token, head], part[:, latent].max() + np.log2(weights.sum()), atol=1e-4)
    untouched = [token for token in range(TOKENS) if token not in tokens]
    assert np.isnan(got[untouched]).all()
    return device.read(out), device.read(lse)


def same_bits(latent, out_dtype, counts):
    names = [name for name in kernels(PTX) if name.endswith(f"_{latent}")]
    assert names
    results = [merge(name, latent, out_dtype, counts, latent) for name in names]
    for name, result in zip(names, results):
        for array, first in zip(result, results[0]):
            assert array.tobytes() == first.tobytes(), f"{name} gives other bits than {names[0]}"


def test_merges_of_512():
    same_bits(512, 0, [2, 1, 9, 310])


def test_merges_of_256():
    same_bits(256, 1, [1, 3, 2, 70])
