"""top_k of rows with ties, zeros of both signs and values that are no numbers, against a stable sort, by one block and by clusters."""

import numpy as np

from arguments import packed
from launch import Device, kernels

UNKNOWN = 0xFFFFFFFF
THREADS, CHUNK = 512, 512 * 32
ENTRIES = {1: ("top_k", "top_k_block"), 2: ("top_k_cluster", "top_k_cluster2"), 4: ("top_k_cluster", "top_k_cluster4"), 8: ("top_k_cluster", "top_k_cluster8")}


def row_of(random, kind, columns):
    """A row's bits."""
    normal = random.standard_normal(columns).astype(np.float32)
    levels = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    rows = [
        normal,
        np.round(normal),
        np.full(columns, -2.5, np.float32),
        levels[random.integers(0, 8, columns)],
        levels[random.integers(5, 8, columns)],
        random.integers(0, 1 << 32, columns, dtype=np.uint64).astype(np.uint32).view(np.float32),
    ]
    return rows[kind % len(rows)].view(np.uint32)


def chosen(bits, k):
    """The best k indices, ascending, then -1."""
    values = bits.view(np.float32)
    is_nan = np.isnan(values)
    with np.errstate(invalid="ignore"):
        order = np.lexsort((np.arange(len(bits)), -np.where(is_nan, 0, values).astype(np.float64), is_nan))
    best = np.sort(order[:k]).astype(np.int32)
    return np.concatenate([best, np.full(k - len(best), -1, np.int32)])


def run(blocks, k, columns, lengths, device_lengths=False, pages=None, out_row=1):
    """Runs rows of these lengths, of a kind each, and compares all that is written; `pages` is a page size for slots."""
    random = np.random.default_rng(columns + blocks)
    rows, device = len(lengths), Device()
    # Rows are strided, and behind a length is what would be chosen.
    stride = columns + 3
    logits = np.full((rows, stride), np.float32(np.inf).view(np.uint32), np.uint32)
    for row, length in enumerate(lengths):
        logits[row, :length] = row_of(random, row, length)
    words, page_list = [out_row], []
    for length in lengths:
        words.append(UNKNOWN if device_lengths else length)
        if pages:
            count = -(-length // pages)
            words += [1 + 3 * rows + len(page_list), count]
            page_list += random.integers(0, 1000, count).tolist()
    table = np.array([rows] + words + page_list, np.uint32)
    out = device.buffer(np.full((rows + out_row, k), 77, np.int32))
    values = device.buffer(np.full((rows + out_row, k), 77, np.uint32))
    asked = np.array([length if length else -5 for length in lengths], np.int32)
    args = packed(
        "TOP_K_ARGS",
        logits=device.buffer(logits, False),
        lengths=device.buffer(asked, False),
        indices=out,
        values=values,
        table=device.buffer(table, False),
        logits_stride=4 * stride,
        indices_stride=4 * k,
        values_stride=4 * k,
        columns=columns,
        max_rows=rows,
        out_rows=rows + out_row,
        k=k,
        row_words=3 if pages else 1,
        table_words=len(table) - 1,
        page_size=pages or 1,
        reserved=0,
        **divisor(pages or 1),
    )
    module, name = ENTRIES[blocks]
    # A cluster more than there are rows, as where a step has room for more.
    device.launch(kernels(f"shaders/cuda/ptx/{module}.ptx")[name], ((rows + 1) * blocks, 1, 1), [args])
    got, bits = device.read(out), device.read(values)
    assert (got[:out_row] == 77).all() and (bits[:out_row] == 77).all()
    for row, length in enumerate(lengths):
        want = chosen(logits[row, :length], k)
        is_there = want >= 0
        want_bits = np.where(is_there, logits[row, np.maximum(want, 0)], 0xFF800000)
        if pages:
            first = words[1 + 3 * row + 1] - 1 - 3 * rows
            slots = np.array(page_list + [0], np.int64)[first + np.where(is_there, want, 0) // pages] * pages + want % pages
            want = np.where(is_there, slots, -1)
        assert (got[out_row + row] == want).all(), (blocks, row, length, got[out_row + row], want)
        assert (bits[out_row + row] == want_bits).all(), (blocks, row, length)


def divisor(by):
    shift = 31 + (by - 1).bit_length()
    return {"by_page_size.magic": -(-(1 << shift) // by) & UNKNOWN, "by_page_size.shift": shift}


def test_rows_by_a_block():
    run(1, 40, 1500, [1500, 1400, 41, 40, 39, 0, 1, 1500])


def test_rows_by_clusters():
    run(2, 300, 1700, [1700, 1650, 301, 300, 0, 1700])
    run(8, 64, 3000, [2999, 3000, 65, 1234])


def test_slots_and_lengths_of_the_device():
    run(4, 30, 700, [700, 650, 0, 31, 5], device_lengths=True)
    run(1, 30, 700, [700, 650, 0, 31, 5], pages=7)


def test_a_slice_that_registers_do_not_hold():
    run(1, 100, CHUNK + 700, [CHUNK + 700, CHUNK + 1])
