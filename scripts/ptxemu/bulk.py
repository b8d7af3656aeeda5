"""Copies to the shared memory of a block of the cluster that complete bytes on an mbarrier there: bulk copies without a tensor, from global
memory or from the block's own shared memory, and `st.async`.
"""

import numpy as np

from access import Place, type_and_width
from memory import READ, WRITE, Fault
from operands import elements, source
from parse import size_of
from races import CELL
from tma import targets_of

ALIGN = 16


def decode(machine, instruction):
    if not instruction.has("mbarrier::complete_tx::bytes"):
        return None
    if instruction.name == "st" and instruction.has("async"):
        return store(machine, instruction)
    if instruction.name == "cp" and instruction.has("bulk") and not instruction.has("tensor"):
        return copy(machine, instruction)
    return None


def store(machine, instruction):
    """`st.async`: a store of the warp's own, which needs no proxy fence."""
    type_name, width = type_and_width(instruction)
    place, barrier = (Place(machine, instruction, instruction.operands[at]) for at in (0, 2))
    size = size_of(type_name) * width
    gets = [source(machine, text, f"u{size_of(type_name) * 8}") for text in elements(instruction.operands[1])]

    def run(team, mask):
        for block, mine, key in machine.arrivals.find(team, barrier, mask, READ, True):
            _, starts = place.locate(team, mine, size, size, WRITE)
            values = np.stack([np.broadcast_to(get(team), team.lanes)[mine] for get in gets], 1)
            offsets = (starts[:, None] + np.arange(size)).reshape(-1)
            data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            machine.arrivals.send(block, team, key, offsets, lambda data=data: data, fenced=False)

    return run


def copy(machine, instruction):
    """`cp.async.bulk`. Shared memory that it copies is read when the copy completes."""
    target, origin, barrier = (Place(machine, instruction, instruction.operands[at]) for at in (0, 1, 3))
    of_global = instruction.has("global")
    target.shared = barrier.shared = True
    origin.shared, origin.may_leave = not of_global, False
    get, targets = source(machine, instruction.operands[2], "u32"), targets_of(machine, instruction, 4)

    def run(team, mask):
        races, size = machine.shared.races, machine.shared.size
        for block, mine, key in machine.arrivals.find(team, barrier, mask, READ):
            _, starts = target.locate(team, mine, 1, ALIGN, WRITE, note=False)
            for lane, start in zip(np.flatnonzero(mine), starts):
                count = int(np.broadcast_to(get(team), team.lanes)[lane])
                if count <= 0 or count % ALIGN:
                    raise Fault(f"a bulk copy of {count} bytes")
                if of_global:
                    data = from_global(machine, origin.address(team)[lane], count)
                else:
                    memory, (at,) = origin.locate(team, np.arange(team.lanes) == lane, count, ALIGN, READ)
                    if races:
                        races.check_fenced(np.arange(at, at + count, CELL) // CELL)
                    data = from_shared(machine, block, memory, slice(at, at + count))
                for owner in targets(team, lane, block, key):
                    shift = (owner - key[0]) * size
                    machine.arrivals.send(block, team, (owner, key[1] + shift), start + shift + np.arange(count), data)

    return run


def from_global(machine, address, count):
    offsets = machine.memory.locate(address + np.arange(0, count, ALIGN, np.uint64), ALIGN, ALIGN, READ)
    data = machine.memory.bytes[offsets[0] : offsets[0] + count].copy()
    return lambda: data


def from_shared(machine, block, memory, bytes_):
    def read():
        if machine.cluster.has_exited(block):
            raise Fault(f"{machine.cluster.name(block)} has exited before a bulk copy of its shared memory")
        return memory[bytes_]

    return read
