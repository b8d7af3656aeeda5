"""`wgmma`: each warp of a warpgroup multiplies its 16 of M = 64 rows.

Operands are read, and accumulators written, as late as possible: when the warp waits. The race check sees the reads at issue and at the
wait, so a barrier that comes too late on either side is found. Descriptors are those with 128-byte swizzling, or 64-byte for operands along k.
Sums are in f64: that the hardware keeps about 14 bits of a sum of FP8 products does not show.
"""

import numpy as np

from memory import READ, Fault
from operands import elements, register, source
from parse import Unsupported
from races import CELL
from tensor import COLUMN, DECODERS, ROW, fragments

DEPTH_BYTES = 32  # of a row of an instruction: k = 16 of 16 bits, 32 of 8
CHUNK = 16  # bytes
# Bytes of the lines within which a descriptor's swizzle permutes chunks, by its code.
LINES = {1: 128, 2: 64}


class Multiplications:
    """The wgmma of a team in flight: (group of each lane, lanes, operation), and each lane's groups so far."""

    def __init__(self, lanes):
        self.groups, self.flying = np.zeros(lanes, np.int64), []

    def finish(self, team, lanes, left):
        flying = []
        for group, mine, run in self.flying:
            done = mine & lanes & (group < self.groups - left)
            if done.any():
                run(team, done)
            if (mine & ~done).any():
                flying.append((group, mine & ~done, run))
        self.flying = flying


def decode(machine, instruction):
    if instruction.name == "setmaxnreg":
        return set_registers(machine, int(instruction.operands[0], 0))
    if instruction.name != "wgmma":
        return None
    if instruction.has("fence"):
        return lambda team, mask: team.whole_warps(mask, "wgmma")
    if instruction.has("commit_group"):
        return commit
    if instruction.has("wait_group"):
        left = int(instruction.operands[0], 0)
        return lambda team, mask: team.multiplications.finish(team, lanes_of(team, mask), left)
    return multiply(machine, instruction) if instruction.has("mma_async") else None


def set_registers(machine, count):
    def run(team, mask):
        team.whole_warps(mask, "setmaxnreg")
        machine.registers[team.number] = count

    return run


def lanes_of(team, mask):
    return np.ones(team.lanes, bool) if mask is None else mask


def commit(team, mask):
    team.multiplications.groups = team.multiplications.groups + lanes_of(team, mask)


