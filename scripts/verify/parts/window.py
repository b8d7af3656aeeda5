"""examples/desktop: a window in which a model writes, on a virtual X server."""

import re

from part import RUSTC, Part, Passed, must, tests_in, versions
from records import Failed, files


def units():
    sources = ["Cargo.toml", "Cargo.lock", "src/*.rs", "src/any/**/*.rs", "src/base/**/*.rs", "src/cache/**/*.rs", "src/cpu/**/*.rs", "src/gpu/**/*.rs", "src/layer/**/*.rs", "src/ops/**/*.rs", "src/plan/**/*.rs", "src/pages/**/*.rs", "tests/support/src/reference.rs", "tests/support/src/reference/*.rs"]
    model = ["examples/generate/Cargo.toml", "examples/generate/src/*.rs", "examples/generate/model/*"]
    return {"desktop": files(*sources, "shaders/*.wgsl", *model, "examples/desktop/**/*", "scripts/desktop.sh", "scripts/verify/parts/window.py")}


def run(_stale, _full, log):
    # With the dependencies of the program itself, which are built once.
    cases = tests_in(must(log, "cargo", "test", "--locked", "--profile", "dev", "-p", "desktop"))
    # The second run loses its device on the way. The part `frames` measures.
    for options in (["120"], ["60", "--lose", "20"], ["60", "--kv-dtype", "e4m3"]):
        said = must(log, "scripts/desktop.sh", *options)
        tokens = re.search(r"^desktop: \d+ frames decoded (\d+) tokens", said, re.M)
        if not tokens or "--lose" in options and "lost its device" not in said:
            raise Failed("desktop did not say how many tokens it decoded, or that its device was lost")
        cases += int(tokens[1])
    return {"desktop": Passed(cases)}


PART = Part("window", "a window with its own device", 10, units, run, lambda: versions(rustc=RUSTC))
