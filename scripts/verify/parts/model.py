"""The tests of examples/generate, with the checkpoint in the repository."""

from part import RUSTC, Part, Passed, must, tests_in, versions
from records import files


def units():
    sources = ["Cargo.toml", "Cargo.lock", "src/**/*.rs", "shaders/**/*.wgsl", "shaders/cuda/**/*.rs", "shaders/cuda/Cargo.toml", "shaders/cuda/ptx/*.ptx", "examples/generate/**/*"]
    return {"generate": files(*sources, "scripts/verify/parts/model.py")}


def run(_stale, _full, log):
    said = must(log, "cargo", "test", "--locked", "-p", "generate", "--features", "cuda", env={"MLA_CHECKED_SHADERS": "1"})
    return {"generate": Passed(tests_in(said))}


PART = Part("model", "a model that writes text", 10, units, run, lambda: versions(rustc=RUSTC))
