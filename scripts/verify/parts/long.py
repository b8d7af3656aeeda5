"""A continuous batch with forks for many steps (tests/it/long.rs): memory and time a step are flat. Nothing runs beside it."""

import re

from part import RUSTC, Part, Passed, locked, run as run_command, versions
from records import files

# Steps of a unit.
STEPS = {"cpu": 10_000, "lavapipe": 10_000}
TESTS = {"cpu": "long::cpu", "lavapipe": "long::wgpu"}
SOURCES = [
    "Cargo.toml", "src/**/*.rs", "tests/support/src/*.rs", "tests/support/src/suite/layer_rig.rs", "tests/it/main.rs", "tests/it/harness.rs",
    "tests/it/allocator.rs", "tests/it/every_op.rs", "tests/it/long.rs", "scripts/verify/parts/long.py",
]
MORE = {"cpu": [], "lavapipe": ["shaders/*.wgsl", "shaders/lib/*.wgsl"]}
RAN = re.compile(r"^checks: long .*: (\d+) ran,", re.M)


def units():
    return {unit: [*files(*SOURCES, *more), *(locked("naga", "wgpu") if unit == "lavapipe" else [])] for unit, more in MORE.items()}


def run(stale, full, log):
    passed = {}
    for unit in stale:
        env = {"MLA_LONG_STEPS": str(STEPS[unit] * (10 if full else 1))}
        packages = ["-p", "wgpu-mla", "-p", "wgpu-mla-ptx", "-p", "context_parallel"]
        command = ["cargo", "test", "--locked", *packages, "--features", "cuda", "--test", "it", "--", "--exact", TESTS[unit], "--nocapture"]
        status, said = run_command(log, *command, env=env, minutes=120 if full else 15)
        if status == 0:
            passed[unit] = Passed(sum(int(count) for count in RAN.findall(said)))
    return passed


PART = Part("long", "a changing batch for 10,000 steps: memory and time a step are flat", 8, units, run, lambda: versions(rustc=RUSTC), alone=True)
