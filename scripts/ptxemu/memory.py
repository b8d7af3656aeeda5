"""Checked memory: every access is checked for bounds and alignment, and shared memory for races."""

import numpy as np

BASE = 0x7F00_0000_0000
# Where the generic addresses of shared memory begin.
SHARED_WINDOW = 0x7E00_0000_0000
GAP = 4096
READ, WRITE = 1, 2
POISON = 0xFF


class Fault(Exception):
    """An error that a card would not report, or would report as `illegal address`."""


class Global:
    """Buffers with gaps between them. An address outside all of them, or a write to one that is read only, is a fault."""

    def __init__(self):
        self.bytes = np.full(GAP, POISON, np.uint8)
        self.rights = np.zeros(GAP, np.uint8)
        self.places = {}

    def add(self, array, writable=True):
        """Copies an array in; returns its address."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        start, room = len(self.bytes), -(-len(data) // 256) * 256 + GAP
        self.bytes = np.concatenate([self.bytes, data, np.full(room - len(data), POISON, np.uint8)])
        rights = np.full(len(data), READ | WRITE if writable else READ, np.uint8)
        self.rights = np.concatenate([self.rights, rights, np.zeros(room - len(data), np.uint8)])
        self.places[BASE + start] = (start, np.asarray(array).shape, np.asarray(array).dtype)
        return BASE + start

    def get(self, address):
        """The array at an address that `add` returned, as it is now."""
        start, shape, dtype = self.places[address]
        size = int(np.prod(shape)) * dtype.itemsize
        return self.bytes[start : start + size].view(dtype).reshape(shape).copy()

    def locate(self, addresses, size, align, right):
        """Offsets into `bytes` of accesses of `size` bytes each."""
        offsets = addresses.view(np.int64) - BASE
        if (addresses % np.uint64(align)).any():
            raise Fault(f"global address {int(addresses[0]):#x} is no multiple of {align}")
        if offsets.min() < 0 or offsets.max() + size > len(self.bytes):
            raise Fault(f"global access far outside every buffer: {int(addresses[np.argmax(np.abs(offsets))]):#x}")
        # Gaps are wider than any access, so checking its first and last byte is enough.
        fine = self.rights[offsets] & self.rights[offsets + (size - 1)] & right
        if not fine.all():
            bad = int(offsets[fine == 0][0]) + BASE
            what = "write to" if right == WRITE else "read of"
            start = max((place for place in self.places if place <= bad), default=BASE)
            raise Fault(f"global {what} {size} bytes at {bad - start} of the buffer of {self.size(start)} bytes")
        return offsets

    def size(self, start):
        _, shape, dtype = self.places.get(start, (0, (0,), np.dtype(np.uint8)))
        return int(np.prod(shape)) * dtype.itemsize


class Shared:
    """The shared memory of several blocks, one behind the other, full of NaN until it is written."""

    def __init__(self, blocks, size, warps, races):
        self.size = -(-max(size, 16) // 16) * 16
        self.used = size
        self.bytes = np.full(blocks * self.size, POISON, np.uint8)
        self.races = Races(blocks, self.size, warps) if races else None

    def locate(self, addresses, blocks, size, align):
        """Offsets into `bytes`; `blocks` says whose memory each access is to."""
        offsets = addresses.astype(np.int64)
        if (offsets % align).any():
            raise Fault(f"shared address {int(offsets[offsets % align != 0][0])} is no multiple of {align}")
        if offsets.max() + size > self.used:
            raise Fault(f"shared access of {size} bytes at {int(offsets.max())}, but a block has {self.used}")
        return offsets + blocks * self.size


CELL = 2


class Races:
    """Finds accesses of two warps that no barrier orders, by vector clocks, in cells of two bytes.

    Each warp counts its own steps between barriers, and has the count of every other warp at the last barrier that they
    shared. An access is ordered after another warp's if its warp has at least that count.
    """

    def __init__(self, blocks, size, warps):
        cells = blocks * size // CELL
        self.known = np.zeros((blocks, warps, warps), np.int32)
        self.known[:, np.arange(warps), np.arange(warps)] = 1
        self.writer = np.zeros(cells, np.int16)
        self.written = np.zeros(cells, np.int32)
        self.read_at = np.zeros((warps, cells), np.int32)
        # Written, with no proxy fence since; TMA and wgmma need one.
        self.unfenced = np.zeros(cells, bool)

    def access(self, warp, offsets, blocks, size, write):
        """Notes accesses of one warp in several blocks; a fault if another warp's is not ordered before them."""
        width = max(size // CELL, 1)
        cells = (offsets[:, None] // CELL + np.arange(width)).reshape(-1)
        blocks = np.repeat(blocks, width)
        writer = self.writer[cells]
        late = (writer != warp) & (self.written[cells] > self.known[blocks, warp, writer])
        if late.any():
            self.fault("write" if write else "read", warp, "write", int(writer[late][0]))
        now = self.known[blocks, warp, warp]
        if not write:
            self.read_at[warp, cells] = now
            return
        unseen = self.read_at[:, cells] > self.known[blocks, warp].T
        unseen[warp] = False
        if unseen.any():
            self.fault("write", warp, "read", int(np.argwhere(unseen)[0][0]))
        self.writer[cells] = warp
        self.written[cells] = now
        self.unfenced[cells] = True

    def fence(self, warp):
        """A proxy fence: a warp's writes so far are visible to TMA and wgmma too."""
        self.unfenced[self.writer == warp] = False

    def check_fenced(self, cells):
        if self.unfenced[cells].any():
            raise Fault("a tensor copy, or a matrix of a warpgroup, where a warp has written with no fence since")

    def copied(self, warp, offsets, block):
        """Notes a TMA copy that a warp issues, byte by byte: a write, ordered after earlier writes only by a proxy fence."""
        cells = offsets[::CELL] // CELL
        self.check_fenced(cells)
        self.access(warp, cells * CELL, np.full(len(cells), block), CELL, True)
        self.unfenced[cells] = False

    @staticmethod
    def fault(what, warp, other, whose):
        raise Fault(f"race in shared memory: a {what} of warp {warp}, and a {other} of warp {whose} with no barrier between")

    def arrive(self, block, warp, joined):
        """A warp reaches a barrier: its clock is merged into the barrier's, and its own count goes up."""
        joined = np.maximum(joined, self.known[block, warp])
        self.known[block, warp, warp] += 1
        return joined

    def leave(self, block, warp, joined):
        """A warp leaves a barrier with the merged clock of all that arrived."""
        self.known[block, warp] = np.maximum(self.known[block, warp], joined)
