"""TMA copies (`cp.async.bulk.tensor`) from global to shared memory, by tensor maps of the interpreter's own.

A map is 16 words: the tensor's address, bytes of an element, four dims (the innermost first), three strides in bytes, four sides
of the box, the bytes of the swizzle (as many as a row of the box has), and its rank. Of a lower rank, the last dims and sides are 1.
Elements of a box outside of the dims are 0.
"""

import struct

import numpy as np

from access import Place
from cluster import blocks_of
from memory import READ, WRITE, Fault
from operands import elements, register, source
from parse import split_operands

RANK, WORDS = 4, 16
RANKS = ("1d", "2d", "3d", "4d")
ALIGN = 1024  # of a box, to which the swizzle is relative


def tensor_map(address, element, dims, strides, box, swizzle):
    """The bytes of a map, a kernel's parameter."""
    rank, ones = len(dims), [1] * (RANK - len(dims))
    return struct.pack(f"<{WORDS}Q", address, element, *dims, *ones, *strides, *([0] * len(ones)), *box, *ones, swizzle, rank, 0)


def decode(machine, instruction):
    if instruction.name == "cp" and instruction.has("tensor") and instruction.has(*RANKS) and instruction.has("mbarrier::complete_tx::bytes"):
        return copy(machine, instruction)
    if instruction.name == "createpolicy":
        return policy(machine, instruction)
    if instruction.name == "fence" and instruction.has("proxy") and instruction.has("async"):
        return fence(machine, instruction.has("shared::cta"))
    return None


def fence(machine, of_block):
    """The proxy fence: what a warp wrote before is visible to TMA and wgmma too."""

    def run(team, mask):
        if machine.shared.races:
            machine.shared.races.fence(team.number, blocks_of(team, mask), of_block)

    return run


def policy(machine, instruction):
    """L2 cache hints, which change no result."""
    target = register(instruction.operands[0])
    return lambda team, mask: team.put(target, np.zeros(team.lanes, np.uint64), mask)


def copy(machine, instruction):
    target, barrier = (Place(machine, instruction, instruction.operands[at]) for at in (0, 2))
    name, coordinates = split_operands(instruction.operands[1][1:-1])
    where = source(machine, name, "u64")
    gets = [source(machine, text, "s32") for text in elements(coordinates)]
    targets = targets_of(machine, instruction, 3)
    if len(gets) != int(next(mod for mod in instruction.mods if mod in RANKS)[0]):
        raise Fault("another number of coordinates than the instruction says")

    def run(team, mask):
        for block, mine, key in machine.arrivals.find(team, barrier, mask, READ):
            lanes, (_, starts) = np.flatnonzero(mine), target.locate(team, mine, 1, ALIGN, WRITE, note=False)
            for lane, start in zip(lanes, starts):
                at = [int(np.broadcast_to(get(team), team.lanes)[lane]) for get in gets]
                described, data = box_of(machine, int(np.broadcast_to(where(team), team.lanes)[lane]), at)
                offsets = start + swizzled(len(data), described)
                for owner in targets(team, lane, block, key):
                    shift = (owner - key[0]) * machine.shared.size
                    machine.arrivals.send(block, team, (owner, key[1] + shift), offsets + shift, lambda data=data: data)

    return run


def targets_of(machine, instruction, operand):
    """The blocks to which a copy goes, as a function of the team, a lane, its block and the mbarrier that it names: that of the mbarrier, or
    those of a mask of ranks."""
    if not instruction.has("multicast::cluster"):
        return lambda team, lane, block, key: [key[0]]
    mask = source(machine, instruction.operands[operand], "u16")
    return lambda team, lane, block, key: machine.cluster.named_by(block, int(np.broadcast_to(mask(team), team.lanes)[lane]))


def box_of(machine, place, at):
    """The bytes of the swizzle, and those of a box."""
    words, start = machine.memory.bytes, machine.memory.locate(np.array([place], np.uint64), WORDS * 8, 64, READ)[0]
    address, element, *rest = (int(word) for word in words[start : start + WORDS * 8].view(np.uint64))
    dims, strides, box, swizzle, rank = rest[:4], [element, *rest[4:7]], rest[7:11], rest[11], rest[12]
    if len(at) != rank:
        raise Fault(f"a copy of rank {len(at)} by a map of rank {rank}")
    at = at + [0] * (RANK - rank)
    if box[0] * element != swizzle or address % 16 or any(stride % 16 for stride in strides[1:]):
        raise Fault("a map that the driver would refuse")
    index = np.stack(np.meshgrid(*(np.arange(side) for side in box[::-1]), indexing="ij"), -1).reshape(-1, RANK)[:, ::-1] + at
    inside = ((index >= 0) & (index < dims)).all(1)
    data = np.zeros((len(index), element), np.uint8)
    if inside.any():
        addresses = (address + index[inside] @ np.array(strides)).astype(np.uint64)
        data[inside] = words[machine.memory.locate(addresses, element, element, READ)[:, None] + np.arange(element)]
    return swizzle, data.reshape(-1)


def swizzled(size, swizzle):
    """Where the bytes of a box go: the swizzle permutes its chunks of 16 bytes by the line of 128 bytes they are in."""
    place = np.arange(size)
    return place ^ (place >> 7) % (swizzle // 16) << 4
