"""Sequences that lie on several devices: every mixture of the CPU and the GPU adapter by threads, and processes under mpirun."""

import os
import re
import shutil

from part import RUSTC, Part, Passed, must, run as run_command, tests_in, version_of, versions
from records import ROOT, Failed, files

# Devices by rank, and further arguments.
MIXTURES = {
    f"{'+'.join(devices)}{' shares ' + shares if shares else ''}": (",".join(devices), shares)
    for devices, shares in [
        (["cpu", "cpu"], ""), (["cpu"] * 3, ""), (["cpu"] * 4, ""), (["cpu"] * 5, "5,1,0,2,3"),
        (["wgpu", "wgpu"], ""), (["wgpu"] * 3, ""), (["wgpu"] * 4, ""),
        (["cpu", "wgpu"], ""), (["cpu", "wgpu"], "1,3"), (["wgpu", "cpu", "wgpu"], "7,2,1"), (["cpu", "wgpu", "cpu", "wgpu"], ""),
    ]
}
PROCESSES = [2, 3, 4]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]


def units():
    sources = [
        "Cargo.toml", "Cargo.lock", "src/**/*.rs", "shaders/**/*.wgsl", "tests/support/**/*", "tests/cases/dcp_*", "examples/context_parallel/**/*",
        "scripts/verify/parts/ranks.py",
    ]
    inputs = files(*sources)
    of_mpi = [*inputs, *files("examples/mpi/Cargo.toml", "examples/mpi/Cargo.lock", "examples/mpi/src/*.rs")]
    return {
        "lints of the packages": of_mpi,
        "tests": inputs,
        "nccl: the stand-in": [*inputs, *files("shaders/cuda/**/*.rs")],
        **{name: inputs for name in MIXTURES},
        **{f"mpirun -n {count}": of_mpi for count in PROCESSES},
        "mpirun, a rank is killed": of_mpi,
    }


def run(stale, _full, log):
    passed = {}
    env = {"MLA_CHECKED_SHADERS": "1"}
    if "tests" in stale:
        passed["tests"] = Passed(tests_in(must(log, "cargo", "test", "--locked", "-p", "context_parallel", env=env)))
    if "nccl: the stand-in" in stale:
        said = must(log, "cargo", "test", "--locked", "--features", "nccl", "--lib", "nccl")
        passed["nccl: the stand-in"] = Passed(tests_in(said))
    if mixtures := [name for name in MIXTURES if name in stale]:
        must(log, "cargo", "build", "--locked", "-p", "context_parallel")
        for name in mixtures:
            devices, shares = MIXTURES[name]
            for interleave in ["1", "16"]:
                command = [target("context_parallel"), "--devices", devices, "--interleave", interleave, "--timeout", "120"]
                status, said = run_command(log, *command, *(["--shares", shares] if shares else []), env=env, minutes=10)
                if status == 0:
                    passed[name] = Passed(passed.get(name, Passed(0)).cases + results_in(said))
                else:
                    passed.pop(name, None)
                    break
    of_mpi = [name for name in stale if name.startswith("mpirun")]
    if of_mpi or "lints of the packages" in stale:
        if not shutil.which("mpirun"):
            must(log, "scripts/apt.sh", "libopenmpi-dev", "openmpi-bin", "libclang-dev")
    if "lints of the packages" in stale:
        clippy = ["cargo", "clippy", "--locked", "--all-targets"]
        must(log, *clippy, "-p", "context_parallel", "--features", "nccl", "--", "-D", "warnings")
        must(log, *clippy, "--features", "nccl", "--", "-D", "warnings")
        must(log, *clippy, "--manifest-path", "examples/mpi/Cargo.toml", "--target-dir", "examples/mpi/target", "--", "-D", "warnings")
        passed["lints of the packages"] = Passed(3)
    if of_mpi:
        must(log, "cargo", "build", "--locked", "--manifest-path", "examples/mpi/Cargo.toml", "--target-dir", "examples/mpi/target")
        program = "examples/mpi/target/debug/wgpu-mla-mpi"
        for count in PROCESSES:
            if f"mpirun -n {count}" in stale:
                cases = 0
                for devices in ["cpu", ",".join((["cpu", "wgpu"] * count)[:count])]:
                    command = [*MPIRUN, "-n", str(count), program, "--devices", devices, "--timeout", "120"]
                    cases += results_in(must(log, *command, env=env, minutes=10))
                passed[f"mpirun -n {count}"] = Passed(cases)
        if "mpirun, a rank is killed" in stale:
            status, _ = run_command(log, *MPIRUN, "-n", "3", program, "--kill-after", "2", "--timeout", "5", minutes=1)
            if status in (0, 124):
                raise Failed(f"a rank was killed, and mpirun ended with {status}")
            passed["mpirun, a rank is killed"] = Passed(1)
    return passed


def target(name):
    return f"{os.environ.get('CARGO_TARGET_DIR', ROOT / 'target')}/debug/{name}"


def results_in(said):
    """Results of ranks that were compared."""
    return sum(int(count) for count in re.findall(r"(\d+) results of ranks: PASS$", said, re.M))


def tools():
    found = versions(rustc=RUSTC)
    mpi = version_of(["mpirun", "--version"])
    return found | ({"mpi": mpi} if mpi else {})


PART = Part("ranks", "sequences on several devices", 15, units, run, tools)
