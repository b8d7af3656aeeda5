"""The frame times of examples/desktop while it decodes, with both cores to itself."""

import re

import window
from part import Part, Passed, must
from records import Failed, files


def units():
    [inputs] = window.units().values()
    return {"desktop": [*inputs, *files("scripts/verify/parts/frames.py")]}


def run(_stale, _full, log):
    said = must(log, "scripts/desktop.sh", "120", "--p95", "50")
    frames = re.search(r"^desktop: (\d+) frames decoded", said, re.M)
    if not frames:
        raise Failed("desktop did not say how many frames it had")
    return {"desktop": Passed(int(frames[1]))}


PART = Part("frames", "95 of 100 frames of the window within 50 ms while it decodes", 5, units, run, window.PART.tools, alone=True)
