"""The committed PTX is what the pinned compiler gives, and three assemblers take it within its limits: a unit a .cu."""

import re

from part import Part, Passed, run as run_command
from records import ROOT, files

SCRIPTS = ["scripts/ptx.sh", "scripts/ptx/*", "scripts/verify/parts/ptx.py"]


def sources_of(path):
    """A .cu and all that it includes."""
    found = [path]
    for file in found:
        for name in re.findall(r'^\s*#include "([^"]+)"', (ROOT / file).read_text(), re.M):
            other = f"shaders/cuda/{name}"
            if other not in found and (ROOT / other).exists():
                found.append(other)
    return found


def reported(file):
    """What the report says of a PTX file."""
    name = re.escape(file)
    return [(report, "\n".join(line for line in (ROOT / report).read_text().splitlines() if re.match(rf"(\| )?{name}\b", line))) for report in ("benches/results/ptx.md", "benches/results/ptx.tsv")]


def units():
    scripts = files(*SCRIPTS)
    found = {}
    for path in files("shaders/cuda/*.cu"):
        stem = path.removesuffix(".cu")
        made = files(f"{stem}.ptx", f"{stem}.ptx.z")
        found[stem.split("/")[-1]] = [*scripts, *sources_of(path), *made, *reported(f"{stem.split('/')[-1]}.ptx")]
    # The list of files and of entries, apart from what is in them.
    return found | {"report": [*scripts, ("files", "\n".join(files("shaders/cuda/*.cu", "shaders/cuda/*.ptx*"))), *files("benches/results/ptx.md", "benches/results/ptx.tsv")]}


def run(stale, _full, log):
    passed = {}
    kernels = [name for name in stale if name != "report"]
    if kernels:
        _, said = run_command(log, "scripts/ptx.sh", "--check", "--only", *kernels)
        for name, entries in re.findall(r"^ptx: (\S+) passed: (\d+) entries", said, re.M):
            passed[name] = Passed(int(entries))
    if "report" in stale:
        status, said = run_command(log, "scripts/ptx.sh", "--check", "--list")
        if status == 0:
            passed["report"] = Passed(int(re.search(r"(\d+) entries are reported", said)[1]))
    return passed


PART = Part("ptx", "nvcc and three ptxas over the CUDA kernels", 15, units, run)
