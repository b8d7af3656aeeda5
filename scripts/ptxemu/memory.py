"""Checked memory: every access is checked for bounds and alignment, and shared memory for races (races.py)."""

import numpy as np

BASE = 0x7F00_0000_0000
# Where the generic addresses of shared memory begin, and their number: see cluster.py.
SHARED_WINDOW = 0x7E00_0000_0000
SHARED_ROOM = 1 << 29
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

    def __init__(self, blocks, size):
        self.size = -(-max(size, 16) // 16) * 16
        self.used = size
        self.bytes = np.full(blocks * self.size, POISON, np.uint8)
        self.races = None

    def locate(self, addresses, blocks, size, align):
        """Offsets into `bytes`; `blocks` says whose memory each access is to."""
        offsets = addresses.astype(np.int64)
        if (offsets % align).any():
            raise Fault(f"shared address {int(offsets[offsets % align != 0][0])} is no multiple of {align}")
        if offsets.max() + size > self.used:
            raise Fault(f"shared access of {size} bytes at {int(offsets.max())}, but a block has {self.used}")
        return offsets + blocks * self.size
