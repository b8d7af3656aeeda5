"""examples/host_encoder: a window that shares its device, on a virtual X server."""

import re

from part import RUSTC, Part, Passed, must, versions
from records import Failed, files


def units():
    sources = ["Cargo.toml", "Cargo.lock", "src/*.rs", "src/gpu/**/*.rs", "src/ops/**/*.rs", "src/plan/**/*.rs", "src/pages/**/*.rs", "tests/support/src/reference.rs", "tests/support/src/reference/*.rs"]
    return {"host_encoder": files(*sources, "shaders/*.wgsl", "examples/host_encoder/**/*", "scripts/host_encoder.sh", "scripts/verify/parts/window.py")}


def run(_stale, _full, log):
    said = must(log, "scripts/host_encoder.sh")
    decodes = re.search(r"^host_encoder: .* (\d+) decodes", said, re.M)
    if not decodes:
        raise Failed("host_encoder did not say how many decodes it ran")
    return {"host_encoder": Passed(int(decodes[1]))}


PART = Part("window", "a window with its own device", 10, units, run, lambda: versions(rustc=RUSTC))