class Matrix:
    """An operand in shared memory, by its descriptor; an element has `size` bytes. `by_depth`: it is stored transposed, with rows along k. Of its columns those from `first` on."""

    def __init__(self, descriptors, rows, columns, size, by_depth, first=0):
        self.start, self.groups, self.eights = (((descriptors >> np.uint64(at)) & np.uint64(0x3FFF)).astype(np.int64) << 4 for at in (0, 16, 32))
        codes, each = set((descriptors >> np.uint64(62)).tolist()), CHUNK // size
        line = LINES.get(*codes) if len(codes) == 1 else None
        if line != 128 and (line is None or by_depth):
            raise Unsupported(f"a descriptor with another swizzle: {sorted(codes)}")
        row, chunk = np.meshgrid(np.arange(rows), np.arange(first // each, (first + columns) // each), indexing="ij")
        place = (chunk // 8)[None] * self.groups[:, None, None] if by_depth else 0
        place = place + self.start[:, None, None] + (row // 8) * self.eights[:, None, None] + row % 8 * line + (chunk % 8 if by_depth else chunk) * CHUNK
        self.addresses = place ^ (place >> 7) % (line // CHUNK) << 4
        self.shape, self.dtype = (rows, columns), np.dtype(f"u{size}")

    def read(self, machine, team, blocks, which):
        """Of some blocks, whose descriptors are at `which` of those that were given."""
        addresses, memory = self.addresses[which], machine.shared
        repeated = np.repeat(blocks, addresses[0].size)
        offsets = memory.locate(addresses.reshape(-1).astype(np.uint64), repeated, CHUNK, CHUNK)
        if memory.races:
            memory.races.check_fenced((offsets[:, None] // CELL + np.arange(CHUNK // CELL)).reshape(-1))
            memory.races.access(team.number, offsets, repeated, CHUNK, False)
        each = CHUNK // self.dtype.itemsize
        return memory.bytes.view(self.dtype)[(offsets // self.dtype.itemsize)[:, None] + np.arange(each)].reshape(len(blocks), *self.shape)


def multiply(machine, instruction):
    shape, d_type, a_type, b_type = (mod for mod in instruction.mods if mod not in ("mma_async", "sync", "aligned"))
    if d_type != "f32" or a_type != b_type or a_type not in DECODERS:
        raise Unsupported(f"wgmma `{instruction.text}`")
    part, values = DECODERS[a_type]
    size = np.dtype(part).itemsize
    depth = DEPTH_BYTES // size
    columns = int(shape.removeprefix("m64n").removesuffix(f"k{depth}"))
    sums, a, b, adds, scale_a, scale_b, *transposed = instruction.operands
    in_registers = a[0] == "{"
    if size == 1:
        # Operands of 8 bits are not transposed. Fragments of a are left out.
        transposed = ["0", "0"] if not transposed and not in_registers else None
    if (scale_a, scale_b) != ("1", "1") or len(elements(sums)) != columns // 2 or not transposed:
        raise Unsupported(f"wgmma `{instruction.text}`")
    targets, by_depth, a_by_depth = [register(text) for text in elements(sums)], transposed[-1] == "1", not in_registers and transposed[0] == "1"
    gets_sum = [source(machine, text, "f32") for text in elements(sums)]
    gets_a = [source(machine, text, "u32") for text in elements(a)] if in_registers else source(machine, a, "u64")
    get_b, get_adds = source(machine, b, "u64"), source(machine, adds, "pred")
    at_a = fragments(4, 16, True)

    def run(team, mask):
        team.whole_warps(mask, "wgmma")
        lanes = lanes_of(team, mask)
        first = np.flatnonzero(lanes)[::32]
        adding = np.broadcast_to(get_adds(team), team.lanes)[::32]
        left, place = None, np.zeros(team.blocks, np.int64)
        place[team.block[first]] = np.arange(len(first))
        if a_by_depth:
            left = Matrix(np.broadcast_to(gets_a(team), team.lanes)[first], depth, 16, size, True, team.number % 4 * 16)
        elif not in_registers:
            # Eight rows further for each half of the 16 that are this warp's.
            descriptors = np.broadcast_to(gets_a(team), team.lanes)[first]
            further = (descriptors >> np.uint64(32) & np.uint64(0x3FFF)) * np.uint64(2 * (team.number % 4))
            left = Matrix(descriptors + further, 16, depth, size, False)
        right = Matrix(np.broadcast_to(get_b(team), team.lanes)[first], *((depth, columns, size, True) if by_depth else (columns, depth, size, False)))
        for matrix in (left, right):
            if matrix:
                matrix.read(machine, team, team.block[first], place[team.block[first]])

        def finish(team, done):
            blocks = team.block[np.flatnonzero(done)[::32]]
            b = values(right.read(machine, team, blocks, place[blocks]))
            b = b if by_depth else b.swapaxes(1, 2)
            if left:
                a = values(left.read(machine, team, blocks, place[blocks]))
                a = a.swapaxes(1, 2) if a_by_depth else a
            else:
                words = np.stack([np.broadcast_to(get(team), team.lanes).reshape(-1, 32)[blocks] for get in gets_a], 1)
                a = np.empty((len(blocks), 16, depth))
                a[:, at_a[0], at_a[1]] = values(np.ascontiguousarray(words).view(np.uint16).reshape(len(blocks), 4, 32, 2))
            product = a @ b
            for index, target in enumerate(targets):
                row, column = ROW + (index >> 1 & 1) * 8, index // 4 * 8 + COLUMN * 2 + (index & 1)
                value = np.zeros((team.blocks, 32), np.float64)
                value[blocks] = product[:, row, column]
                before = np.broadcast_to(gets_sum[index](team), team.lanes).reshape(-1, 32)
                value += np.where(adding[:, None], before, 0.0)
                team.put(target, value.astype(np.float32).reshape(-1), done)

        team.multiplications.flying.append((team.multiplications.groups, lanes, finish))

    return run
