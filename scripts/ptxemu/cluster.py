"""Thread block clusters: blocks that use each other's shared memory.

A shared::cluster address has the rank of its block, plus one, above its 24 bits of offset. Without a rank it is one of the block that
executes. The blocks of a cluster stand one behind the other in the machine, by rank.

A block's memory may be used once its begin is known, by a cluster barrier; and until it exits, which must be ordered after every use.
"""

import numpy as np

from memory import SHARED_WINDOW, Fault
from operands import register, source

OFFSET_BITS = 24
LARGEST = 16


def shape_of(entry, grid, asked):
    """The blocks of a cluster along x, y and z: as a launch asks for, or as the entry requires."""
    asked = (asked, 1, 1) if isinstance(asked, int) else asked
    if entry.cluster and asked and tuple(asked) != entry.cluster:
        raise Fault(f"{entry.name}: clusters of {asked}, but it requires {entry.cluster}")
    if entry.needs_cluster and not (asked or entry.cluster):
        raise Fault(f"{entry.name} needs a cluster size")
    shape = tuple(asked or entry.cluster or (1, 1, 1))
    if not 0 < np.prod(shape) <= LARGEST:
        raise Fault(f"{entry.name}: clusters of {shape}")
    if any(blocks % side for blocks, side in zip(grid, shape)):
        raise Fault(f"{entry.name}: a grid of {grid} in clusters of {shape}")
    return shape


