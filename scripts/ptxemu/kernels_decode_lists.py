"""mla_decode over lists of slots, and with attention sinks, against attention in f64: an entry of each body and merge.

Four query tokens have lists of their own: one is split in two and has entries that are no slot, one ends early, one has no slot at all and
one no entry. Tokens that are in no list hold NaN, and so do the entries past a list's end what would be slots of them.
"""

import numpy as np

from kernels_decode import DIRECT, EMPTY, GROUPS_PAGE, NEAR, PAGE, Case, pack, result_of
from launch import FULL, Device, kernels
from tma import tensor_map

FIRST = 1000  # the pool's slot that is the first of the cache


class Lists(Case):
    """The lists of one launch, and the expected results."""

    def __init__(self, latent, rope, cache, query, heads, topk, page):
        super().__init__(latent, rope, cache, query, heads, max(topk, 2 * page), page)
        random = np.random.default_rng(topk)
        slots = np.array([int(self.pages[3 + token // page]) * page + token % page for token in range(self.length)])
        self.num_slots = len(self.kv) * page
        nowhere = np.array([-1, FIRST - 1, FIRST + self.num_slots, 2**31 - 1, -(2**31)])
        self.positions = [random.permutation(self.length)[:topk] for _ in range(4)]
        # A slot that stands twice counts twice.
        self.positions[0][3] = self.positions[0][topk - 2]
        self.lengths = np.array([topk, topk - 5, topk, 0][: len(self.tokens)])
        self.listed = np.zeros((4, topk + 3), np.int32)
        self.there = []
        for index, token in enumerate(self.tokens):
            there = np.arange(topk) < self.lengths[index]
            invalid = random.random(topk) < (1 if index == 2 else 0.2)
            entries = np.where(invalid, random.choice(nowhere, topk), FIRST + slots[self.positions[index]])
            self.listed[token, :topk] = entries
            self.there.append(there & ~invalid)
        # What no list has is not read.
        used = np.unique(np.concatenate([self.positions[index][there] for index, there in enumerate(self.there)]))
        for token in np.setdiff1d(np.arange(self.length), used):
            page_of, at = int(self.pages[3 + token // page]), token % page * self.pitch
            self.kv[page_of, at : at + self.pitch] = self.kv[0, -1]
        self.sinks = np.where(np.arange(heads) % 4 == 1, np.inf, random.uniform(-2, 8, heads)).astype(np.float32)
        self.sinks[::3] = -np.inf

    def expected(self, index, head, begin, end, sink):
        """Output and base-2 LSE of a row over a part of its list."""
        there = self.there[index].copy()
        there[:begin] = there[end:] = False
        rows = self.rows[self.positions[index][there]].astype(np.float64)
        if not len(rows):
            return np.zeros(self.latent), float(EMPTY)
        logits = rows @ self.q[self.tokens[index], head].astype(np.float64) * float(self.scale)
        weights = np.exp2(logits - logits.max())
        lse = logits.max() + np.log2(weights.sum())
        share = 1 / (1 + np.exp2(float(self.sinks[head]) - lse)) if sink else 1
        return share * (weights @ rows[:, : self.latent]) / weights.sum(), lse


def run(ptx, name, latent, rope, cache, query, rows, topk, page=PAGE, copies=1, sinks=True, orders=("forward", "reverse"), make=Lists, near=None, entry=None):
    """Runs one entry of a file, or `entry` in its place, on lists of four query tokens."""
    heads = rows // 2 + 1
    case = make(latent, rope, cache, query, heads, topk, page)
    entry = entry or kernels(ptx)[name]
    middle = topk // 2 + 3
    items = [(0, heads, 0, 0, middle, 0), (0, heads, 0, middle, topk, heads)] + [(index * heads, heads, 7, 0, topk, DIRECT) for index in (1, 2, 3)]
    shared, tile = (int.from_bytes(entry.data.get(f"{name}_{what}", b""), "little") for what in ("shared_bytes", "tokens"))
    size = (entry.cluster or (1,))[0]
    blocks = -(-(len(items) + 1) // size) * size
    device = Device()
    only_read = {
        "header": np.array([len(items), 0, page, len(case.kv)], np.uint32),
        "items": np.array([(*item, 0, 0) for item in [*items, *[(0,) * 6] * (blocks - len(items))]], np.uint32),
        "queries": np.array([(token, topk) for token in case.tokens], np.uint32),
        "merges": np.zeros(4, np.uint32),
        "merge_partials": np.zeros(4, np.uint32),
        "pages": case.listed,
        "q_nope": np.ascontiguousarray(case.q_stored[..., :latent]),
        "q_pe": np.ascontiguousarray(case.q_stored[..., latent:]) if rope else np.zeros(4, np.uint32),
        "kv": case.kv,
        "topk_lengths": np.repeat(case.lengths[np.argsort(case.tokens)], 2).astype(np.int32),
        "sinks": case.sinks,
    }
    address = {key: device.buffer(array, False) for key, array in only_read.items()}
    address["partials"] = device.buffer(np.full((2 * heads, latent + 4), np.nan, np.float32))
    address["out"] = device.buffer(np.full((4, heads, latent), np.nan, np.float32))
    address["lse"] = device.buffer(np.full((4, heads), np.nan, np.float32))
    inputs = dict(
        topk_lengths=address["topk_lengths"], topk_length_stride=2, sinks=address["sinks"] if sinks else 0, is_listed=1, list_stride=case.listed.shape[1],
        first_slot=FIRST, num_slots=case.num_slots, tile_pages=tile, tile_rest=0,
    )
    args = [pack(case, address, heads, copies, max(tile, 1), len(items), **inputs)]
    if len(entry.params) > 1:
        args.append(tensor_map(address["kv"], 1, dims=[16, 1, 1, 1], strides=[16, 16, 16], box=[16, 1, 1, 1], swizzle=0))
    device.launch(entry, (blocks, 1, 1), args, shared=shared, orders=orders)
    assert not device.atomics, f"{name}: logits that are not finite"
    partials, out, lse = (device.read(address[key]) for key in ("partials", "out", "lse"))
    near = (near or NEAR[cache]) * np.abs(case.rows).max()
    for first, count, _, begin, end, partial in items:
        for row in range(count):
            index, is_direct = first // heads, partial == DIRECT
            want, want_lse = case.expected(index, row, begin, end, sinks and is_direct)
            if is_direct:
                token = case.tokens[index]
                got, got_lse = out[token, row] / case.out_scale, lse[token, row] / np.float32(np.log(2))
                want_lse = -np.inf if want_lse == EMPTY else want_lse
            else:
                got, got_lse = result_of(partials[partial + row], latent)
            assert not np.isnan(got).any(), f"{name}: row {row} of {index} from {begin} has NaN"
            worst = np.abs(got - want).max()
            assert worst <= near, f"{name}: row {row} of {index} from {begin}: off by {worst:.2e}"
            assert got_lse == want_lse or abs(got_lse - want_lse) <= 2e-3, f"{name}: row {row} of {index} from {begin}: LSE {got_lse}, not {want_lse}"


def mma(cache, query, names, topk=150):
    for name, rows in names:
        run(f"shaders/cuda/ptx/mla_decode_{cache}.ptx", f"mla_decode_512_64_{name}", 512, 64, cache, query, rows, topk)


def test_simple():
    ptx = "shaders/cuda/ptx/mla_decode_simple.ptx"
    for name, dims, query in (("f32_256_32", (256, 32), "f32"), ("bf16_512_64", (512, 64), "bf16"), ("e4m3_512_0", (512, 0), "f16")):
        run(ptx, f"mla_decode_{name}", *dims, name.split("_")[0], query, 8, 50)


def test_mma_bf16():
    mma("bf16", "bf16", (("mma_m16", 16), ("mma_m64", 64)))
    mma("bf16", "f32", (("mma_m16_split", 16),) if FULL else ())


def test_mma_small():
    mma("f16", "bf16", (("mma_m32_small", 32), ("mma_m16_small", 16)) if FULL else (("mma_m32_small", 32),))
    mma("e4m3", "bf16", (("mma_m64_small", 64),))


def test_mma_e4m3():
    mma("e4m3", "f16", (("mma_m16", 16), ("mma_m64", 64), ("mma_m32", 32)) if FULL else (("mma_m16", 16),))


def test_mma_by_8():
    """Tokens of FP8 codes at multiples of 8 bytes."""
    run("shaders/cuda/ptx/mla_decode_e4m3.ptx", "mla_decode_512_64_mma_m16", 512, 64, "e4m3", "bf16", 16, 300, copies=0)


def test_swap():
    for cache, rows, topk in (("bf16", 16, 210), ("f16", 32, 150)):
        run(f"shaders/cuda/ptx/mla_decode_swap_{cache}.ptx", f"mla_decode_512_64_wgmma_swap_ab_n{rows}", 512, 64, cache, "bf16", rows, topk, GROUPS_PAGE)


def test_swap_e4m3():
    for rows, topk in ((64, 300), (16, 470)):
        run("shaders/cuda/ptx/mla_decode_swap_e4m3.ptx", f"mla_decode_512_64_wgmma_swap_ab_n{rows}", 512, 64, "e4m3", "bf16", rows, topk, GROUPS_PAGE)


def test_wgmma():
    run("shaders/cuda/ptx/mla_decode_wgmma_bf16.ptx", "mla_decode_512_64_wgmma_m64", 512, 64, "bf16", "bf16", 64, 300, GROUPS_PAGE)
