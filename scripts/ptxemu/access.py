"""Loads, stores, atomics and asynchronous copies."""

import numpy as np

from memory import POISON, READ, SHARED_WINDOW, WRITE, Fault
from operands import UNSIGNED, address, dtype_of, elements, in_shared_window, register, source
from parse import Unsupported, size_of

TYPES = {kind + bits for kind in "bus" for bits in ("8", "16", "32", "64")} | {"f16", "f32", "f64", "f16x2"}


def decode(machine, instruction):
    name = instruction.name
    if name in ("ld", "ldu"):
        return load(machine, instruction)
    if name == "st":
        return store(machine, instruction)
    if name in ("atom", "red"):
        return atomic(machine, instruction)
    if name == "cp" and instruction.has("async"):
        return copy(machine, instruction)
    if name in ("membar", "fence", "prefetch", "prefetchu", "nanosleep", "griddepcontrol", "discard", "applypriority"):
        return lambda team, mask: None
    if name == "cvta":
        return convert_address(machine, instruction)
    return None


def convert_address(machine, instruction):
    """Only shared memory has an address window of its own; all other state spaces use generic addresses."""
    target = register(instruction.operands[0])
    get = source(machine, instruction.operands[1], instruction.mods[-1])
    shift = np.uint64(SHARED_WINDOW if any(mod.startswith("shared") for mod in instruction.mods) else 0)

    def run(team, mask):
        value = get(team).astype(np.uint64)
        team.put(target, value - shift if instruction.has("to") else value + shift, mask)

    return run


def type_and_width(instruction):
    type_name = next(mod for mod in reversed(instruction.mods) if mod in TYPES)
    return type_name, next((int(mod[1]) for mod in instruction.mods if mod in ("v2", "v4", "v8")), 1)


class Place:
    """Where an instruction's addresses point: bytes of a memory, and the checks on the way."""

    def __init__(self, machine, instruction, text):
        self.machine = machine
        self.address = address(machine, text)
        shared = any(mod.startswith("shared") for mod in instruction.mods)
        elsewhere = instruction.has("global", "const", "param", "local")
        if instruction.has("local"):
            raise Unsupported("local memory: an array that is no register")
        self.shared = True if shared else False if elsewhere else None
        # Whether it may be in another block of the cluster.
        self.may_leave = instruction.has("shared::cluster") or self.shared is None

    def locate(self, team, mask, size, align, right, note=True):
        """(bytes, offsets of the active lanes)."""
        addresses, blocks = self.address(team), team.block
        if mask is not None:
            addresses, blocks = addresses[mask], blocks[mask]
        shared = self.shared
        if shared is None:
            inside = in_shared_window(addresses)
            shared = bool(inside.all())
            if inside.any() and not shared:
                raise Unsupported("a generic access that is partly to shared memory")
            if shared:
                addresses = addresses - np.uint64(SHARED_WINDOW)
        if not shared:
            return self.machine.memory.bytes, self.machine.memory.locate(addresses, size, align, right)
        memory, owners = self.machine.shared, blocks
        if self.machine.clustered:
            addresses, owners = self.machine.cluster.resolve(team, addresses, blocks, self.may_leave)
        offsets = memory.locate(addresses, owners, size, align)
        if note and memory.races:
            memory.races.access(team.number, offsets, blocks, size, right == WRITE)
        return memory.bytes, offsets


def spread(team, mask, values):
    """Values of the active lanes as an array over all."""
    if mask is None:
        return values
    out = np.zeros(team.lanes, values.dtype)
    out[mask] = values
    return out


def load(machine, instruction):
    type_name, width = type_and_width(instruction)
    place = Place(machine, instruction, instruction.operands[1])
    targets = [None if name == "_" else register(name) for name in elements(instruction.operands[0])]
    size = size_of(type_name)
    dtype = dtype_of(type_name)
    plain = UNSIGNED[size]

    def run(team, mask):
        memory, offsets = place.locate(team, mask, size * width, size * width, READ)
        words, first = memory.view(plain), offsets // size
        for index, target in enumerate(targets):
            if target is not None:
                value = words[first + index].view(dtype)
                # A wider register gets it with its sign.
                wide = np.dtype(machine.register_dtypes[target])
                if dtype.kind == "i" and wide.itemsize > size:
                    value = value.astype(f"i{wide.itemsize}")
                team.put(target, spread(team, mask, value), mask)

    return run


def store(machine, instruction):
    type_name, width = type_and_width(instruction)
    place = Place(machine, instruction, instruction.operands[0])
    size = size_of(type_name)
    plain = UNSIGNED[size]
    gets = [source(machine, text, f"u{size * 8}") for text in elements(instruction.operands[1])]

    def run(team, mask):
        memory, offsets = place.locate(team, mask, size * width, size * width, WRITE)
        words, first = memory.view(plain), offsets // size
        for index, get in enumerate(gets):
            value = np.broadcast_to(get(team), team.lanes)
            words[first + index] = value if mask is None else value[mask]

    return run


