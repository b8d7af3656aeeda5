"""Runs an entry: several blocks side by side, and between barriers one warp after the other.

A team is the warps of one index in all these blocks: its instructions run as numpy operations over all their lanes. The teams run
one after the other, first to last or last to first, each up to its next barrier: where a barrier is missing, one of both orders reads
data that was not yet written. Diverged lanes run lowest address first, until they reconverge. The blocks of a cluster are always in the
same team.
"""

import heapq

import numpy as np

import access
import alu
import arrivals
import bulk
import cluster
import cluster_barrier
import convert
import tensor
import tma
import warp_barrier
import wgmma
from memory import Fault, Shared
from operands import source
from parse import Unsupported
from races import Races

DTYPES = {"pred": np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
MAX_STEPS = 20_000_000

REGISTERS = 65536  # of a multiprocessor


class Team:
    """One warp of each block. A register is an array over all lanes that is replaced, never written into."""

    def __init__(self, machine, number, blocks):
        self.machine, self.number, self.blocks = machine, number, len(blocks)
        self.lanes = 32 * self.blocks
        self.regs = [np.zeros(self.lanes, dtype) for dtype in machine.register_dtypes]
        # Which block, as a number within the machine, and which lane of its warp each lane is.
        self.block = np.repeat(np.arange(self.blocks), 32)
        self.lane = np.tile(np.arange(32, dtype=np.uint32), self.blocks)
        self.special = self.specials(machine, np.asarray(blocks, np.uint32))
        self.alive = (self.lane + 32 * number < machine.threads)
        # Diverged groups: (address, a number that makes it unique, mask).
        self.waiting, self.count = [], 0
        self.committed = np.zeros(self.lanes, np.int64)
        self.flying, self.at_warp_barrier = [], []
        self.multiplications = wgmma.Multiplications(self.lanes)
        self.wait(0, self.alive)

    def specials(self, machine, blocks):
        thread = (self.lane + 32 * self.number).astype(np.uint32)
        x, y, z = machine.block_dim
        tid = [thread % x, thread // x % y, thread // (x * y)]
        named = {"%laneid": self.lane, "%warpid": np.full(self.lanes, self.number, np.uint32)}
        for axis, letter in enumerate("xyz"):
            named[f"%tid.{letter}"] = tid[axis].astype(np.uint32)
            named[f"%ntid.{letter}"] = np.full(self.lanes, machine.block_dim[axis], np.uint32)
            named[f"%nctaid.{letter}"] = np.full(self.lanes, machine.grid[axis], np.uint32)
            named[f"%ctaid.{letter}"] = np.repeat(blocks[:, axis], 32)
        named |= cluster.special_registers(self, machine.grid, machine.cluster_dim, blocks)
        one = np.uint32(1)
        named["%lanemask_eq"] = one << self.lane
        named["%lanemask_lt"] = (one << self.lane) - one
        named["%lanemask_le"] = (named["%lanemask_lt"] << one) | one
        named["%lanemask_gt"] = ~named["%lanemask_le"]
        named["%lanemask_ge"] = ~named["%lanemask_lt"]
        return named

    def wait(self, address, mask):
        if mask.any():
            heapq.heappush(self.waiting, (address, self.count, mask))
            self.count += 1

    def put(self, index, value, mask):
        """Writes a register where `mask` says, everywhere if it is None."""
        old = self.regs[index]
        if value.dtype != old.dtype:
            value = value.view(old.dtype) if value.dtype.itemsize == old.dtype.itemsize else value.astype(old.dtype)
        if mask is not None:
            value = np.where(mask, value, old)
        elif value.shape != old.shape:
            value = np.broadcast_to(value, old.shape)
        self.regs[index] = value

    def whole_warps(self, mask, what):
        """Every warp takes part with all its lanes, or with none."""
        if mask is not None:
            rows = mask.reshape(-1, 32)
            if (rows != rows[:, :1]).any():
                raise Fault(f"{what} by a part of a warp")

    def run(self):
        """Runs to the exit or to barriers. Returns whether it did anything."""
        if not self.waiting:
            return False
        code = self.machine.code
        while self.waiting:
            at, _, mask = heapq.heappop(self.waiting)
            full = mask.all()
            while True:
                # Others that wait at this address join.
                while self.waiting and self.waiting[0][0] == at:
                    mask = mask | heapq.heappop(self.waiting)[2]
                    full = mask.all()
                if at == len(code):
                    self.alive = self.alive & ~mask
                    break
                self.machine.steps += 1
                step, instruction = code[at]
                try:
                    go = step(self, None if full else mask)
                except (Fault, Unsupported, AssertionError) as error:
                    where = f"{self.machine.entry.name}, warp {self.number}, `{instruction.text}`"
                    raise Fault(f"{error} (in {where})") from error
                at += 1
                if go is None:
                    continue
                if go is True:
                    # It branched, parked or left: `go_on` holds those that fall through.
                    mask = self.go_on
                    if not mask.any():
                        break
                    full = mask.all()
                    if self.waiting and self.waiting[0][0] < at:
                        self.wait(at, mask)
                        break
        if self.machine.steps > MAX_STEPS:
            raise Fault(f"{self.machine.entry.name}: no end after {MAX_STEPS} instructions")
        return True


class Machine:
    """Blocks that run beside one another; those of a cluster are side by side, by rank."""

    def __init__(self, entry, memory, params, grid, block_dim, blocks, dynamic_bytes, order, races, cluster_dim=(1, 1, 1)):
        self.entry, self.memory, self.grid, self.block_dim, self.cluster_dim = entry, memory, grid, block_dim, cluster_dim
        self.threads = int(np.prod(block_dim))
        self.warps = -(-self.threads // 32)
        self.steps = self.atomics = 0
        dynamic = -(-entry.static_bytes // 1024) * 1024 if entry.dynamic else entry.static_bytes
        self.cluster = cluster.Cluster(self, int(np.prod(cluster_dim)), blocks)
        # Whether addresses may name a block, and whether arrivals may lack release.
        self.clustered = self.cluster.size > 1 or any(instruction.name == "mapa" for instruction in entry.code)
        self.has_relaxed = any(instruction.name in ("barrier", "mbarrier") and instruction.has("relaxed") for instruction in entry.code)
        self.shared = Shared(len(blocks), dynamic + dynamic_bytes)
        if races:
            self.shared.races = Races(len(blocks), self.shared.size, self.warps, self.cluster.size)
        self.cluster_barrier = cluster_barrier.ClusterBarrier(self, len(blocks) // self.cluster.size)
        self.symbols = dict(params)
        self.shared_names = set(entry.shared)
        for name, (offset, _) in entry.shared.items():
            self.symbols[name] = dynamic if offset is None else offset
        self.register_dtypes = [DTYPES["pred" if kind == "pred" else int(kind[1:]) // 8] for kind in entry.registers]
        self.register_types = entry.registers
        self.code = [(decode(self, instruction, at), instruction) for at, instruction in enumerate(entry.code)]
        self.arrivals = arrivals.Arrivals(self)
        self.teams = [Team(self, number, blocks) for number in range(self.warps)]
        # What parked at a barrier of a block: (block, barrier) to its state.
        self.barriers = {}
        self.turns = order(list(range(self.warps)))
        # Registers of each warp's threads: a block has as many as it is launched with, and `setmaxnreg.inc` waits for others to give theirs.
        self.registers = np.full(self.warps, min(REGISTERS // (32 * self.warps) // 8 * 8, 255))
        self.register_pool = int(self.registers.sum())

    def run(self):
        while True:
            moved = [self.teams[number].run() for number in self.turns]
            released = self.release() | self.arrivals.release() | self.cluster_barrier.release() | any([warp_barrier.release(team) for team in self.teams])
            if self.cluster.size > 1:
                self.cluster.note_exits()
            if not any(moved) and not released:
                break
        lacks = self.lacks()
        if lacks:
            raise Fault(f"{self.entry.name}: {'; '.join(lacks)}")
        return self.steps

    def lacks(self):
        """Who waits for ever."""
        found = [f"warp {warp} of {self.cluster.name(block)} waits for ever for parity {parity} of the mbarrier at {at}" for block, warp, parity, at in self.arrivals.waiting()]
        found += [f"{state['threads']} threads of {self.cluster.name(block)} wait for ever at barrier {number}" for (block, number), state in self.barriers.items()]
        found += [f"warp {team.number} of {self.cluster.name(block)} waits for ever for its lanes" for team in self.teams for _, block, _, _ in team.at_warp_barrier]
        if (wanted := int(self.registers.sum())) > self.register_pool:
            found.append(f"setmaxnreg waits for ever: {wanted} registers for a thread of each warp, the block has {self.register_pool}")
        at_cluster = self.cluster_barrier.lacks()
        return (found[:4] if self.cluster.size > 1 else found[:1]) + [at_cluster] * bool(at_cluster)

    def arrive(self, team, mask, number, threads, address, vote=None):
        """Lanes arrive at a barrier; they park for `address` unless it is None. A vote is a register and each lane's value."""
        lanes = (np.ones(team.lanes, bool) if mask is None else mask).reshape(-1, 32)
        alive = team.alive.reshape(-1, 32)
        for block in np.flatnonzero(lanes.any(1)):
            if (alive[block] & ~lanes[block]).any():
                raise Fault("a barrier that only a part of a warp has reached")
            nothing = self.shared.races and self.shared.races.nothing()
            fresh = {"threads": 0, "parked": [], "joined": nothing, "want": threads, "any": False}
            state = self.barriers.setdefault((int(block), number), fresh)
            if state["want"] != threads:
                raise Fault(f"barrier {number} with {state['want']} threads and with {threads}")
            state["threads"] += 32 if threads else int(lanes[block].sum())
            if self.shared.races:
                state["joined"] = self.shared.races.arrive(block, team.number, state["joined"])
            if address is not None:
                mine = np.zeros(team.lanes, bool)
                mine.reshape(-1, 32)[block] = lanes[block]
                state["parked"].append((team, address, mine, vote and vote[0]))
                state["any"] |= vote is not None and bool(vote[1][mine].any())

    def release(self):
        """Releases the lanes at a barrier that all have reached. Exited lanes count as arrived."""
        released = False
        for key, state in list(self.barriers.items()):
            block, _ = key
            want = state["want"] or sum(int(team.alive.reshape(-1, 32)[block].sum()) for team in self.teams)
            if state["threads"] > want:
                raise Fault(f"{state['threads']} threads came to barrier {key[1]} of {want}")
            if state["threads"] < want:
                continue
            for team, address, mine, target in state["parked"]:
                if target is not None:
                    team.put(target, np.full(team.lanes, state["any"]), mine)
                if self.shared.races:
                    self.shared.races.leave(block, team.number, state["joined"])
                team.wait(address, mine)
            del self.barriers[key]
            released = True
        return released


def decode(machine, instruction, at):
    """An instruction as a function of (team, mask)."""
    step = control(instruction, at, machine)
    for family in (warp_barrier, cluster_barrier, arrivals):
        step = step or family.decode(machine, instruction, at)
    for family in (bulk, cluster, tma, wgmma, access, convert, tensor, alu):
        step = step or family.decode(machine, instruction)
    if step is None:
        raise Unsupported(f"instruction `{instruction.text}`")
    if instruction.name == "bra" or not instruction.guard:
        return step
    return guarded(step, int(instruction.guard[1:]), instruction.guard_not)


def guarded(step, guard, negated):
    def run(team, mask):
        chosen = ~team.regs[guard] if negated else team.regs[guard]
        if mask is not None:
            chosen = chosen & mask
        elif chosen.all():
            return step(team, None)
        if not chosen.any():
            return None
        went = step(team, chosen)
        if went is True:
            # Lanes whose guard is false continue together with those that fall through.
            rest = ~chosen if mask is None else mask & ~chosen
            team.go_on = team.go_on | rest
        return went

    return run


def control(instruction, at, machine):
    """Branches, barriers and exits: they return True and leave in `go_on` who falls through."""
    name, target = instruction.name, instruction.target
    if name == "bra":
        guard = int(instruction.guard[1:]) if instruction.guard else None

        def branch(team, mask):
            mask = np.ones(team.lanes, bool) if mask is None else mask
            chosen = mask
            if guard is not None:
                chosen = mask & (~team.regs[guard] if instruction.guard_not else team.regs[guard])
                if not chosen.any():
                    return None
            team.wait(target, chosen)
            team.go_on = mask & ~chosen
            return True

        return branch
    if name in ("ret", "exit"):

        def leave(team, mask):
            mask = np.ones(team.lanes, bool) if mask is None else mask
            team.alive = team.alive & ~mask
            team.go_on = np.zeros(team.lanes, bool)
            return True

        return leave
    if name in ("bar", "barrier") and instruction.has("sync", "arrive") and not instruction.has("warp", "cluster"):
        number, threads = instruction.operands[0], instruction.operands[1:]
        return barrier(machine, number, threads, None if instruction.has("arrive") else at + 1)
    if name in ("bar", "barrier") and instruction.has("red") and instruction.has("or"):
        target, number, *threads, said = instruction.operands
        return barrier(machine, number, threads, at + 1, (int(target[1:]), int(said[1:])))
    if name == "trap":

        def trap(team, mask):
            raise Fault("trap")

        return trap
    return None


def barrier(machine, number, threads, address, vote=None):
    """Lanes arrive at a barrier and continue at `address`, or do not wait if it is None. A vote is the target register and each lane's value."""
    number, threads = source(machine, number, "u32"), int(threads[0], 0) if threads else 0

    def come(team, mask):
        numbers = np.unique(np.broadcast_to(number(team), team.lanes)[slice(None) if mask is None else mask])
        if len(numbers) > 1:
            raise Fault(f"lanes at different barriers: {numbers}")
        said = vote and (vote[0], np.broadcast_to(team.regs[vote[1]], team.lanes))
        machine.arrive(team, mask, int(numbers[0]), threads, address, said)
        if address is None:
            return None
        team.go_on = np.zeros(team.lanes, bool)
        return True

    return come
