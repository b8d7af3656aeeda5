"""The code broken on purpose, and the tests that must fail (scripts/mutants). A unit is a mutated file."""

import re
import sys
import tempfile

import lavapipe
from part import RUSTC, Part, Passed, run as run_command, versions
from records import ROOT, files

sys.path.append(str(ROOT / "scripts/mutants"))
import table

COMMON = ["scripts/mutants/*.py", "scripts/mutants.sh", "tests/it/main.rs", "tests/it/harness.rs"]
SUITE = "tests/support/src/suite"
ON_CARD = ["scripts/ptxemu/*.py", "scripts/ptx/compiler.py", "scripts/ptx/sources.py", "tests/cuda_driver/src/*.rs", "shaders/cuda/kernels/**/*.cu*"]


def groups():
    """The modules of the conformance suite by op."""
    found = {}
    for op, module in lavapipe.GROUP.findall((ROOT / SUITE / "mod.rs").read_text()):
        found.setdefault(op, []).append(f"{SUITE}/{module}.rs")
    return found


def files_of(test):
    """The files that the test `PROGRAM NAME` is written in."""
    program, name = test.split(" ", 1)
    if program == "lib":
        return []
    if program not in ("it", "card"):
        return files("examples/generate/tests/**/*.rs", "examples/generate/tests/tiny/**/*", "examples/generate/model/*")
    more = files(*ON_CARD) if program == "card" else []
    if found := re.match(r"conformance::\w+::\w+::(\w+)::", name):
        return [*more, "tests/it/conformance.rs", f"{SUITE}/mod.rs", f"{SUITE}/run.rs", f"{SUITE}/memory.rs", *files("tests/support/src/*.rs"), *groups().get(found[1], []), *lavapipe.MORE.get(found[1], [])]
    module = name.split("::")[0]
    one = f"tests/it/{module}.rs"
    return [*more, *([one] if (ROOT / one).exists() else []), *(files(f"tests/it/{module}/*.rs") if (ROOT / f"tests/it/{module}").is_dir() else []), *files("tests/support/src/*.rs")]


def units():
    found = {}
    for mutant in table.load().values():
        what = "\0".join(map(str, vars(mutant).values()))
        found.setdefault(mutant.file, [mutant.file, *files(*COMMON)]).extend([*files_of(mutant.caught_by), *mutant_sources(mutant), (mutant.id, what)])
    return found


def mutant_sources(mutant):
    return [f"shaders/cuda/kernels/{name}" for name in mutant.source.split()]


def run(stale, _full, log):
    mutants = table.load().values()
    with tempfile.NamedTemporaryFile("r") as report:
        run_command(log, "scripts/mutants.sh", "--report", report.name, "--file", *stale, minutes=60)
        well = set(report.read().split())
    of_file = {name: [mutant.id for mutant in mutants if mutant.file == name] for name in stale}
    return {name: Passed(len(ids)) for name, ids in of_file.items() if set(ids) <= well}


PART = Part("mutants", "the code broken on purpose: a test must fail", 20, units, run, lambda: versions(rustc=RUSTC))
