"""mbarriers: barriers in shared memory, where a warp that arrives need not wait.

A `test_wait` parks its lanes until the phase is complete, so it never returns false. Copies that an arrival waits for, and those that
complete bytes (TMA, bulk copies, `st.async`), complete as late as possible: when warps wait and nothing else is missing. Arrivals and
copies may be at the mbarrier of another block of the cluster. Scopes are not checked.
"""

import numpy as np

from access import Place
from memory import POISON, READ, WRITE, Fault
from operands import register, source
from parse import Unsupported
from races import CELL

BYTES = 8


class Barrier:
    """An mbarrier of a block: the arrivals of a phase, those still missing, completed phases, and the clocks of the warps that arrived."""

    def __init__(self, want, nothing):
        self.want = self.missing = want
        self.phases = 0
        self.nothing = nothing
        self.joined = self.released = self.nothing
        # Arrivals that wait for copies: (how many, their copies).
        self.held = []
        # Bytes that the phase still expects, and the copies in flight: (their warp's clock, target, a function that gives the bytes).
        self.bytes, self.coming = 0, []

    def is_over(self, parity):
        return self.phases & 1 != parity

    def arrive(self, threads, joined):
        self.joined = np.maximum(self.joined, joined)
        self.missing -= threads
        if self.missing < 0:
            raise Fault(f"more than {self.want} arrivals at a barrier in one phase")
        self.end_if_complete()

    def land(self, joined, size):
        self.joined = np.maximum(self.joined, joined)
        self.bytes -= size
        if self.bytes < 0:
            raise Fault("more bytes arrive at a barrier than it expects")
        self.end_if_complete()

    def end_if_complete(self):
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.released, self.joined = self.want, self.joined, self.nothing
            self.phases += 1


