"""The tests of the CUDA backend without a card: on the emulated driver, whose kernels run in the interpreter."""

import os
from concurrent.futures import ThreadPoolExecutor

from part import RUSTC, Part, Passed, must, run as run_command, tests_in, versions
from records import files

# Tests by their names' beginnings; a variable of tests/cuda_driver. All of them would take hours: of each op its shapes, of each variant
# of the decode what has most of its paths.
BOTH_ORDERS = {"MLA_EMULATED_ORDERS": "both"}
UNITS = {
    "kv_append": (["conformance::cuda::best::kv_append::"], BOTH_ORDERS),
}


def units():
    inputs = files(
        "Cargo.lock", "src/*.rs", "src/cache/**/*.rs", "src/cuda/**/*.rs", "src/layer/**/*.rs", "src/ops/**/*.rs", "src/plan/**/*.rs", "shaders/cuda/**/*.rs",
        "shaders/cuda/ptx/*", "tests/support/**/*.rs", "tests/it/*.rs", "tests/it/cuda/*.rs", "tests/cuda_driver/**/*", "scripts/ptxemu/*.py", "scripts/ptx.sh",
        "scripts/verify/parts/cuda.py",
    )
    return {name: inputs for name in UNITS}


def run(stale, _full, log):
    must(log, "scripts/ptx.sh", "suite", "--no-run")

    def one(name):
        tests, env = UNITS[name]
        with open(os.devnull, "w") as quiet:
            return name, *run_command(quiet, "scripts/ptx.sh", "suite", *tests, env=env, minutes=30)

    passed = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, status, said in pool.map(one, stale):
            log.write(f"\n== {name}\n{said}")
            log.flush()
            if status == 0 and tests_in(said):
                passed[name] = Passed(tests_in(said))
    return passed


PART = Part("cuda", "the CUDA backend's tests, on an emulated card", 15, units, run, lambda: versions(rustc=RUSTC))
