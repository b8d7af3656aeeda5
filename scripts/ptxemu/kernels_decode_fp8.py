"""mla_decode by FP8 products, `mma_fp8_m16`, against attention in f64: the cases of kernels_decode.py, and what two codes hold of a weight."""

import numpy as np

import tensor
from kernels_decode import Case, non_finite_items, run, without_each_barrier

PTX = "shaders/cuda/ptx/mla_decode_fp8_e4m3.ptx"
DIMS = ((512, 64), (256, 64), (256, 32), (512, 0))
TILE, ONE = 64, 0x38  # tokens; the code of 1


def decode(latent=512, rope=64, tokens=128, **more):
    return run(PTX, f"mla_decode_{latent}_{rope}_mma_fp8_m16", latent, rope, "e4m3", "e4m3", 16, tokens, **more)


def test_512():
    decode(near=1e-4)
    decode(512, 0, near=1e-4)


def test_256():
    decode(256, 64, near=1e-4)
    decode(256, 32, near=1e-4)


def test_rows_at_multiples_of_8_bytes():
    decode(tokens=64, copies=0, near=1e-4)


def test_accumulators_of_14_bits():
    """As some cards were found to have (fp8_tile.cuh)."""
    tensor.FP8_SUM_BITS = 14
    try:
        for latent, rope in DIMS:
            decode(latent, rope, near=2e-4)
    finally:
        tensor.FP8_SUM_BITS = None


def one_hot(*shape):
    """Token t is 1 in column t, 0 elsewhere: an output is the weights themselves, over 40 powers of two."""
    case = Case(*shape)
    case.rows = np.eye(case.length, case.dim, dtype=np.float32)
    for token, page in enumerate(np.repeat(case.pages[3:-2], case.page)[: case.length]):
        at = token % case.page * case.dim
        case.kv[page, at : at + case.dim] = (case.rows[token] * ONE).astype(np.uint8)
    case.scale = np.float32(20)
    return case


def test_weights_are_as_good_as_bf16():
    """Each is off by at most half of what bf16 is, or by 2^-22 of the largest of its tile: down to 2^-14 of that by no more than bf16."""
    made = []
    partials, _, _ = decode(make=lambda *shape: made.append(one_hot(*shape)) or made[0], near=2.0**-9)
    case, middle = made[0], 128 + 8
    for row in range(16):
        # Weights times what they are relative to.
        got = partials[row, :middle].astype(np.float64) * np.exp2(np.float64(partials[row, case.latent]))
        want = np.exp2(np.float64(case.scale) * case.q[case.tokens[row // case.heads], row % case.heads, :middle].astype(np.float64))
        for begin in range(0, middle, TILE):
            weights, off = want[begin : begin + TILE], np.abs(got - want)[begin : begin + TILE]
            # The last term is what f32 and its exp2 round.
            allowed = np.maximum(2.0**-9 * weights, 2.0**-22 * weights.max()) + 2.0**-18 * weights
            assert (off <= allowed).all(), f"row {row} from {begin}: {(off / allowed).max():.3f} of what is allowed"


def test_non_finite():
    non_finite_items(PTX, "mla_decode_512_64_mma_fp8_m16", "e4m3", "e4m3", 16, 64)


def test_a_barrier_that_decode_lacks_is_found():
    without_each_barrier(PTX, "mla_decode_512_64_mma_fp8_m16", 16, lambda _: True)
