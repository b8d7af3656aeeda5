"""The fuzz targets of tests/fuzz, guided by coverage: their corpus, then a time of new inputs from a fixed seed."""

import re

from part import RUSTC, Part, Passed, must, run as run_command, versions
from records import ROOT, files

FUZZ = "tests/fuzz"
CARGO = ["cargo", "build", "--locked", "--profile", "test", "-p", "mla-fuzz"]
# Seconds of a target, and with --full: an hour in all.
SECONDS, FULL = 60, 500
# Inputs of all targets; a target's own are its module and its corpus.
COMMON = ["Cargo.toml", "Cargo.lock", "src/**/*.rs", f"{FUZZ}/Cargo.toml", f"{FUZZ}/instrument.sh", f"{FUZZ}/src/*.rs", "scripts/verify/parts/fuzz.py"]
SUPPORT = ["tests/support/Cargo.toml", "tests/support/src/*.rs", "tests/support/src/case/*.rs", "tests/support/src/reference/*.rs"]
TARGETS = {
    "cases": [],
    "checkpoints": ["examples/generate/Cargo.toml", "examples/generate/src/*.rs", "examples/generate/tests/tiny/**/*"],
    "plans": [],
    "ops": [],
    "ops_gpu": ["shaders/*.wgsl", "shaders/lib/*.wgsl"],
    "pools": [],
    "state": [],
}


def units():
    def of(target, more):
        module = "ops" if target == "ops_gpu" else target
        own = [path for path in (f"{FUZZ}/src/targets/{module}/*.rs", f"{FUZZ}/corpus/{target}/*") if list(ROOT.glob(path))]
        return files(*COMMON, *SUPPORT, f"{FUZZ}/src/targets/{module}.rs", *own, *more)
    return {target: of(target, more) for target, more in TARGETS.items()}


def run(stale, full, log):
    wrapper = {"RUSTC_WORKSPACE_WRAPPER": str(ROOT / FUZZ / "instrument.sh")}
    built = must(log, *CARGO, "--message-format", "json-render-diagnostics", env=wrapper)
    [program] = set(re.findall(r'"executable":"([^"]+/mla-fuzz)"', built))
    passed = {}
    for target in stale:
        status, said = run_command(log, program, target, FULL if full else SECONDS, env={"MLA_CHECKED_SHADERS": "1"})
        count = re.search(rf"^{target}: (\d+) inputs, (\d+) ran", said, re.M)
        if status == 0 and count:
            passed[target] = Passed(int(count[2]))
    return passed


PART = Part("fuzz", "hostile input: files, batches, every op's arguments, pools", 15, units, run, lambda: versions(rustc=RUSTC))
