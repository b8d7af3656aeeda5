"""batch_slots, batch_items and batch_pages against Python: a step's tables from a batch that only the device knows."""

import struct

import numpy as np

from launch import Device, kernels

PAGE_SIZE, NUM_PAGES, MAX_PAGES, NONE = 16, 40, 5, 0xFFFFFFFF
POISON = np.uint32(0xDEADBEEF)
PLANNED = [40, 70, 17]
STARTS = [0, 1, 3, 4]
WILD = [2**31 - 1, -(2**31), -1, 2**31 - 7, 1 << 30, 77]


def visible_of(lens, starts, sequence, token):
    begin, end, length = starts[sequence], starts[sequence + 1], max(lens[sequence], 0)
    return 0 if not begin <= token < end or begin < 0 or end - token > length else length - (end - token) + 1


class Share:
    """A rank's share: the owner of each block of a pattern that repeats, block by block of `interleave` tokens."""

    def __init__(self, owners, rank, interleave):
        self.owners, self.rank, self.interleave = owners, rank, interleave

    def holds(self, token):
        return self.owners[token // self.interleave % len(self.owners)] == self.rank

    def local(self, length):
        """How many of the first tokens it holds."""
        turn = self.interleave * len(self.owners)
        return length // turn * self.interleave * self.owners.count(self.rank) + sum(self.holds(token) for token in range(length % turn))

    def words(self):
        marks = [2 * self.owners[:i].count(self.rank) + (owner == self.rank) for i, owner in enumerate(self.owners)]
        return marks, (self.interleave, self.owners.count(self.rank), len(self.owners))


class Whole:
    def holds(self, token):
        return True

    def local(self, length):
        return length

    def words(self):
        return [0], (0, 0, 0)


def page_at(table, sequence, block):
    return int(table[sequence, block]) & NONE if block < MAX_PAGES else NONE


def found(numbers, value):
    """The kernels' binary search, which arrays in any order must not break."""
    begin, end = 0, len(numbers)
    while end - begin > 1:
        middle = (begin + end) // 2
        begin, end = (middle, end) if numbers[middle] <= value else (begin, middle)
    return begin


class Batch:
    def __init__(self, lens, starts, table, share=Whole()):
        self.lens, self.starts, self.table, self.share = lens, starts, np.asarray(table, np.int32), share

    def args(self, device, slots=0, plan=0, tables=0, pages=0, max_tokens=0):
        arrays = [np.asarray(array, np.int32) for array in (self.lens, self.starts, self.table.ravel())]
        places = [device.buffer(array.view(np.uint32), False) for array in arrays]
        marks, share = self.share.words()
        places.append(device.buffer(np.asarray(marks, np.uint32), False))
        words = (len(self.lens), MAX_PAGES, PAGE_SIZE, NUM_PAGES, max_tokens, *share)
        return struct.pack("<8Q8I", *places, slots, plan, tables, pages, *words)

    def slots(self, room=9, count=7):
        device = Device()
        before = np.concatenate([[count], np.full(room, POISON)]).astype(np.uint32)
        slots = device.buffer(before)
        device.launch(kernels("shaders/cuda/ptx/batch_tables.ptx")["batch_slots"], (1, 1, 1), [self.args(device, slots=slots, max_tokens=room)])
        want = before.copy()
        for token in range(count):
            sequence = found(self.starts[: len(self.lens)], token)
            position = visible_of(self.lens, self.starts, sequence, token) - 1
            is_here = position >= 0 and self.share.holds(position)
            position = self.share.local(position) if is_here else 0
            page = page_at(self.table, sequence, position // PAGE_SIZE) if is_here else NONE
            want[1 + token] = page * PAGE_SIZE + position % PAGE_SIZE if page < NUM_PAGES else NONE
        assert (device.read(slots) == want).all(), f"{self.lens}: {device.read(slots)} instead of {want}"

    def lists(self):
        """A plan of PLANNED whose sequences are cut every 32 tokens, in tables with spare room."""
        items, item_sequences, queries, query_sequences = [], [], [], []
        page_begin = [0, 32, 64, 96]
        for sequence, length in enumerate(PLANNED):
            for begin in range(0, length, 32):
                items.append([STARTS[sequence], 2, page_begin[sequence], begin, min(begin + 32, length), len(items), 0, 0])
                item_sequences.append(sequence)
            for token in range(STARTS[sequence], STARTS[sequence + 1]):
                queries.append([token, length])
                query_sequences.append(sequence)
        items_at, queries_at, words = 16, 16 + 8 * 12, 16 + 8 * 12 + 2 * 6
        head = [len(items), len(queries), page_begin[-1], items_at, queries_at, len(PLANNED), 0, 0]
        template = np.concatenate([np.ravel(part) for part in (head, items, item_sequences, queries, query_sequences, page_begin)])
        device = Device()
        plan = device.buffer(template.astype(np.uint32), False)
        tables, pages = device.buffer(np.full(words, POISON, np.uint32)), device.buffer(np.full(100, POISON, np.uint32))
        entries = kernels("shaders/cuda/ptx/batch_tables.ptx")
        for entry in ("batch_items", "batch_pages"):
            device.launch(entries[entry], (1, 1, 1), [self.args(device, plan=plan, tables=tables, pages=pages)])

        want, want_pages = np.full(words, POISON, np.uint32), np.full(100, POISON, np.uint32)
        for i, (item, sequence) in enumerate(zip(items, item_sequences)):
            end = min(item[4], self.share.local(max(self.lens[sequence], 0)))
            begin, end = (item[3], end) if item[3] < end else (0, 0)
            want[items_at + 8 * i :][:8] = [*item[:3], begin, end, *item[5:]]
        for i, (query, sequence) in enumerate(zip(queries, query_sequences)):
            want[queries_at + 2 * i :][:2] = [query[0], min(query[1], self.share.local(visible_of(self.lens, self.starts, sequence, query[0])))]
        for index in range(page_begin[-1]):
            sequence = found(page_begin[:3], index)
            block = index - page_begin[sequence]
            is_used = block < -(-self.share.local(max(self.lens[sequence], 0)) // PAGE_SIZE)
            want_pages[index] = min(page_at(self.table, sequence, block), NUM_PAGES - 1) if is_used else 0
        for what, place, expected in (("tables", tables, want), ("pages", pages, want_pages)):
            got = device.read(place)
            assert (got == expected).all(), f"{what} of {self.lens}: word {np.flatnonzero(got != expected)[0]}"


def table(rng):
    pages = rng.permutation(NUM_PAGES)[: 3 * MAX_PAGES].reshape(3, MAX_PAGES)
    return np.where(rng.random(pages.shape) < 0.1, np.resize(WILD, pages.shape), pages)


def test_batches():
    rng = np.random.default_rng(1)
    for lens, starts in [
        ([30, 70, 17], STARTS),
        ([40, 1, 0], [0, 1, 2, 2]),
        ([0, 33, 2], [0, 1, 3, 4]),
        ([-5, 64, 16], [0, 0, 2, 3]),
        ([0, 0, 0], [0, 0, 0, 0]),
        ([500, 2**31 - 1, 17], STARTS),
    ]:
        for share in (Whole(), Share([0, 1], 1, 1), Share([2, 0, 1, 2], 2, 16)):
            batch = Batch(lens, starts, table(rng), share)
            batch.slots()
            batch.slots(room=4, count=4)
            batch.lists()


def test_wild_batches():
    rng = np.random.default_rng(2)
    for turn in range(6):
        lens = [WILD[(i + turn) % 6] for i in range(3)]
        starts = [WILD[(5 * i + turn) % 6] if turn % 2 else i for i in range(4)]
        batch = Batch(lens, starts, np.resize(WILD[:5], (3, MAX_PAGES)) if turn < 3 else table(rng), Share([0, 1, 1], 1, 3) if turn % 3 else Whole())
        batch.slots()
        batch.lists()
