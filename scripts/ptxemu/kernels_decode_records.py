"""mla_decode of records, of 656 bytes and of 528, against attention in f64: with scales of any f32, in pages and in lists of slots."""

import numpy as np

import kernels_decode_lists as lists
from convert import E4M3, bf16_bits, bf16_value
from kernels_decode import GAP, Case, run
from launch import FULL, parse, text_with
from memory import Fault

GROUP = 128
# A value is a product in f16, of a scale in f16.
NEAR = 2e-3


class Records(Case):
    """Scales from 2^-8 to 2^3, so that logits rise and fall."""

    def __init__(self, latent, rope, cache, query, heads, length, page, non_finite=()):
        super().__init__(latent, rope, cache, query, heads, length, page)
        random = np.random.default_rng(length)
        self.pitch = latent + latent // GROUP * 4 + rope * 2
        codes = random.integers(0, 0x40, (length, latent)).astype(np.uint8) | random.integers(0, 2, (length, latent)).astype(np.uint8) << 7
        scales = self.scales(random, (length, latent // GROUP)).astype(np.float32)
        parts = random.uniform(-1, 1, (length, rope)).astype(np.float32)
        self.rows = np.concatenate([E4M3[codes] * np.repeat(scales, GROUP, 1), bf16_value(bf16_bits(parts)).reshape(parts.shape)], 1)
        rope_bits = bf16_bits(parts).reshape(parts.shape).astype(np.uint16)
        for token, column, value in non_finite:
            codes[token, column] = 0x7F
            self.rows[token, column] = value
        records = np.concatenate([codes, scales.view(np.uint8).reshape(length, -1), rope_bits.view(np.uint8).reshape(length, -1)], 1)
        self.stride = page * self.pitch + GAP
        self.kv = np.full((len(self.kv), self.stride), 0xFF, np.uint8)
        for token in range(length):
            at = token % page * self.pitch
            self.kv[self.pages[3 + token // page], at : at + self.pitch] = records[token]

    @staticmethod
    def scales(random, shape):
        return np.exp2(random.uniform(-8, 3, shape))


class Small(Records):
    """Scales that f16 does not hold: such an item is done again in f32."""

    @staticmethod
    def scales(random, shape):
        return np.exp2(random.uniform(-8, 0, shape)) * np.float32(2.0**-14)


class Far(Records):
    """Scales of a token whose ratios f32 sums do not bear."""

    @staticmethod
    def scales(random, shape):
        return np.exp2(random.uniform(-2, 2, shape)) * np.where(np.arange(shape[1]) % 2, 2.0**-70, 1)


class RecordLists(lists.Lists, Records):
    pass


def simple(rope):
    return "shaders/cuda/ptx/mla_decode_simple.ptx", f"mla_decode_ds{656 if rope else 528}_512_{rope}"


def swap(rope, rows):
    return f"shaders/cuda/ptx/mla_decode_swap_ds{656 if rope else 528}.ptx", f"mla_decode_512_{rope}_wgmma_swap_ab_n{rows}"


def mma(rope, name):
    return f"shaders/cuda/ptx/mla_decode_ds{656 if rope else 528}.ptx", f"mla_decode_512_{rope}_mma_{name}"


def test_simple():
    for rope in (64, 0):
        run(*simple(rope), 512, rope, "e4m3", "bf16", 8, 40, make=Records, near=2e-6)


def test_simple_lists():
    for rope in (64, 0):
        lists.run(*simple(rope), 512, rope, "e4m3", "f32", 8, 50, make=RecordLists)


def test_swap():
    for rope, rows, tokens, query in ((64, 64, 192, "bf16"), (64, 16, 320, "e4m3"), (64, 32, 150, "bf16")) if FULL else ((64, 64, 192, "bf16"), (64, 16, 320, "e4m3")):
        run(*swap(rope, rows), 512, rope, "e4m3", query, rows, tokens, beyond=8, make=Records, near=NEAR)


def test_swap_without_rope():
    run(*swap(0, 16), 512, 0, "e4m3", "f16", 16, 300, make=Records, near=NEAR)
    if FULL:
        run(*swap(0, 64), 512, 0, "e4m3", "bf16", 64, 192, make=Records, near=NEAR)


def test_mma_at_multiples_of_8_bytes():
    run(*mma(64, "m16"), 512, 64, "e4m3", "bf16", 16, 100, copies=0, make=Records, near=NEAR)


def test_mma():
    run(*mma(64, "m16"), 512, 64, "e4m3", "bf16", 16, 128, make=Records, near=NEAR)
    run(*mma(64, "m64"), 512, 64, "e4m3", "e4m3", 64, 64, make=Records, near=NEAR)
    if FULL:
        run(*mma(64, "m32_small"), 512, 64, "e4m3", "bf16", 32, 64, make=Records, near=NEAR)


def test_mma_split():
    for query in ("f32", "f16") if FULL else ("f16",):
        run(*mma(64, "m16_split"), 512, 64, "e4m3", query, 16, 64, make=Records, near=NEAR)


def test_mma_without_rope():
    run(*mma(0, "m16"), 512, 0, "e4m3", "f16", 16, 128, make=Records, near=NEAR)
    run(*mma(0, "m32_small"), 512, 0, "e4m3", "bf16", 32, 64, make=Records, near=NEAR)


def test_mma_lists():
    for rope, name, rows, topk in ((64, "m64", 64, 150), (0, "m16", 16, 300)):
        lists.run(*mma(rope, name), 512, rope, "e4m3", "bf16", rows, topk, make=RecordLists, near=NEAR)


def test_swap_lists():
    for rope, rows, topk in ((64, 64, 300), (0, 16, 470), (64, 32, 210)) if FULL else ((64, 64, 300), (0, 16, 470)):
        lists.run(*swap(rope, rows), 512, rope, "e4m3", "bf16", rows, topk, make=RecordLists, near=NEAR)


def test_a_fence_that_bulk_copies_lack_is_found():
    """Zeros in place of entries that are no slot are not written by the proxy that copies a later tile's records there."""
    ptx, name = swap(64, 16)
    text = text_with(ptx, name)
    begin = text.rindex("fence.proxy.async", 0, text.index("mbarrier.expect_tx.", text.index(f".entry {name}(")))
    entry = parse(text[:begin] + text[text.index(";", begin) + 1 :])[name]
    try:
        lists.run(ptx, name, 512, 64, "e4m3", "bf16", 16, 470, orders=("forward",), make=RecordLists, near=NEAR, entry=entry)
    except Fault:
        return
    raise AssertionError(f"{name} needs no fence")


AGAIN = 16  # tokens, half of what the fallback goes through for each row


def again(*entry, rope, rows, make, non_finite):
    """`non_finite` says that the item may be done again."""
    run(*entry, 512, rope, "e4m3", "bf16", rows, AGAIN, make=make, near=2e-6, orders=("forward",), non_finite=non_finite)


def test_scales_out_of_range():
    last = [(2 * AGAIN + 20, 3, np.nan)]  # seen by no row that is looked at
    for make in (Small, Far):
        again(*swap(64, 16), rope=64, rows=16, make=make, non_finite=last)
        again(*mma(64, "m16"), rope=64, rows=16, make=make, non_finite=last)


def test_non_finite():
    for rope, rows in ((64, 64), (0, 16)) if FULL else ((0, 16),):
        again(*swap(rope, rows), rope=rope, rows=rows, make=Records, non_finite=[(2 * AGAIN + 20, 3, np.nan), (5, 7, np.nan)])
    again(*mma(64, "m16"), rope=64, rows=16, make=Records, non_finite=[(2 * AGAIN + 20, 3, np.nan), (5, 7, np.nan)])