class Arrivals:
    """The mbarriers of a machine's blocks, by (block, offset), and parked lanes: (barrier, parity, team, address, lanes). Offsets are those
    into the memory of all blocks."""

    def __init__(self, machine):
        self.machine, self.barriers, self.parked = machine, {}, []

    def find(self, team, place, mask, right, several=False):
        """For each block that takes part: its number, its lanes, and the key of the one barrier that they name, or each if `several`."""
        active = np.ones(team.lanes, bool) if mask is None else mask
        _, offsets = place.locate(team, active, BYTES, BYTES, right)
        for block in np.unique(team.block[active]):
            mine = active & (team.block == block)
            named = np.unique(offsets[team.block[active] == block])
            if len(named) > 1 and not several:
                raise Fault("lanes at different barriers")
            for at in named:
                lanes = mine
                if len(named) > 1:
                    lanes = mine.copy()
                    lanes[active] &= offsets == at
                yield int(block), lanes, self.key(at)

    def key(self, offset):
        return int(offset) // self.machine.shared.size, int(offset)

    def get(self, key):
        if key not in self.barriers:
            raise Fault("an mbarrier that nothing has begun")
        return self.barriers[key]

    def known(self, block, team, release=True):
        """A warp's vector clock when it arrives; its own count of steps goes up."""
        races = self.machine.shared.races
        return races.arrive(block, team.number, races.nothing(), release) if races else 0

    def send(self, block, team, key, offsets, data, fenced=True):
        """A warp of a block issues a copy that completes on an mbarrier: of TMA, or of the warp itself if not `fenced`. `data` gives the bytes."""
        races, size = self.machine.shared.races, self.machine.shared.size
        owner, at = key
        if offsets.min() < owner * size or offsets.max() >= owner * size + self.machine.shared.used:
            raise Fault("a copy past the end of shared memory, or to another block than its mbarrier")
        if owner != block:
            self.machine.cluster.use(team, block, owner)
        if races and fenced:
            races.check_fenced(np.arange(at, at + BYTES, CELL) // CELL)
            if owner != block:
                races.access(team.number, np.array([at]), np.array([block]), BYTES, False)
            races.copied(team.number, offsets, block)
        self.machine.shared.bytes[offsets] = POISON
        self.get(key).coming.append((self.known(block, team), offsets, data))

    def leave(self, block, team, barrier):
        if self.machine.shared.races:
            self.machine.shared.races.leave(block, team.number, barrier.released)

    def release(self):
        """Completes copies that are all a phase is waiting for, and releases lanes whose phase is complete."""
        for key in {parked[0] for parked in self.parked}:
            barrier = self.barriers[key]
            if barrier.held and sum(threads for threads, _, _ in barrier.held) == barrier.missing:
                held, barrier.held = barrier.held, []
                for threads, joined, flights in held:
                    for offsets, data in flights:
                        self.machine.shared.bytes[offsets[:, None] + np.arange(data.shape[1])] = data
                    barrier.arrive(threads, joined)
            if barrier.missing == 0:
                coming, barrier.coming = barrier.coming, []
                for joined, offsets, data in coming:
                    self.machine.shared.bytes[offsets] = data()
                    barrier.land(joined, len(offsets))
        waiting, self.parked = self.parked, []
        for key, parity, team, address, mine in waiting:
            if self.barriers[key].is_over(parity):
                team.wait(address, mine)
            else:
                self.parked.append((key, parity, team, address, mine))
        return len(self.parked) < len(waiting)

    def waiting(self):
        """The parked warps: (block, warp, parity, where its mbarrier is in the block)."""
        for (owner, at), parity, team, _, _ in self.parked:
            yield owner, team.number, parity, at - owner * self.machine.shared.size


def decode(machine, instruction, at):
    if instruction.name == "cp" and instruction.has("mbarrier"):
        return cp_async_mbarrier_arrive(machine, instruction) if instruction.has("noinc") else None
    if instruction.name != "mbarrier":
        return None
    if instruction.has("init"):
        return begin(machine, instruction)
    if instruction.has("arrive"):
        return arrive(machine, instruction)
    if instruction.has("expect_tx"):
        return expect(machine, instruction)
    if instruction.has("test_wait", "try_wait") and instruction.has("parity"):
        return wait(machine, instruction, at)
    return None


def begin(machine, instruction):
    place, want = Place(machine, instruction, instruction.operands[0]), source(machine, instruction.operands[1], "u32")
    nothing = machine.shared.races.nothing() if machine.shared.races else 0

    def run(team, mask):
        for _, mine, key in machine.arrivals.find(team, place, mask, WRITE):
            if mine.sum() > 1:
                raise Fault("several lanes begin one mbarrier")
            machine.arrivals.barriers[key] = Barrier(int(np.broadcast_to(want(team), team.lanes)[mine][0]), nothing)

    return run


def arrive(machine, instruction):
    name, at, *more = instruction.operands
    state, place = None if name == "_" else register(name), Place(machine, instruction, at)
    expects, release = instruction.has("expect_tx"), not instruction.has("relaxed")
    number = source(machine, more[0], "u32") if more else None
    if not more and expects or len(more) > 1:
        raise Unsupported(f"mbarrier `{instruction.text}`")

    def run(team, mask):
        for block, mine, key in machine.arrivals.find(team, place, mask, READ, place.may_leave):
            barrier, count = machine.arrivals.get(key), int(mine.sum())
            if number:
                numbers = int(np.broadcast_to(number(team), team.lanes)[mine].sum())
                if expects:
                    barrier.bytes += numbers
                else:
                    count = numbers
            barrier.arrive(count, machine.arrivals.known(block, team, release))
        if state is not None:
            team.put(state, np.zeros(team.lanes, np.uint64), mask)

    return run


def expect(machine, instruction):
    """`mbarrier.expect_tx`: more bytes for the phase, without an arrival."""
    place, size = Place(machine, instruction, instruction.operands[0]), source(machine, instruction.operands[1], "u32")

    def run(team, mask):
        for _, mine, key in machine.arrivals.find(team, place, mask, READ, place.may_leave):
            machine.arrivals.get(key).bytes += int(np.broadcast_to(size(team), team.lanes)[mine].sum())

    return run


def cp_async_mbarrier_arrive(machine, instruction):
    place = Place(machine, instruction, instruction.operands[0])

    def run(team, mask):
        for block, mine, key in machine.arrivals.find(team, place, mask, READ):
            flights, left = [], []
            for group, lane, offsets, data in team.flying:
                own = mine[lane]
                flights.append((offsets[own], data[own]))
                left.append((group[~own], lane[~own], offsets[~own], data[~own]))
            team.flying = [flight for flight in left if len(flight[1])]
            machine.arrivals.get(key).held.append((int(mine.sum()), machine.arrivals.known(block, team), flights))

    return run


def wait(machine, instruction, at):
    target, place = register(instruction.operands[0]), Place(machine, instruction, instruction.operands[1])
    parity, acquires = source(machine, instruction.operands[2], "u32"), not instruction.has("relaxed")
    # A loop that waits parks; a test whose result is used otherwise does not.
    polls = machine.entry.code[at + 1].name != "bra"

    def run(team, mask):
        gone, parked = np.zeros(team.lanes, bool), False
        for block, mine, key in machine.arrivals.find(team, place, mask, READ):
            barrier, wanted = machine.arrivals.get(key), np.unique(np.broadcast_to(parity(team), team.lanes)[mine])
            if len(wanted) > 1:
                raise Fault("lanes that wait for different phases")
            if key[0] != block:
                raise Fault("a wait for an mbarrier of another block")
            if barrier.is_over(int(wanted[0])):
                if acquires:
                    machine.arrivals.leave(block, team, barrier)
                gone |= mine
            elif polls:
                team.put(target, np.zeros(team.lanes, bool), mine)
            else:
                machine.arrivals.parked.append((key, int(wanted[0]), team, at, mine))
                parked = True
        team.put(target, np.ones(team.lanes, bool), gone)
        if not parked:
            return None
        team.go_on = gone
        return True

    return run