def special_registers(team, grid, shape, blocks):
    """The special registers of clusters; `blocks` has each block's place in the grid."""
    side, count = np.asarray(shape, np.uint32), np.asarray(grid, np.uint32) // np.asarray(shape, np.uint32)
    within = blocks % side
    rank = within @ np.array([1, shape[0], shape[0] * shape[1]], np.uint32)
    named = {"%cluster_ctarank": np.repeat(rank.astype(np.uint32), 32), "%cluster_nctarank": np.full(team.lanes, side.prod(), np.uint32)}
    named["%is_explicit_cluster"] = np.full(team.lanes, side.prod() > 1)
    for axis, letter in enumerate("xyz"):
        named[f"%cluster_ctaid.{letter}"] = np.repeat(within[:, axis], 32)
        named[f"%cluster_nctaid.{letter}"] = np.full(team.lanes, side[axis], np.uint32)
        named[f"%clusterid.{letter}"] = np.repeat((blocks // side)[:, axis], 32)
        named[f"%nclusterid.{letter}"] = np.full(team.lanes, count[axis], np.uint32)
    return named


class Cluster:
    """What the blocks of a machine's clusters, of `size` blocks each, do with each other's memory."""

    def __init__(self, machine, size, blocks):
        self.machine, self.size, self.blocks = machine, size, blocks
        self.exited = np.zeros(len(blocks), bool)
        # The step of each member at its last use of each other block's memory.
        self.used = np.zeros((len(blocks), size * machine.warps), np.int32)

    def name(self, block):
        """A block, for messages."""
        return f"block {block}" if self.size == 1 else f"block {block % self.size} of the cluster (%ctaid {', '.join(map(str, self.blocks[block]))})"

    def resolve(self, team, addresses, blocks, may_leave):
        """Shared addresses of lanes in `blocks`: their offsets, and whose memory they are in. `may_leave` is off for those of shared::cta."""
        if not addresses.max() >> np.uint64(OFFSET_BITS):
            return addresses, blocks
        ranks = (addresses >> np.uint64(OFFSET_BITS)).astype(np.int64) - 1
        if ranks.max() >= self.size:
            raise Fault(f"a shared address {int(addresses.max()):#x} of no block of the cluster")
        owners = np.where(ranks < 0, blocks, blocks // self.size * self.size + ranks)
        others = owners != blocks
        if others.any() and not may_leave:
            raise Fault("an address of another block's shared memory, for an instruction of shared::cta")
        for block, owner in {*zip(blocks[others].tolist(), owners[others].tolist())}:
            self.use(team, block, owner)
        return addresses & np.uint64((1 << OFFSET_BITS) - 1), owners

    def use(self, team, block, owner):
        """A warp of a block uses another block's memory."""
        races = self.machine.shared.races
        if self.has_exited(owner):
            raise Fault(f"{self.name(block)} uses the shared memory of {self.name(owner)}, which has exited")
        if races:
            if not races.has_begun(block, team.number, owner):
                raise Fault(f"{self.name(block)} uses the shared memory of {self.name(owner)}, of which no cluster barrier says that it has begun")
            group, member = races.member(block, team.number)
            self.used[owner, member] = races.known[group, member, member]

    def has_exited(self, block):
        lanes = slice(32 * block, 32 * block + 32)
        return not any(team.alive[lanes].any() for team in self.machine.teams)

    def note_exits(self):
        """A block that exits must know, in one of its warps, of every use of its memory: else it might have exited before."""
        races = self.machine.shared.races
        for block in np.flatnonzero(~self.exited):
            if not self.has_exited(block):
                continue
            self.exited[block] = True
            if races:
                group, first = races.member(block, 0)
                known = races.known[group, first : first + races.warps, : races.members].max(0)
                unknown = self.used[block] > known
                if unknown.any():
                    raise Fault(f"{self.name(block)} may exit before {races.name(int(np.argmax(unknown)))} has used its shared memory")

    def named_by(self, block, mask):
        """The blocks of a block's cluster that a mask of ranks names."""
        if not 0 < mask < 1 << self.size:
            raise Fault(f"a mask {mask:#x} that names blocks out of a cluster of {self.size}")
        first = block // self.size * self.size
        return [first + rank for rank in range(self.size) if mask >> rank & 1]


def decode(machine, instruction):
    name = instruction.name
    if name == "mapa":
        return map_address(machine, instruction)
    if name == "getctarank":
        return rank_of(machine, instruction)
    if name in ("fence", "membar") and not instruction.has("proxy"):
        if instruction.has("mbarrier_init"):
            return publish
        if machine.has_relaxed:
            return release
    return None


def window_of(instruction):
    """Where the addresses of an instruction begin: generic ones in the window of shared memory."""
    return np.uint64(0 if instruction.has("shared::cluster") else SHARED_WINDOW)


def map_address(machine, instruction):
    target, type_name, window = register(instruction.operands[0]), instruction.mods[-1], window_of(instruction)
    get, rank = source(machine, instruction.operands[1], type_name), source(machine, instruction.operands[2], "u32")

    def run(team, mask):
        ranks = np.broadcast_to(rank(team), team.lanes)
        if (ranks if mask is None else ranks[mask]).max() >= machine.cluster.size:
            raise Fault(f"mapa to a block out of a cluster of {machine.cluster.size}")
        offsets = get(team).astype(np.uint64) & np.uint64((1 << OFFSET_BITS) - 1)
        team.put(target, window + (offsets | (ranks.astype(np.uint64) + np.uint64(1)) << np.uint64(OFFSET_BITS)), mask)

    return run


def rank_of(machine, instruction):
    target, window = register(instruction.operands[0]), window_of(instruction)
    get = source(machine, instruction.operands[1], instruction.mods[-1])

    def run(team, mask):
        above = (get(team).astype(np.uint64) - window) >> np.uint64(OFFSET_BITS)
        team.put(target, np.where(above > 0, above - np.uint64(1), team.special["%cluster_ctarank"]).astype(np.uint32), mask)

    return run


def blocks_of(team, mask):
    """The blocks that take part."""
    return np.arange(team.blocks) if mask is None else np.flatnonzero(mask.reshape(-1, 32).any(1))


def publish(team, mask):
    """`fence.mbarrier_init`."""
    machine = team.machine
    for block in blocks_of(team, mask) if machine.shared.races else ():
        for barrier_block, offset in machine.arrivals.barriers:
            if barrier_block == block:
                machine.shared.races.publish(block, team.number, offset + np.arange(0, 8, 2))


def release(team, mask):
    """A fence before an arrival without release."""
    for block in blocks_of(team, mask) if team.machine.shared.races else ():
        team.machine.shared.races.release(block, team.number)
