"""The benches in their test mode: tiny, each result checked, nothing timed."""

import re

from part import RUSTC, Part, Passed, run as run_command, versions
from records import ROOT, files


def names():
    return re.findall(r'\[\[bench\]\]\nname = "(\w+)"', (ROOT / "Cargo.toml").read_text())


def units():
    oracle = ["tests/support/Cargo.toml", "tests/support/src/lib.rs", "tests/support/src/close.rs", "tests/support/src/reference.rs", "tests/support/src/reference/*.rs"]
    shared = files("Cargo.toml", "Cargo.lock", "src/**/*.rs", "shaders/**/*.wgsl", "benches/support/**/*.rs", *oracle, "scripts/verify/parts/benches.py")
    found = {}
    for name in names():
        folder = (ROOT / f"benches/{name}").is_dir()
        found[name] = [*shared, *files(f"benches/{name}.rs", *([f"benches/{name}/**/*.rs"] if folder else []))]
    return found


def run(stale, _full, log):
    passed = {}
    for name in stale:
        status, said = run_command(log, "cargo", "test", "--locked", "--features", "cuda", "--bench", name, "--", "--test")
        if status == 0:
            passed[name] = Passed(len(re.findall(CASE, said, re.M)))
    return passed


# A line for each case that ran.
CASE = r"^\| .*\d.*\|$"

PART = Part("benches", "the benches, tiny", 10, units, run, lambda: versions(rustc=RUSTC))
