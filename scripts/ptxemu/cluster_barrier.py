"""`barrier.cluster`: each thread of a cluster arrives, and later waits for all others that have not exited."""

import numpy as np

from memory import Fault


class ClusterBarrier:
    """The barrier of each cluster of a machine, and parked lanes: (cluster, team, address, lanes)."""

    def __init__(self, machine, clusters):
        self.machine, self.size = machine, machine.cluster.size
        self.phases, self.parked, self.is_used = np.zeros(clusters, np.int64), [], False
        # How often each lane of a team has arrived, and waited.
        self.arrived, self.waited = (np.zeros((machine.warps, clusters * self.size * 32), np.int64) for _ in range(2))
        races = machine.shared.races
        self.nothing = races.nothing() if races else None
        self.joined, self.released = [self.nothing] * clusters, [self.nothing] * clusters

    def arrive(self, team, mask, release):
        if (self.arrived[team.number] > self.waited[team.number])[mask].any():
            raise Fault("a second arrival at the cluster barrier with no wait between")
        self.arrived[team.number] += mask
        self.is_used = True
        races = self.machine.shared.races
        for block in np.flatnonzero(mask.reshape(-1, 32).any(1)) if races else ():
            cluster = block // self.size
            self.joined[cluster] = races.arrive(block, team.number, self.joined[cluster], release)

    def wait(self, team, mask, address):
        """Lanes whose phase is complete go on, the others park for `address`. Returns those that go on."""
        if (self.arrived[team.number] == self.waited[team.number])[mask].any():
            raise Fault("a wait at the cluster barrier with no arrival before")
        clusters = team.block // self.size
        over = mask & (self.phases[clusters] >= self.arrived[team.number])
        for cluster in np.unique(clusters[mask & ~over]):
            self.parked.append((int(cluster), team, address, mask & ~over & (clusters == cluster)))
        self.leave(team, over)
        return over

    def leave(self, team, lanes):
        self.waited[team.number] += lanes
        races = self.machine.shared.races
        for block in np.flatnonzero(lanes.reshape(-1, 32).any(1)) if races else ():
            races.leave(block, team.number, self.released[block // self.size])

    def missing(self, cluster):
        """The teams with lanes of a cluster that neither have arrived nor exited, and these lanes."""
        for team in self.machine.teams:
            lanes = team.alive & (team.block // self.size == cluster) & (self.arrived[team.number] <= self.phases[cluster])
            if lanes.any():
                yield team, lanes

    def release(self):
        """Ends the phases at which all have arrived. Returns whether that released lanes."""
        if not self.is_used:
            return False
        for cluster in range(len(self.phases)):
            if (self.arrived > self.phases[cluster])[:, cluster * self.size * 32 : (cluster + 1) * self.size * 32].any() and not any(self.missing(cluster)):
                self.phases[cluster] += 1
                self.joined[cluster], self.released[cluster] = self.nothing, self.joined[cluster]
        waiting, self.parked = self.parked, []
        for cluster, team, address, lanes in waiting:
            if self.phases[cluster] >= self.arrived[team.number][lanes].max():
                self.leave(team, lanes)
                team.wait(address, lanes)
            else:
                self.parked.append((cluster, team, address, lanes))
        return len(self.parked) < len(waiting)

    def lacks(self):
        """Who waits for ever, and for whom; or None."""
        if not self.parked:
            return None
        cluster, team, _, lanes = self.parked[0]
        name = self.machine.cluster.name
        others = [f"warp {other.number} of {name(block)}" for other, there in self.missing(cluster) for block in np.unique(other.block[there]).tolist()]
        return f"warp {team.number} of {name(int(team.block[lanes][0]))} waits for ever at the cluster barrier for {', '.join(others[:4])}"


def decode(machine, instruction, at):
    if instruction.name != "barrier" or not instruction.has("cluster"):
        return None
    aligned, arrives, release = instruction.has("aligned"), instruction.has("arrive"), not instruction.has("relaxed")

    def run(team, mask):
        mask = np.ones(team.lanes, bool) if mask is None else mask
        if aligned and (team.alive & ~mask).reshape(-1, 32)[mask.reshape(-1, 32).any(1)].any():
            raise Fault("an aligned cluster barrier that only a part of a warp has reached")
        if arrives:
            machine.cluster_barrier.arrive(team, mask, release)
            return None
        going = machine.cluster_barrier.wait(team, mask, at + 1)
        team.go_on = going
        return None if (going == mask).all() else True

    return run
