"""reorg_kvcache against Python, byte for byte: chunks that begin anywhere, patterns of any ranks, rows past the binding's end."""

import struct

import numpy as np

from kernels_small_ops import divisor
from launch import Device, kernels

THREADS = 256


def reorg(width, units, owners, interleave, chunks, cut=0):
    """`cut`: so many of the last rows are not the binding's, and must stay as they are."""
    world = max(owners) + 1
    turn = interleave * len(owners)
    owned = [owners.count(rank) for rank in range(world)]
    owner = lambda token: owners[token // interleave % len(owners)]
    index = lambda token: token // turn * interleave * owned[owner(token)] + sum(owner(t) == owner(token) for t in range(token % turn))
    held = lambda rank, length: length // turn * interleave * owned[rank] + sum(owner(t) == rank for t in range(length % turn))

    rng = np.random.default_rng(units)
    words = width // 4 * units
    firsts, begins, out_rows, sources, moves, local_row, number = [], [], [], [], [], 1, 0
    for begin, tokens, out_row in chunks:
        firsts.append(number)
        begins.append(begin)
        out_rows.append(out_row)
        sources += [(local_row - held(rank, begin)) % 2**32 for rank in range(world)]
        moves += [(owner(t), local_row + index(t) - held(owner(t), begin), out_row + t - begin) for t in range(begin, begin + tokens)]
        local_row += max(held(rank, begin + tokens) - held(rank, begin) for rank in range(world))
        number += tokens
    local_rows, rows = local_row, max(move[2] for move in moves) + 1
    gathered = rng.integers(0, 2**32, (world, local_rows, words), np.uint32)
    before = rng.integers(0, 2**32, (rows, words), np.uint32)
    want = before.copy()
    for rank, source, row in moves:
        if row < rows - cut:
            want[row] = gathered[rank, source]

    before_in = [owners[:i].count(o) for i, o in enumerate(owners)]
    table = [number, len(chunks), world, interleave, len(owners), *firsts, *begins, *out_rows, *sources, *owners, *before_in, *owned]
    device = Device()
    at, out = device.buffer(gathered, False), device.buffer(before)
    args = struct.pack("<6Q", at, out, device.buffer(np.array(table, np.uint32), False), local_rows * words * 4, words * 4, words * 4)
    args += struct.pack("<6I", rows - cut, local_rows, world, units, *divisor(units))
    # A grid for more tokens than there are, which write nothing.
    blocks = -(-(number + 9) * units // THREADS)
    device.launch(kernels("shaders/cuda/ptx/reorg_kvcache.ptx")[f"reorg_kvcache_{width}"], (blocks, 1, 1), [args])
    assert (device.read(out) == want).all()


def test_reorgs():
    reorg(16, 3, [0, 1], 1, [(0, 9, 0), (4, 7, 12)])
    reorg(8, 9, [0, 1, 2], 16, [(5, 40, 1), (0, 3, 50), (90, 11, 60)], cut=4)
    reorg(4, 8, [0, 2, 0, 1, 0], 3, [(7, 33, 0), (2_000_000_011, 20, 33)])
    reorg(8, 1, [0], 5, [(3, 6, 2)])
