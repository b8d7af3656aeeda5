"""`bar.warp.sync`: lanes wait for those of their warp that their mask names, which may be parked elsewhere."""

import numpy as np

from memory import Fault
from operands import source


def decode(machine, instruction, at):
    if instruction.name != "bar" or not instruction.has("warp"):
        return None
    members = source(machine, instruction.operands[0], "u32")

    def run(team, mask):
        named = (np.broadcast_to(members(team), team.lanes) >> team.lane & np.uint32(1)).astype(bool)
        if mask is None and named.all():
            return None
        here = np.ones(team.lanes, bool) if mask is None else mask
        if (here & ~named).any():
            raise Fault("a lane that its own mask does not name")
        rows, masks = here.reshape(-1, 32), np.broadcast_to(members(team), team.lanes).reshape(-1, 32)
        for block in np.flatnonzero(rows.any(1)):
            for word in np.unique(masks[block][rows[block]]):
                team.at_warp_barrier.append((at + 1, block, int(word), rows[block] & (masks[block] == word)))
        # Most often all are here: they go on together.
        team.go_on = np.zeros(team.lanes, bool)
        for address, lanes in complete(team):
            if address == at + 1:
                team.go_on = team.go_on | lanes
            else:
                team.wait(address, lanes)
        return None if (team.go_on == here).all() else True

    return run


def complete(team):
    """Takes the lanes whose warp barrier all have reached: (where they go on, lanes)."""
    left, done = [], []
    for block, word in {(block, word) for _, block, word, _ in team.at_warp_barrier}:
        parts = [part for part in team.at_warp_barrier if part[1:3] == (block, word)]
        there = np.logical_or.reduce([lanes for *_, lanes in parts])
        missing = team.alive.reshape(-1, 32)[block] & (word >> np.arange(32) & 1).astype(bool) & ~there
        if missing.any():
            left += parts
            continue
        for address, _, _, lanes in parts:
            mine = np.zeros((team.blocks, 32), bool)
            mine[block] = lanes
            done.append((address, mine.reshape(-1)))
    team.at_warp_barrier = left
    return done


def release(team):
    """Releases lanes whose others have exited since. Returns whether it did."""
    done = complete(team) if team.at_warp_barrier else []
    for address, lanes in done:
        team.wait(address, lanes)
    return bool(done)
