"""The committed PTX is the pinned compiler's, and three assemblers accept it within its limits. A unit is a .cu."""

import re

from part import Part, Passed, run as run_command
from records import ROOT, files

CRATE = "shaders/cuda"
MANIFEST = f"{CRATE}/src/manifest.rs"
SCRIPTS = ["scripts/ptx.sh", "scripts/ptx/*", "scripts/verify/parts/ptx.py"]


def sources_of(path):
    """A .cu and all that it includes."""
    found = [path]
    for file in found:
        for name in re.findall(r'^\s*#include "([^"]+)"', (ROOT / file).read_text(), re.M):
            beside = f"{file.rpartition('/')[0]}/{name}"
            other = beside if (ROOT / beside).exists() else f"{CRATE}/kernels/{name}"
            if other not in found:
                found.append(other)
    return found


def reported(module):
    """What the manifest and the reports say of a PTX file."""
    pattern = re.compile(rf'(\| )?{module}\.ptx\b| *Entry {{ module: "{module}"')
    told = lambda path: "\n".join(line for line in (ROOT / path).read_text().splitlines() if pattern.match(line))
    return [(path, told(path)) for path in (MANIFEST, "benches/results/ptx.md", "benches/results/ptx.tsv")]


def units():
    scripts = files(*SCRIPTS)
    found = {}
    for path in files(f"{CRATE}/kernels/**/*.cu"):
        module = path.split("/")[-1].removesuffix(".cu")
        found[module] = [*scripts, *sources_of(path), *files(f"{CRATE}/ptx/{module}.ptx"), *reported(module)]
    # The list of files and of entries; and the manifest, made of PTX, sources and reports.
    made_of = files(f"{CRATE}/kernels/**/*", f"{CRATE}/ptx/*", MANIFEST, "benches/results/ptx.md", "benches/results/ptx.tsv")
    return found | {"report": [*scripts, *made_of]}


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
