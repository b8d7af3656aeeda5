"""Random uses against the reference of tests/it/differential: more of them than scripts/check.sh runs, on each device that is here."""

import re

from part import RUSTC, Part, Passed, locked, run as run_command, versions
from records import files

# Cases of a unit, and with `--full`: the 10,000 of MLA_FULL=1 on the CPU and on this machine's adapter.
CASES = {"cpu": 2000, "wgpu": 150, "cuda, emulated": 24}
SOURCES = [
    "Cargo.toml", "src/**/*.rs", "tests/support/src/*.rs", "tests/it/main.rs", "tests/it/harness.rs", "tests/it/differential.rs",
    "tests/it/differential/*.rs", "scripts/verify/parts/differential.py",
]
MORE = {
    "cpu": [],
    "wgpu": ["shaders/*.wgsl", "shaders/lib/*.wgsl"],
    "cuda, emulated": ["shaders/cuda/**/*.rs", "shaders/cuda/ptx/*", "tests/cuda_driver/**/*", "scripts/ptxemu/*.py", "scripts/ptx.sh"],
}
RAN = re.compile(r"^checks: differential .*: (\d+) ran,", re.M)


def units():
    return {unit: [*files(*SOURCES, *more), *(locked("naga", "wgpu") if unit == "wgpu" else [])] for unit, more in MORE.items()}


def run(stale, full, log):
    passed = {}
    for unit in stale:
        env = {"MLA_CHECKED_SHADERS": "1"}
        if not full:
            env["MLA_DIFFERENTIAL_CASES"] = str(CASES[unit])
        if unit == "cuda, emulated":
            command = ["scripts/ptx.sh", "suite", "differential::cuda"]
        else:
            packages = ["-p", "wgpu-mla", "-p", "wgpu-mla-ptx", "-p", "context_parallel"]
            command = ["cargo", "test", "--locked", *packages, "--features", "cuda", "--test", "it", "--", f"differential::{unit}"]
        status, said = run_command(log, *command, env=env, minutes=120 if full else 15)
        if status == 0:
            passed[unit] = Passed(sum(int(count) for count in RAN.findall(said)))
    return passed


PART = Part("differential", "random uses against a reference of their own", 5, units, run, lambda: versions(rustc=RUSTC))
