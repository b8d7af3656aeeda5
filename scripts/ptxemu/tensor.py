"""Instructions of a whole warp: shuffles, votes, `ldmatrix` and `mma.sync`."""

import numpy as np

from access import Place
from convert import E4M3, bf16_value
from memory import READ, Fault
from operands import dtype_of, elements, register, source
from parse import Unsupported

LANE = np.arange(32)
ROW, COLUMN = LANE >> 2, LANE & 3


def decode(machine, instruction):
    name = instruction.name
    if name == "shfl":
        return shuffle(machine, instruction)
    if name == "vote":
        return vote(machine, instruction)
    if name == "redux":
        return reduce(machine, instruction)
    if name == "activemask":
        target = register(instruction.operands[0])
        return lambda team, mask: team.put(target, ballot(team, active(team, mask)), mask)
    if name == "ldmatrix":
        return load_matrix(machine, instruction)
    if name == "mma":
        return multiply(machine, instruction)
    return None


def active(team, mask):
    return np.ones(team.lanes, bool) if mask is None else mask


def check_members(team, mask, members):
    """Every lane that the instruction names must be here with it."""
    here = active(team, mask)
    named = (np.broadcast_to(members, team.lanes) >> team.lane & np.uint32(1)).astype(bool)
    if (here & ~named).any():
        raise Fault("a lane that its own mask does not name")
    rows, alive = here.reshape(-1, 32), team.alive.reshape(-1, 32)
    masks = np.broadcast_to(members, team.lanes).reshape(-1, 32)
    for block in np.flatnonzero(rows.any(1)):
        lane = int(np.argmax(rows[block]))
        wanted = (masks[block, lane] >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(bool)
        if (wanted & alive[block] & ~rows[block]).any():
            raise Fault("lanes that the mask names are elsewhere")


def check(team, mask, members):
    # All lanes of all warps, and a mask of ones: nothing to look for.
    if mask is not None or (members != np.uint32(0xFFFFFFFF)).any():
        check_members(team, mask, members)


def ballot(team, bits):
    words = (bits.reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
    return np.repeat(words, 32)


def shuffle(machine, instruction):
    target, _, valid = instruction.operands[0].partition("|")
    target = None if target == "_" else register(target)
    valid = register(valid) if valid else None
    mode = next(mod for mod in instruction.mods if mod in ("up", "down", "bfly", "idx"))
    value, by, clamp, members = (source(machine, text, "u32") for text in instruction.operands[1:5])

    def run(team, mask):
        check(team, mask, members(team))
        lane = team.lane.astype(np.int64)
        shift, limits = by(team).astype(np.int64) & 31, clamp(team).astype(np.int64)
        segment, bound = limits >> 8 & 31, limits & 31
        least, most = lane & segment, (lane & segment) | (bound & ~segment)
        if mode == "up":
            of = lane - shift
            fine = of >= most
        else:
            of = {"down": lane + shift, "bfly": lane ^ shift, "idx": least | (shift & ~segment)}[mode]
            fine = of <= most
        of = np.where(fine, of, lane)
        origin = team.block * 32 + of
        if mask is not None and not mask[origin[mask]].all():
            raise Fault("a shuffle from a lane that takes no part")
        if target is not None:
            team.put(target, np.broadcast_to(value(team), team.lanes)[origin], mask)
        if valid is not None:
            team.put(valid, np.broadcast_to(fine, team.lanes), mask)

    return run


def vote(machine, instruction):
    target, text = register(instruction.operands[0]), instruction.operands[1]
    get, negated = source(machine, text.lstrip("!"), "pred"), text[0] == "!"
    members = source(machine, instruction.operands[2], "u32")
    mode = next(mod for mod in instruction.mods if mod in ("any", "all", "uni", "ballot"))

    def run(team, mask):
        check(team, mask, members(team))
        here = active(team, mask)
        said = np.broadcast_to(get(team), team.lanes)
        said = (~said if negated else said) & here
        if mode == "ballot":
            return team.put(target, ballot(team, said), mask)
        some = said.reshape(-1, 32).any(1)
        every = (said | ~here).reshape(-1, 32).all(1)
        found = {"any": some, "all": every, "uni": every | ~some}[mode]
        return team.put(target, np.repeat(found, 32), mask)

    return run


def reduce(machine, instruction):
    target, type_name = register(instruction.operands[0]), instruction.mods[-1]
    get, members = source(machine, instruction.operands[1], type_name), source(machine, instruction.operands[2], "u32")
    kind = next(mod for mod in instruction.mods if mod in ("add", "min", "max", "and", "or", "xor"))
    compute = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(kind) or getattr(np, f"bitwise_{kind}")
    dtype = dtype_of(type_name)
    start = {"add": 0, "or": 0, "xor": 0, "and": -1 if dtype.kind == "i" else 0xFFFFFFFF}.get(kind)
    if start is None:
        start = np.iinfo(dtype).max if kind == "min" else np.iinfo(dtype).min

    def run(team, mask):
        check(team, mask, members(team))
        values = np.where(active(team, mask), get(team), dtype.type(start)).reshape(-1, 32)
        team.put(target, np.repeat(compute.reduce(values, axis=1, dtype=dtype), 32), mask)

    return run


def load_matrix(machine, instruction):
    """8x8 matrices of 16 bits: lanes 8i to 8i+7 give the rows of matrix i, each lane gets two of its elements."""
    targets = [register(text) for text in elements(instruction.operands[0])]
    if "m8n8" not in instruction.mods or "b16" not in instruction.mods:
        raise Unsupported(f"ldmatrix `{instruction.text}`")
    place = Place(machine, instruction, instruction.operands[1])
    place.shared = True
    count, transposed = len(targets), instruction.has("trans")

    def run(team, mask):
        team.whole_warps(mask, "ldmatrix")
        givers = (team.lane < 8 * count) & active(team, mask)
        memory, offsets = place.locate(team, givers, 16, 16, READ)
        matrices = memory.view(np.uint16)[(offsets // 2)[:, None] + np.arange(8)].reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, 32)
        warps = None if mask is None else mask.reshape(-1, 32)[:, 0]
        for index, target in enumerate(targets):
            value = words[:, index]
            if warps is not None:
                value, got = np.zeros((team.blocks, 32), np.uint32), value
                value[warps] = got
            team.put(target, np.ascontiguousarray(value).reshape(-1), mask)

    return run


def fragments(names, bits, rows_first):
    """Where each element of a fragment's registers lies: (row, column) arrays of [register, lane, element].

    With 16 bits a register has two neighbours of k, with 8 bits four. Registers of A go through its two halves of 8
    rows, then through k; those of B through k alone.
    """
    each = 32 // bits
    register_, lane, element = np.meshgrid(np.arange(names), LANE, np.arange(each), indexing="ij")
    group, place = lane >> 2, (lane & 3) * each + element
    if rows_first:
        return group + (register_ & 1) * 8, place + (register_ >> 1) * 4 * each
    return place + register_ * 4 * each, group


DECODERS = {
    "bf16": (np.uint16, lambda bits: bf16_value(bits).astype(np.float64)),
    "f16": (np.uint16, lambda bits: bits.view(np.float16).astype(np.float64)),
    "e4m3": (np.uint8, lambda bits: E4M3[bits].astype(np.float64)),
}


# Significant bits that an accumulator keeps of sums of FP8 products; None: all of f32. A test takes as few as cards were found to have.
FP8_SUM_BITS = None


def cut(value, bits):
    """A value towards zero to so many significant bits."""
    fraction, exponent = np.frexp(value)
    return np.ldexp(np.trunc(np.ldexp(fraction, bits)), exponent - bits)


def multiply(machine, instruction):
    """`mma.sync.m16n8k*` into f32. Sums are in f64, so that their order does not matter."""
    shape = instruction.mods[2]
    d_type, a_type, b_type, c_type = instruction.mods[-4:]
    depth = {"m16n8k8": 8, "m16n8k16": 16, "m16n8k32": 32}.get(shape, 0)
    if (d_type, c_type) != ("f32", "f32") or a_type not in DECODERS or a_type != b_type or not depth:
        raise Unsupported(f"mma `{instruction.text}`")
    part, values = DECODERS[a_type]
    names = [elements(text) for text in instruction.operands]
    targets = [register(text) for text in names[0]]
    gets_a, gets_b = ([source(machine, text, "u32") for text in group] for group in names[1:3])
    gets_c = [source(machine, text, "f32") for text in names[3]]
    bits = 8 * np.dtype(part).itemsize
    at_a, at_b = fragments(len(gets_a), bits, True), fragments(len(gets_b), bits, False)
    if len(gets_a) * 32 // bits * 32 != 16 * depth:
        raise Unsupported(f"mma with {len(gets_a)} registers of A: `{instruction.text}`")

    def unpack(team, gets, places, shape):
        words = np.stack([np.broadcast_to(get(team), team.lanes).reshape(-1, 32) for get in gets], 1)
        codes = np.ascontiguousarray(words).view(part).reshape(team.blocks, len(gets), 32, 32 // bits)
        matrix = np.empty((team.blocks, *shape))
        matrix[:, places[0], places[1]] = values(codes)
        return matrix

    def run(team, mask):
        team.whole_warps(mask, "mma")
        a, b = unpack(team, gets_a, at_a, (16, depth)), unpack(team, gets_b, at_b, (depth, 8))
        product = a @ b
        for index, target in enumerate(targets):
            row, column = ROW + (index >> 1) * 8, COLUMN * 2 + (index & 1)
            value = product[:, row, column].reshape(-1) + gets_c[index](team)
            if bits == 8 and FP8_SUM_BITS:
                value = cut(value, FP8_SUM_BITS)
            team.put(target, value.astype(np.float32), mask)

    return run


