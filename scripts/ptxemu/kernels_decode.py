"""mla_decode and mla_merge against attention in f64: every entry, on items as src/plan.rs makes them.

One sequence with three query tokens whose rows fill a tile and a part of another: the first is split in two, the second
writes its output itself. Then a row that sees nothing. Unused rows of the cache hold NaN, unused page ids are wild, and
one block has no item. Without MLA_FULL=1, of kernels that are the same code for several dtypes only one runs all of the cases.
"""

import re

import numpy as np

from arguments import packed
from convert import E4M3, bf16_bits, bf16_value
from launch import FULL, Device, barriers, kernels, long, parse, text_with, without_barrier
from memory import Fault
from tma import tensor_map

DIRECT = 0xFFFFFFFF
EMPTY = np.float32(-1.0e38)
CODES = {"f32": 0, "f16": 1, "bf16": 2, "e4m3": 3}
# Tokens of a page: no multiple of 16, of 16 (TMA boxes of 16 tokens), of 32; elements between pages.
PAGE, BOXED_PAGE, GROUPS_PAGE, GAP = 24, 48, 64, 16
LINE = 128  # bytes of a line, within which TMA swizzles
BOXES = 2  # `Copying` of shaders/cuda/kernels/decode/mla.cuh
# The allowed error: that of the rounded weights, times the largest value.
NEAR = {"f32": 2e-6, "f16": 6e-4, "bf16": 4e-3, "e4m3": 6e-4}


def encode(values, dtype):
    """Values as a dtype stores them, and what it then has."""
    if dtype == "bf16":
        bits = bf16_bits(values).reshape(values.shape)
        return bits, bf16_value(bits)
    if dtype == "e4m3":
        codes = np.random.default_rng(7).integers(0, 0x38, values.shape).astype(np.uint8) | (values < 0).astype(np.uint8) << 7
        return codes, E4M3[codes]
    stored = values.astype({"f16": np.float16, "f32": np.float32}[dtype])
    return stored, stored.astype(np.float32)


NAN = {"bf16": np.uint16(0x7FFF), "e4m3": np.uint8(0x7F), "f16": np.float16("nan"), "f32": np.float32("nan")}


