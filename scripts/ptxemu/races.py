"""Finds accesses to shared memory of two warps that nothing orders, by vector clocks, in cells of two bytes.

A member is a warp of a cluster: of each of its blocks, by rank, the warps in turn. Without clusters each block is one of its own.
Each member counts its own steps between barriers, and has the count of every other member at the last barrier that they
shared. An access is ordered after another member's if its member has at least that count.

A clock has a second count for each member, after those of the first kind: of what even an arrival without release says to others. That is
that the member has begun, and which mbarriers it initialised before a `fence.mbarrier_init`.
"""

import numpy as np

from memory import Fault

CELL = 2


class Races:
    """The clocks of some clusters, and who last wrote and read each cell."""

    def __init__(self, blocks, size, warps, cluster=1):
        # Cells of a block, and of all blocks.
        self.cells = size // CELL
        cells = blocks * self.cells
        self.warps, self.cluster, self.members = warps, cluster, warps * cluster
        every = np.arange(2 * self.members)
        self.known = np.zeros((blocks // cluster, self.members, 2 * self.members), np.int32)
        self.known[:, every % self.members, every] = 1
        # What each had known at its last fence.
        self.fenced = np.zeros_like(self.known)
        self.writer = np.zeros(cells, np.int16)
        self.written = np.zeros(cells, np.int32)
        self.read_at = np.zeros((self.members, cells), np.int32)
        # Written, with no proxy fence since; TMA and wgmma need one.
        self.unfenced = np.zeros(cells, bool)

    def member(self, block, warp):
        """The cluster and the member that a warp is; `block` is one or an array."""
        if self.cluster == 1:
            return block, warp
        return block // self.cluster, block % self.cluster * self.warps + warp

    def name(self, member):
        """A member, for messages."""
        block, warp = divmod(member % self.members, self.warps)
        return f"warp {warp}" if self.cluster == 1 else f"warp {warp} of block {block} of the cluster"

    def nothing(self):
        """The clock of a barrier at which nobody has arrived."""
        return np.zeros(2 * self.members, np.int32)

    def access(self, warp, offsets, blocks, size, write):
        """Notes accesses of one warp in several blocks; a fault if another warp's is not ordered before them."""
        width = max(size // CELL, 1)
        cells = (offsets[:, None] // CELL + np.arange(width)).reshape(-1)
        groups, mine = self.member(np.repeat(blocks, width), warp)
        writer = self.writer[cells]
        late = (writer != mine) & (self.written[cells] > self.known[groups, mine, writer])
        if late.any():
            self.fault("write" if write else "read", mine, late, "write", int(writer[late][0]))
        now = self.known[groups, mine, mine]
        if not write:
            self.read_at[mine, cells] = now
            return
        unseen = self.read_at[:, cells] > self.known[groups, mine, : self.members].T
        unseen[mine, np.arange(len(cells))] = False
        if unseen.any():
            self.fault("write", mine, unseen.any(0), "read", int(np.argmax(unseen.any(1))))
        self.writer[cells] = mine
        self.written[cells] = now
        self.unfenced[cells] = True

    def fault(self, what, mine, where, other, whose):
        mine = int(np.broadcast_to(mine, where.shape)[where][0])
        raise Fault(f"race in shared memory: a {what} of {self.name(mine)}, and a {other} of {self.name(whose)} with no barrier between")

    def fence(self, warp, blocks, of_block):
        """A proxy fence in some blocks: a warp's writes so far are visible to TMA and wgmma too. In clusters, those that are ordered before it by
        other warps too, as the writer cannot fence an `st.async`; if `of_block`, only those to its own block's memory."""
        if self.cluster == 1:
            self.unfenced[self.writer == warp] = False
            return
        for block, group, member in zip(blocks, *self.member(blocks, warp)):
            first, count = (block, 1) if of_block else (group * self.cluster, self.cluster)
            start = first * self.cells
            cells = start + np.flatnonzero(self.unfenced[start : start + count * self.cells])
            known = self.written[cells] <= self.known[group, member, self.writer[cells]]
            self.unfenced[cells[known]] = False

    def check_fenced(self, cells):
        if self.unfenced[cells].any():
            raise Fault("a tensor copy, or a matrix of a warpgroup, where a warp has written with no fence since")

    def copied(self, warp, offsets, block):
        """Notes a TMA copy that a warp issues, byte by byte: a write, ordered after earlier writes only by a proxy fence."""
        cells = offsets[::CELL] // CELL
        self.check_fenced(cells)
        self.access(warp, cells * CELL, np.full(len(cells), block), CELL, True)
        self.unfenced[cells] = False

    def arrive(self, block, warp, joined, release=True):
        """A warp reaches a barrier: its clock is merged into the barrier's, and its own counts go up. Without release, only what it had known
        at its last fence."""
        group, member = self.member(block, warp)
        said = self.known[group, member]
        if not release:
            said, second = self.fenced[group, member].copy(), said[self.members + member]
            said[self.members + member] = second
        joined = np.maximum(joined, said)
        self.known[group, member, member :: self.members] += 1
        return joined

    def leave(self, block, warp, joined):
        """A warp leaves a barrier with the merged clock of all that arrived."""
        member = self.member(block, warp)
        self.known[member] = np.maximum(self.known[member], joined)

    def release(self, block, warp):
        """A fence: later arrivals without release say what was before it."""
        group, member = self.member(block, warp)
        self.fenced[group, member] = self.known[group, member]
        self.known[group, member, member] += 1

    def publish(self, block, warp, offsets):
        """`fence.mbarrier_init`: a warp's mbarriers at these offsets, initialised and not written since, are visible to TMA, and to all to whom
        it arrives."""
        group, member = self.member(block, warp)
        cells = offsets // CELL
        cells = cells[self.writer[cells] == member]
        self.unfenced[cells] = False
        self.writer[cells] = self.members + member
        self.written[cells] = self.known[group, member, self.members + member]

    def has_begun(self, block, warp, other):
        """Whether a warp knows that another block of its cluster has begun."""
        group, member = self.member(block, warp)
        first = self.members + other % self.cluster * self.warps
        return self.known[group, member, first : first + self.warps].any()
