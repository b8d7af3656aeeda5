"""TMA copies (`cp.async.bulk.tensor`) from global to shared memory, by tensor maps of the interpreter's own.

A map is 16 words: the tensor's address, bytes of an element, four dims (the innermost first), three strides in bytes, four sides
of the box, and the bytes of the swizzle (as many as a row of the box has). Elements of a box outside of the dims are 0.
"""

import struct

import numpy as np

from access import Place
from arrivals import BYTES
from memory import CELL, POISON, READ, WRITE, Fault
from operands import elements, register, source
from parse import split_operands

RANK, WORDS = 4, 16
ALIGN = 1024  # of a box, to which the swizzle is relative


def tensor_map(address, element, dims, strides, box, swizzle):
    """The bytes of a map, a kernel's parameter."""
    return struct.pack(f"<{WORDS}Q", address, element, *dims, *strides, *box, swizzle, 0, 0)


def decode(machine, instruction):
    if instruction.name == "cp" and instruction.has("tensor") and instruction.has(f"{RANK}d") and instruction.has("mbarrier::complete_tx::bytes"):
        return copy(machine, instruction)
    if instruction.name == "createpolicy":
        return policy(machine, instruction)
    if instruction.name == "fence" and instruction.has("proxy") and instruction.has("async"):
        return fence(machine)
    return None


def fence(machine):
    """The proxy fence: what a warp wrote before is visible to TMA and wgmma too."""

    def run(team, mask):
        if machine.shared.races:
            machine.shared.races.fence(team.number)

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

    def run(team, mask):
        for block, mine, key in machine.arrivals.find(team, barrier, mask, READ):
            lanes, (memory, starts) = np.flatnonzero(mine), target.locate(team, mine, 1, ALIGN, WRITE, note=False)
            if machine.shared.races:
                machine.shared.races.check_fenced(np.arange(key[1], key[1] + BYTES, CELL) // CELL)
            for lane, start in zip(lanes, starts):
                at = [int(np.broadcast_to(get(team), team.lanes)[lane]) for get in gets]
                described, data = box_of(machine, int(np.broadcast_to(where(team), team.lanes)[lane]), at)
                offsets = start + swizzled(len(data), described)
                if offsets.max() + 1 > (block + 1) * machine.shared.size:
                    raise Fault("a tensor copy past the end of shared memory")
                if machine.shared.races:
                    machine.shared.races.copied(team.number, offsets, block)
                memory[offsets] = POISON
                machine.arrivals.get(key).coming.append((machine.arrivals.known(block, team), offsets, data))

    return run


def box_of(machine, place, at):
    """The bytes of the swizzle, and those of a box."""
    words, start = machine.memory.bytes, machine.memory.locate(np.array([place], np.uint64), WORDS * 8, 64, READ)[0]
    address, element, *rest = (int(word) for word in words[start : start + WORDS * 8].view(np.uint64))
    dims, strides, box, swizzle = rest[:4], [element, *rest[4:7]], rest[7:11], rest[11]
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