class Case:
    """The arrays of one launch, and the expected results."""

    def __init__(self, latent, rope, cache, query, heads, length, page, non_finite=()):
        random = np.random.default_rng(latent + rope + heads)
        self.latent, self.dim, self.heads, self.length, self.page = latent, latent + rope, heads, length, page
        self.pitch = self.dim  # from a token to the next
        self.cache, self.query = cache, query
        self.q_stored, self.q = encode(random.standard_normal((4, heads, self.dim)).astype(np.float32), query)
        rows = random.uniform(-1, 1, (length, self.dim)).astype(np.float32)
        # Logits that rise repeatedly move the running maximum.
        rows[:: max(length // 5, 1)] += 0.1 * self.q[0, 0]
        stored, self.rows = encode(rows, cache)
        for token, column, value in non_finite:
            stored[token, column] = NAN[cache] if np.isnan(value) else bf16_bits(np.float32(value)) if cache == "bf16" else value
            self.rows[token, column] = value
        pages = -(-length // page)
        ids = random.permutation(pages + 2)[:pages].astype(np.uint32)
        self.stride = page * self.dim + GAP
        self.kv = np.full((pages + 2, self.stride), NAN[cache])
        for token in range(length):
            at = token % page * self.dim
            self.kv[ids[token // page], at : at + self.dim] = stored[token]
        self.pages = np.concatenate([np.full(3, 0xFFFFFFF0, np.uint32), ids, np.full(2, 0xFFFFFFF0, np.uint32)])
        # The last query token is of another sequence, which is empty.
        self.visible = [length - 2, length - 1, length, 0]
        self.tokens = [2, 0, 3, 1]
        self.scale, self.out_scale = np.float32(self.dim**-0.5 * np.log2(np.e)), np.float32(0.5)

    def expected(self, row, begin, end, is_whole):
        """Output and base-2 LSE of a row over a range of tokens, all of the row's or a split; the LSE is EMPTY where there is none."""
        index, head = divmod(row, self.heads)
        end = min(end, self.visible[index])
        if end <= begin:
            return np.zeros(self.latent), float(EMPTY)
        keys = self.rows[begin:end].astype(np.float64)
        with np.errstate(invalid="ignore"):
            logits = keys @ self.q[self.tokens[index], head].astype(np.float64) * float(self.scale)
        nowhere = np.full(self.latent, np.nan)
        if not (logits < np.inf).all():
            return nowhere, np.nan
        # A key of logit -inf weighs 0, and NaN where it is infinite itself.
        lost = np.isinf(keys[np.isinf(logits), : self.latent]).any(axis=0)
        keys, logits = keys[np.isfinite(logits)], logits[np.isfinite(logits)]
        if not len(keys):
            return (nowhere, np.nan) if is_whole else (np.where(lost, np.nan, 0), -np.inf)
        weights = np.exp2(logits - logits.max())
        return np.where(lost, np.nan, weights @ keys[:, : self.latent] / weights.sum()), logits.max() + np.log2(weights.sum())


# The optional inputs of a decode that has none of them.
NO_INPUTS = dict(topk_lengths=0, sinks=0, topk_length_stride=0, is_listed=0, list_stride=0, first_slot=0, num_slots=0)


def pack(case, address, heads, copies=1, tokens=1, multiprocessors=0, **inputs):
    """The arguments of a decode with f32 outputs. `inputs` take the place of fields, such as those of NO_INPUTS."""
    latent, rope = case.latent, case.dim - case.latent
    names = "header items queries merges merge_partials pages partials q_nope q_pe kv out lse".split()
    tile_pages, tile_rest = divmod(tokens, case.page)
    shift = 31 + (case.page - 1).bit_length()
    fields = dict(
        **{name: address[name] for name in names},
        q_nope_token_stride=heads * latent, q_nope_head_stride=latent, q_pe_token_stride=heads * rope, q_pe_head_stride=rope,
        kv_block_stride=case.stride, out_token_stride=heads * latent, out_head_stride=latent, lse_token_stride=heads, lse_head_stride=1,
        logit_scale=case.scale, out_scale=case.out_scale, lse_scale=np.log(2), num_heads=heads, max_queries=4,
        query_dtype=CODES[case.query], out_dtype=0, copies=copies, clamp_pages=0, page_size=case.page, num_pages=len(case.kv),
        tile_pages=tile_pages, tile_rest=tile_rest, multiprocessors=multiprocessors,
        **{"by_page_size.magic": -(-(1 << shift) // case.page), "by_page_size.shift": shift},
    )
    return packed("MLA_ARGS", **fields | NO_INPUTS | inputs)


def cache_is_codes(case):
    return case.kv.itemsize == 1


def boxes(case, address, name, tile):
    """The cache's TMA tensor map: see src/cuda/kernels/tensor_map.rs."""
    element = case.kv.itemsize
    together = 1 if case.dim * element % LINE == 0 else 2
    row = together * case.dim * element
    tokens, lines = 16 if "_tma_" in name or cache_is_codes(case) else 8, row // LINE
    if "_wgmma_m" in name:
        tokens, lines = min(tile, case.page & -case.page), 1
    return tensor_map(
        address,
        element,
        dims=[LINE // element, case.page // together, row // LINE, len(case.kv)],
        strides=[row, LINE, case.stride * element],
        box=[LINE // element, tokens // together, lines, 1],
        swizzle=LINE,
    )


def run(ptx, name, latent, rope, cache, query, rows, tokens, copies=1, beyond=8, rest=21, alone=False, page=PAGE, entry=None, orders=("forward", "reverse"), non_finite=(), cluster=None, make=Case, near=None):
    """Runs one entry of a file, or `entry` in its place, on tiles of `rows` rows, over twice `tokens` tokens and `rest`. The first tile is
    cut `beyond` tokens after half of them. `cluster` is the blocks of a cluster, where the entry does not require it.
    `make` gives the case, `near` the allowed error in place of NEAR."""
    heads = rows // 2 + 1
    case = make(latent, rope, cache, query, heads, 2 * tokens + rest, page, non_finite)
    middle, length = tokens + beyond, case.length
    items = [
        (0, rows, 3, 0, middle, 0),
        (0, rows, 3, middle, length, rows),
        (rows, 3 * heads - rows, 3, 0, length, DIRECT),
        (3 * heads, heads, 0, 0, 0, DIRECT),
    ]
    device, address = Device(), {}
    entry = entry or kernels(ptx)[name]
    shared, tile = (int.from_bytes(entry.data.get(f"{name}_{what}", b""), "little") for what in ("shared_bytes", "tokens"))
    size = cluster or (entry.cluster or (1,))[0]
    blocks = -(-(len(items) + 1) // size) * size
    only_read = {
        "header": np.array([len(items), 0, page, len(case.kv)], np.uint32),
        # One more than there are: a step has room for an item of each block.
        "items": np.array([(*item, 0, 0) for item in [*items, *[(0,) * 6] * (blocks - len(items))]], np.uint32),
        "queries": np.array(list(zip(case.tokens, case.visible)), np.uint32),
        "merges": np.zeros(4, np.uint32),
        "merge_partials": np.zeros(4, np.uint32),
        "pages": case.pages,
        "q_nope": np.ascontiguousarray(case.q_stored[..., :latent]),
        "q_pe": np.ascontiguousarray(case.q_stored[..., latent:]) if rope else np.zeros(4, np.uint32),
        "kv": case.kv,
    }
    address |= {key: device.buffer(array, False) for key, array in only_read.items()}
    address["partials"] = device.buffer(np.full((2 * rows, latent + 4), np.nan, np.float32))
    address["out"] = device.buffer(np.full((4, heads, latent), np.nan, np.float32))
    address["lse"] = device.buffer(np.full((4, heads), np.nan, np.float32))
    args = [pack(case, address, heads, copies, tile, len(items) + alone)]
    if len(entry.params) > 1:
        args.append(boxes(case, address["kv"], name, tile))
    device.launch(entry, (blocks, 1, 1), args, shared=shared, orders=orders, cluster=cluster)
    # A variant on tensor cores notes a logit that is not finite by an atomic, and then does the item again: that would hide what it lacks.
    assert non_finite or not device.atomics, f"{name}: logits that are not finite"
    results = [device.read(address[key]) for key in ("partials", "out", "lse")]
    check(case, items, *results, name, near or NEAR[cache])
    return results


def result_of(partial, latent):
    """Output and base-2 LSE of a partial result: it has sums, of latents and of weights, and the logit that weights are relative to."""
    top, total = partial[latent : latent + 2].astype(np.float64)
    return (partial[:latent], top) if total == 0 else (partial[:latent] / total, top + np.log2(total))


def check(case, items, partials, out, lse, name, near):
    largest = np.abs(case.rows[np.isfinite(case.rows)]).max()
    for first, count, _, begin, end, partial in items:
        for row in range(count):
            want, base_2 = case.expected(first + row, begin, end, partial == DIRECT)
            index, head = divmod(first + row, case.heads)
            token = case.tokens[index]
            if partial == DIRECT:
                got, got_lse = out[token, head] / case.out_scale, lse[token, head] / np.float32(np.log(2))
                base_2 = -np.inf if base_2 == EMPTY else base_2
            else:
                got, got_lse = result_of(partials[partial + row], case.latent)
            assert (np.isnan(got) == np.isnan(want)).all(), f"{name}: row {first + row} from {begin}: NaN in {np.isnan(got).sum()} columns, not {np.isnan(want).sum()}"
            worst = np.abs(got - want)[~np.isnan(want)].max(initial=0)
            assert worst <= near * largest, f"{name}: row {first + row} from {begin}: off by {worst:.2e} of {largest:.2f}"
            assert got_lse == base_2 or abs(got_lse - base_2) <= 2e-3 or np.isnan([got_lse, base_2]).all(), f"{name}: row {first + row}: LSE {got_lse}, not {base_2}"


def shape_of(name):
    """Dims and rows, as the entry's name says them."""
    latent, rope, _, rows = name.removeprefix("mla_decode_").split("_")[:4]
    return int(latent), int(rope), int(rows.removeprefix("m"))


def every(cache, query, split_query, chosen):
    ptx = f"shaders/cuda/ptx/mla_decode_{cache}.ptx"
    names = [name for name in kernels(ptx) if chosen(name)]
    assert names, ptx
    for name in names:
        tokens = 128 if cache == "e4m3" and name.endswith("64_mma_m16") else 64
        run(ptx, name, *shape_of(name)[:2], cache, split_query if name.endswith("split") else query, shape_of(name)[2], tokens)


def wide(name):
    return "_512_64_" in name and not name.endswith("split")


def splits(name):
    return "_512_64_" in name and name.endswith("split")


def others(name):
    return "_512_64_" not in name


def test_bf16():
    every("bf16", "bf16", "f16", wide)


def test_bf16_splits():
    every("bf16", "bf16", "f32", splits)


def test_bf16_other_dims():
    every("bf16", "e4m3", "f16", others)


def test_f16():
    every("f16", "f16", "f32", wide)


def test_f16_splits():
    every("f16", "f16", "f32", splits)


def test_f16_other_dims():
    every("f16", "bf16", "f32", others)


def test_e4m3():
    every("e4m3", "bf16", "f32", wide)


def test_e4m3_splits():
    every("e4m3", "f16", "f32", splits)


def test_e4m3_other_dims():
    every("e4m3", "e4m3", "f32", others)


def test_e4m3_rows_at_multiples_of_8_bytes():
    run("shaders/cuda/ptx/mla_decode_e4m3.ptx", "mla_decode_512_64_mma_m16", 512, 64, "e4m3", "bf16", 16, 64, copies=0)


def tma(cache, query):
    """TMA gives the bits of the variant without it: items that begin at a box and one that does not, blocks alone or side by side."""
    rows = {path: f"shaders/cuda/ptx/mla_decode_{path}{cache}.ptx" for path in ("", "tma_")}
    for beyond, alone in ((16, False), (16, True), (8, False)) if FULL or cache == "e4m3" else ((16, True),):
        # More tiles than stages.
        both = [
            run(ptx, f"mla_decode_512_64_mma_{'tma_' if path else ''}m16", 512, 64, cache, query, 16, 128, beyond=beyond, alone=alone, page=BOXED_PAGE)
            for path, ptx in rows.items()
        ]
        for plain, boxed in zip(*both):
            assert (plain.view(np.uint32) == boxed.view(np.uint32)).all(), "other bits"


def test_tma_bf16():
    tma("bf16", "bf16")


def test_tma_f16():
    tma("f16", "e4m3")


def test_tma_e4m3():
    tma("e4m3", "f16")


def wgmma(cache, query, cases, rows=64, text="wgmma", page=GROUPS_PAGE):
    """With TMA and with cp.async: the same bits. Items that begin at a box, and one that does not; more tiles than stages, and fewer."""
    ptx, name = f"shaders/cuda/ptx/mla_decode_{text}_{cache}.ptx", f"mla_decode_512_64_wgmma_{f'swap_ab_n{rows}' if text == 'swap' else 'm64'}"
    for tokens, rest, beyond in cases:
        both = [run(ptx, name, 512, 64, cache, query, rows, tokens, copies=copies, rest=rest, beyond=beyond, page=page) for copies in (BOXES, 1)]
        for boxed, chunks in zip(*both):
            assert (boxed.view(np.uint32) == chunks.view(np.uint32)).all(), "other bits"
    run(ptx, name, 512, 64, cache, query, rows, 64)


def test_wgmma_bf16():
    wgmma("bf16", "bf16", ((96, 21, 8), (32, 0, -24), (64, 1, 0)) if FULL else ((96, 21, 8),))


def test_wgmma_f16():
    wgmma("f16", "e4m3", ((96, 21, 8),) if FULL else ((32, 0, -24),))


def test_swap_bf16():
    wgmma("bf16", "bf16", ((192, 21, 64), (64, 0, -40)) if FULL else ((192, 21, 64),), 32, "swap")
    wgmma("bf16", "bf16", ((128, 1, 0),) if FULL else (), 16, "swap")
    if FULL:
        wgmma("bf16", "bf16", ((128, 21, 16),), 32, "swap", PAGE)


def test_swap_f16():
    wgmma("f16", "e4m3", ((192, 21, 8),), 16, "swap")
    wgmma("f16", "f16", ((64, 21, 8),) if FULL else (), 32, "swap")


def simple(cache):
    ptx = "shaders/cuda/ptx/mla_decode_simple.ptx"
    for name in kernels(ptx):
        if f"_{cache}_" in name:
            latent, rope = map(int, name.rsplit("_", 2)[1:])
            queries = ("f32", "bf16") if latent == 512 else ("f16", "e4m3")
            for query in queries if FULL else [queries[cache in ("f16", "e4m3")]]:
                run(ptx, name, latent, rope, cache, query, kernels(ptx)[name].threads // 32, 12)


def test_simple_f32():
    simple("f32")


def test_simple_f16():
    simple("f16")


def test_simple_bf16():
    simple("bf16")


def test_simple_e4m3():
    simple("e4m3")


class Equal(Case):
    """Equal large logits, by rope columns alone: a quarter of the latents is -1, the others 1."""

    def __init__(self, latent, rope, cache, query, heads, length, page, non_finite=()):
        super().__init__(latent, rope, cache, query, heads, length, page)
        # In all dtypes, and in codes of e4m3; logits of 16,000.
        value, one, minus = {"e4m3": (0x68, 0x38, 0xB8)}.get(cache, (64, 1, -1))
        self.rows = np.where(np.arange(length)[:, None] % 4 == 3, np.float32(-1), np.float32(1)) * np.ones((1, self.dim), np.float32)
        self.rows[:, latent:] = 64
        self.q = np.zeros_like(self.q)
        self.q[..., latent:] = 64
        self.q_stored = np.full(self.q.shape, 0x68, np.uint8) * (self.q > 0) if query == "e4m3" else encode(self.q, query)[0]
        for token, page in enumerate(np.repeat(self.pages[3:-2], self.page)[:length]):
            stored = np.where(self.rows[token] == 64, value, np.where(self.rows[token] > 0, one, minus))
            at = token % self.page * self.dim
            self.kv[page, at : at + self.dim] = stored if cache == "e4m3" else encode(stored.astype(np.float32), cache)[0]
        for token, column, value in non_finite:
            # Seen by no row but the last query token's, which is not looked at.
            self.kv[self.pages[3 + token // self.page], token % self.page * self.dim + column] = NAN[cache]
            self.rows[token, column] = value


def equal_large_logits(ptx, name, cache, query, rows, tokens=64, latent=512, rope=64, **more):
    """A partial result has the number of its tokens exactly, whatever the logits are, and the same maximum as another."""
    made = []
    beyond, length = 8, 2 * tokens + 21
    partials, _, _ = run(ptx, name, latent, rope, cache, query, rows, tokens, beyond=beyond, orders=("forward",), make=lambda *shape: made.append(Equal(*shape)) or made[0], **more)
    case, middle = made[0], tokens + beyond
    for row in range(rows):
        for begin, end, partial in ((0, middle, row), (middle, length, rows + row)):
            seen = case.rows[begin : min(end, case.visible[row // case.heads]), 0]
            assert not np.isnan(seen).any()
            top, total = partials[partial, latent : latent + 2]
            assert total == len(seen), f"{name}: row {row} from {begin}: weights add up to {total}, not {len(seen)}"
            assert top == partials[row, latent] and top > 1e4, f"{name}: relative to {top}"
            assert (partials[partial, :latent] == seen.sum()).all(), f"{name}: row {row} from {begin}"


def test_equal_large_logits():
    path = "shaders/cuda/ptx/mla_decode"
    equal_large_logits(f"{path}_bf16.ptx", "mla_decode_512_64_mma_m32", "bf16", "bf16", 32)
    equal_large_logits(f"{path}_e4m3.ptx", "mla_decode_512_64_mma_m16_split", "e4m3", "f32", 16)
    equal_large_logits(f"{path}_fp8_e4m3.ptx", "mla_decode_512_64_mma_fp8_m16", "e4m3", "e4m3", 16)
    for cache in ("f32", "f16"):
        equal_large_logits(f"{path}_simple.ptx", f"mla_decode_{cache}_256_32", cache, "f32", 8, 12, latent=256, rope=32)


def test_equal_large_logits_tensor_copies():
    equal_large_logits("shaders/cuda/ptx/mla_decode_tma_f16.ptx", "mla_decode_512_64_mma_tma_m16", "f16", "f16", 16, copies=BOXES, page=BOXED_PAGE)


def test_equal_large_logits_warpgroups():
    path = "shaders/cuda/ptx/mla_decode"
    equal_large_logits(f"{path}_wgmma_bf16.ptx", "mla_decode_512_64_wgmma_m64", "bf16", "bf16", 64, copies=BOXES, page=GROUPS_PAGE)
    equal_large_logits(f"{path}_swap_f16.ptx", "mla_decode_512_64_wgmma_swap_ab_n16", "f16", "f16", 16, copies=BOXES, page=GROUPS_PAGE)
    equal_large_logits(f"{path}_swap_e4m3.ptx", "mla_decode_512_64_wgmma_swap_ab_n64", "e4m3", "bf16", 64, copies=BOXES, page=GROUPS_PAGE)


def test_equal_large_logits_again_in_f32():
    """A token that no row of the item sees holds NaN."""
    for name, more in (("mla_decode_bf16.ptx", {}), ("mla_decode_wgmma_bf16.ptx", {"copies": BOXES, "page": GROUPS_PAGE})):
        entry, rows = ("mla_decode_512_64_wgmma_m64", 64) if more else ("mla_decode_512_64_mma_m16", 16)
        equal_large_logits(f"shaders/cuda/ptx/{name}", entry, "bf16", "bf16", rows, non_finite=[(2 * 64 + 20, 3, np.nan)], **more)


class Alike(Case):
    """Queries of 0 over tokens that all hold 0.1 + 0.0137 i: the output is a token."""

    def __init__(self, latent, rope, cache, query, heads, length, page, non_finite=()):
        super().__init__(latent, rope, cache, query, heads, length, page)
        self.q_stored, self.q = np.zeros_like(self.q_stored), np.zeros_like(self.q)
        self.rows[:] = np.float32(0.1) + np.float32(0.0137) * np.arange(self.dim, dtype=np.float32)
        for token, page in enumerate(np.repeat(self.pages[3:-2], self.page)[:length]):
            at = token % self.page * self.dim
            self.kv[page, at : at + self.dim] = self.rows[token]


def test_sums_of_f32_over_many_tokens():
    """One running sum is off by 1e-5 over 1000 tokens."""
    run("shaders/cuda/ptx/mla_decode_simple.ptx", "mla_decode_f32_256_32", 256, 32, "f32", "f32", 1, 500, orders=("forward",), make=Alike, near=1e-6)


def non_finite_tokens(middle, length, dim):
    """NaN in a token that only the last query token sees, and an infinity among others; a split of logits that are infinite."""
    yield [(length - 1, 3, np.nan), (5, 7, np.inf)]
    yield [(token, dim - 1, -np.inf) for token in range(middle)] + [(2, 9, np.inf)]


def non_finite_items(ptx, name, cache, query, rows, tokens, copies=1, page=PAGE, latent=512, rope=64):
    """Items with NaN or infinities among their tokens: what sees them is as the formulas give it, and nothing else changes."""
    for non_finite in non_finite_tokens(tokens + 8, 2 * tokens + 21, latent + rope):
        if cache == "e4m3":
            non_finite = [(token, column, np.nan) for token, column, _ in non_finite[:1]]
        run(ptx, name, latent, rope, cache, query, rows, tokens, copies=copies, page=page, orders=("forward",), non_finite=non_finite)


def test_non_finite():
    path = "shaders/cuda/ptx/mla_decode"
    non_finite_items(f"{path}_bf16.ptx", "mla_decode_512_64_mma_m16", "bf16", "bf16", 16, 64)
    non_finite_items(f"{path}_simple.ptx", "mla_decode_f16_256_32", "f16", "f32", 8, 12, latent=256, rope=32)


def test_non_finite_sharers():
    path = "shaders/cuda/ptx/mla_decode"
    non_finite_items(f"{path}_f16.ptx", "mla_decode_512_64_mma_m32", "f16", "e4m3", 32, 64)
    non_finite_items(f"{path}_e4m3.ptx", "mla_decode_512_64_mma_m32_small", "e4m3", "bf16", 32, 64)


def test_non_finite_tensor_copies():
    non_finite_items("shaders/cuda/ptx/mla_decode_tma_e4m3.ptx", "mla_decode_512_64_mma_tma_m16", "e4m3", "f16", 16, 64, page=BOXED_PAGE)
    non_finite_items("shaders/cuda/ptx/mla_decode_tma_bf16.ptx", "mla_decode_512_64_mma_tma_m16", "bf16", "bf16", 16, 64, page=BOXED_PAGE)


def test_non_finite_warpgroups():
    path = "shaders/cuda/ptx/mla_decode"
    non_finite_items(f"{path}_wgmma_bf16.ptx", "mla_decode_512_64_wgmma_m64", "bf16", "bf16", 64, 64, BOXES, GROUPS_PAGE)
    non_finite_items(f"{path}_swap_f16.ptx", "mla_decode_512_64_wgmma_swap_ab_n16", "f16", "f16", 16, 64, BOXES, GROUPS_PAGE)


def without_each_barrier(ptx, name, rows, chosen):
    text = text_with(ptx, name)
    places = [index for index, (start, end) in enumerate(barriers(text, name)) if chosen(text[start:end])]
    assert places
    for index in places:
        must_fail(ptx, name, rows, without_barrier(text, name, index), f"barrier {index}", [(32, 8, 21, False)])


def must_fail(ptx, name, rows, text, lack, cases):
    """Runs an entry from a PTX text that lacks something: some case, (tokens, beyond, rest, alone) of `run`, must fail."""
    cache = next(part for part in ptx.removesuffix(".ptx").split("_") if part in CODES)
    page = BOXED_PAGE if "_tma_" in name else GROUPS_PAGE if "_wgmma_" in name else PAGE
    for tokens, beyond, rest, alone, *more in cases:
        copies, order = more or (1, "forward")
        try:
            query = "e4m3" if "_fp8_" in name else "bf16"
            run(ptx, name, 512, 64, cache, query, rows, tokens, copies=copies, beyond=beyond, rest=rest, alone=alone, page=page, entry=parse(text)[name], orders=(order,))
        except (Fault, AssertionError):
            return
    raise AssertionError(f"{name} needs no {lack}")


def test_a_barrier_that_decode_lacks_is_found():
    without_each_barrier("shaders/cuda/ptx/mla_decode_bf16.ptx", "mla_decode_512_64_mma_m16_small", 16, lambda _: True)


@long
def test_a_barrier_that_sharers_lack_is_found():
    without_each_barrier("shaders/cuda/ptx/mla_decode_bf16.ptx", "mla_decode_512_64_mma_m32", 32, lambda text: "sync 0" not in text)


@long
def test_a_barrier_that_four_sharers_lack_is_found():
    without_each_barrier("shaders/cuda/ptx/mla_decode_e4m3.ptx", "mla_decode_512_64_mma_m32_small", 32, lambda text: "sync 0" not in text)


def test_a_wait_for_arrivals_that_decode_lacks_is_found():
    """Without a wait a warp reads a stage before its copies are complete, or refills one that others still read."""
    ptx, name = "shaders/cuda/ptx/mla_decode_bf16.ptx", "mla_decode_512_64_mma_m64"
    before, after = text_with(ptx, name).split(f".entry {name}(")
    waits = list(re.finditer(r"mbarrier\.test_wait\S* p,[^;]*;", after.split(".entry ")[0]))
    assert len(waits) == 2
    for wait in waits:
        start, end = wait.span()
        text = f"{before}.entry {name}({after[:start]}setp.eq.u32 p, 0, 0;{after[end:]}"
        must_fail(ptx, name, 64, text, wait[0], [(64, 8, 21, False)])


def test_what_tensor_copies_lack_is_found():
    """A barrier, the wait for the copies, or the proxy fence before a stage is reused."""
    ptx, name = "shaders/cuda/ptx/mla_decode_tma_e4m3.ptx", "mla_decode_512_64_mma_tma_m16"
    text = text_with(ptx, name)
    cases = ((128, 16, 21, False), (128, 16, 21, True), (128, 8, 21, False), (32, 16, 0, False))
    for index in range(len(barriers(text, name))):
        must_fail(ptx, name, 16, without_barrier(text, name, index), f"barrier {index}", cases)
    for part in (r"mbarrier\.test_wait\S* p,[^;]*;", r"fence\.proxy\.async[^;]*;"):
        places = list(re.finditer(part, text))
        assert places, part
        for found in places:
            less = "setp.eq.u32 p, 0, 0;" if "test_wait" in found[0] else ""
            changed = text[: found.start()] + less + text[found.end() :]
            must_fail(ptx, name, 16, changed, f"{found[0]} at {found.start()}", cases)


def unneeded_synchronisation(ptx, name, rows, cases):
    """The barriers, waits and proxy fences of an entry without which no case fails."""
    before, after = text_with(ptx, name).split(f".entry {name}(")
    before, (entry, *rest) = f"{before}.entry {name}(", after.split(".entry ", 1)
    rest, unneeded = "".join(f".entry {others}" for others in rest), []
    text = before + entry + rest
    lacks = [("barrier", without_barrier(text, name, index)) for index in range(len(barriers(text, name)))]
    for part in (r"mbarrier\.test_wait\S* p,[^;]*;", r"fence\.proxy\.async[^;]*;", r"wgmma\.wait_group[^;]*;"):
        for found in re.finditer(part, entry):
            less = "setp.eq.u32 p, 0, 0;" if "test_wait" in found[0] else ""
            lacks.append((found[0].split(".")[1].split()[0], before + entry[: found.start()] + less + entry[found.end() :] + rest))
    for lack, changed in lacks:
        try:
            must_fail(ptx, name, rows, changed, lack, cases)
        except AssertionError:
            unneeded.append(lack)
    return unneeded


@long
def test_what_warpgroups_lack_is_found():
    """Results do not depend on three waits for parts of a stage: the same warps release a later part, for which cp.async waits too. Nor on five
    waits that are for the compiler, or that one for more follows."""
    cases = [(192, 64, 21, False, BOXES, "reverse"), (192, 64, 21, False, 1, "forward")]
    unneeded = unneeded_synchronisation("shaders/cuda/ptx/mla_decode_wgmma_bf16.ptx", "mla_decode_512_64_wgmma_m64", 64, cases)
    assert unneeded == ["test_wait"] * 3 + ["wait_group"] * 5, unneeded


def test_what_swapped_warpgroups_lack_is_found():
    cases = [(192, 64, 21, False, BOXES, "reverse"), (192, 64, 21, False, 1, "forward")]
    unneeded = unneeded_synchronisation("shaders/cuda/ptx/mla_decode_swap_bf16.ptx", "mla_decode_512_64_wgmma_swap_ab_n16", 16, cases)
    assert unneeded == [], unneeded


def test_swap_e4m3():
    wgmma("e4m3", "bf16", ((192, 21, 64), (32, 0, -24), (64, 1, 0)) if FULL else ((192, 21, 64),), 64, "swap")


def test_swap_e4m3_fewer_rows():
    """Two warpgroups, and four, of which some have no tile."""
    wgmma("e4m3", "f16", ((192, 21, 64), (32, 0, -24), (64, 1, 0)) if FULL else ((192, 21, 64),), 32, "swap")
    wgmma("e4m3", "e4m3", ((320, 21, 64), (32, 0, -24), (64, 1, 0)) if FULL else ((320, 21, 64),), 16, "swap")


def test_swap_e4m3_any_pages():
    """Pages of several boxes, and of no whole number of them; an item that begins inside of a box; tokens aligned to 8 bytes: the same bits."""
    ptx, name = "shaders/cuda/ptx/mla_decode_swap_e4m3.ptx", "mla_decode_512_64_wgmma_swap_ab_n64"
    ways = [(BOXED_PAGE, BOXES, 16), (PAGE, 1, 16), (PAGE, 0, 16)] + ([(BOXED_PAGE, BOXES, 8), (PAGE, 1, 8)] if FULL else [])
    results = {}
    for page, copies, beyond in ways:
        found = run(ptx, name, 512, 64, "e4m3", "bf16", 64, 96, copies=copies, beyond=beyond, page=page, orders=("forward",))
        for one, other in zip(found, results.setdefault(beyond, found)):
            assert (one.view(np.uint32) == other.view(np.uint32)).all(), f"other bits: page {page}"


def test_non_finite_e4m3_warpgroups():
    for rows in (64, 16) if FULL else (64,):
        non_finite_items("shaders/cuda/ptx/mla_decode_swap_e4m3.ptx", f"mla_decode_512_64_wgmma_swap_ab_n{rows}", "e4m3", "bf16", rows, 64, BOXES, GROUPS_PAGE)


@long
def test_what_swapped_warpgroups_of_codes_lack_is_found():
    """Results do not depend on a wait for codes of a tile before one that was waited for, as copies land in order here; nor on waits for operands in
    registers, which are for the compiler, or that one for more follows."""
    cases = [(192, 64, 21, False, BOXES, "reverse"), (192, 64, 21, False, 1, "forward")]
    unneeded = unneeded_synchronisation("shaders/cuda/ptx/mla_decode_swap_e4m3.ptx", "mla_decode_512_64_wgmma_swap_ab_n64", 64, cases)
    assert unneeded == ["test_wait"] + ["wait_group"] * 18, unneeded