def two(kind):
    """A function of the old and the new value."""
    return {
        "add": lambda old, new: old + new,
        "min": min,
        "max": max,
        "and": lambda old, new: old & new,
        "or": lambda old, new: old | new,
        "xor": lambda old, new: old ^ new,
        "exch": lambda old, new: new,
        "inc": lambda old, new: old.dtype.type(0) if old >= new else old + old.dtype.type(1),
        "dec": lambda old, new: new if old == 0 or old > new else old - old.dtype.type(1),
    }[kind]


def atomic(machine, instruction):
    """One lane after the other, since they may use the same address."""
    type_name, _ = type_and_width(instruction)
    operands = list(instruction.operands)
    target = None
    if instruction.name == "atom":
        first = operands.pop(0)
        target = None if first == "_" else register(first)
    kinds = ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")
    kind = next(mod for mod in instruction.mods if mod in kinds)
    place = Place(machine, instruction, operands[0])
    dtype = dtype_of("u" + type_name[1:] if type_name[0] == "b" else type_name)
    gets = [source(machine, text, type_name) for text in operands[1:3]]
    size = size_of(type_name)

    def run(team, mask):
        machine.atomics += 1
        # Two atomics of the same word are no race, a plain write and an atomic are.
        memory, offsets = place.locate(team, mask, size, size, READ)
        if memory is machine.memory.bytes:
            place.locate(team, mask, size, size, WRITE)
        values = [np.broadcast_to(get(team), team.lanes).view(dtype) for get in gets]
        values = values if mask is None else [value[mask] for value in values]
        words, olds = memory.view(dtype), np.zeros(len(offsets), dtype)
        for index, at in enumerate(offsets // size):
            olds[index] = old = words[at]
            if kind == "cas":
                words[at] = values[1][index] if old == values[0][index] else old
            else:
                words[at] = two(kind)(old, values[0][index])
        if target is not None:
            team.put(target, spread(team, mask, olds), mask)

    return run


def copy(machine, instruction):
    """`cp.async`: the target is poison until its group was waited for."""
    if instruction.has("commit_group"):

        def commit(team, mask):
            team.committed = team.committed + (1 if mask is None else mask)

        return commit
    if instruction.has("wait_group", "wait_all"):
        newest = int(instruction.operands[0], 0) if instruction.operands else None

        def wait(team, mask):
            # `wait_all` also waits for what is in no group yet.
            limit = team.committed + 1 if newest is None else team.committed - newest
            land(machine, team, limit if mask is None else np.where(mask, limit, -1))

        return wait
    if instruction.has("bulk", "mbarrier"):
        return None
    target = Place(machine, instruction, instruction.operands[0])
    origin = Place(machine, instruction, instruction.operands[1])
    origin.shared = False
    size = int(instruction.operands[2], 0)
    many = instruction.operands[3] if len(instruction.operands) > 3 and not instruction.has("L2::cache_hint") else None
    if len(instruction.operands) > 4:
        many = instruction.operands[3]
    get = source(machine, many, "u32") if many else None

    def run(team, mask):
        active = np.ones(team.lanes, bool) if mask is None else mask
        memory, offsets = target.locate(team, active, size, size, WRITE)
        wanted = np.broadcast_to(get(team), team.lanes)[active] if get else np.full(len(offsets), size, np.uint32)
        if wanted.max() > size:
            raise Fault(f"cp.async of {wanted.max()} bytes into {size}")
        data = np.zeros((len(offsets), size), np.uint8)
        for part in np.unique(wanted[wanted > 0]):
            lanes = active.copy()
            lanes[active] = wanted == part
            given, start = origin.locate(team, lanes, int(part), size, READ)
            data[wanted == part, :part] = given[start[:, None] + np.arange(part)]
        memory[offsets[:, None] + np.arange(size)] = POISON
        lane = np.flatnonzero(active)
        team.flying.append((team.committed[lane], lane, offsets, data))

    return run


def land(machine, team, limit):
    """Copies whose group is older than each lane's limit arrive."""
    left, memory = [], machine.shared
    for group, lane, offsets, data in team.flying:
        done = group < limit[lane]
        if done.any():
            if memory.races:
                memory.races.access(team.number, offsets[done], team.block[lane[done]], data.shape[1], True)
            memory.bytes[offsets[done][:, None] + np.arange(data.shape[1])] = data[done]
        if not done.all():
            keep = ~done
            left.append((group[keep], lane[keep], offsets[keep], data[keep]))
    team.flying = left
