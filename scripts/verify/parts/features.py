"""Lints of every package, set of features, and target that is not run; the docs of what is published; the tests without wgpu."""

from part import RUSTC, Part, Passed, run as run_command, tests_in, versions
from records import files

SOURCES = [
    "Cargo.toml", "Cargo.lock", "src/**/*.rs", "shaders/cuda/**/*.rs", "shaders/cuda/Cargo.toml",
    "tests/*/Cargo.toml", "tests/**/*.rs", "benches/**/*.rs",
]
CLIPPY = ["cargo", "clippy", "--locked", "--all-targets"]
DENY = ["--", "-D", "warnings"]

COMMANDS = {
    "lints": [*CLIPPY, "-p", "wgpu-mla", "-p", "wgpu-mla-ptx", "-p", "context_parallel", "--features", "cuda", *DENY],
    "docs": [
        "env", "RUSTDOCFLAGS=-D warnings",
        "cargo", "doc", "--locked", "-p", "wgpu-mla", "-p", "wgpu-mla-ptx", "--no-deps", "--features", "cuda",
    ],
    "lints of the examples' packages": [*CLIPPY, "-p", "generate", "-p", "desktop", "-p", "mla-fuzz", "--features", "generate/cuda", *DENY],
    "lints without features": [*CLIPPY, "--no-default-features", *DENY],
    "lints with cuda alone": [*CLIPPY, "--no-default-features", "--features", "cuda", *DENY],
    "lints for Windows by MSVC": ["scripts/targets.sh", "x86_64-pc-windows-msvc"],
    "lints for Apple silicon": ["scripts/targets.sh", "aarch64-apple-darwin"],
    # The examples that these tests run need other features.
    "tests without features": ["cargo", "test", "--locked", "--no-default-features", "--lib", "--test", "it", "--", "--skip", "examples::"],
}


def units():
    inputs = files(*SOURCES, "examples/**/*.rs", "examples/*/Cargo.toml", "scripts/verify/parts/features.py", "scripts/targets.sh", "scripts/std.sh")
    shaders = files("shaders/**/*.wgsl")
    more = {"docs": files("README.md", "docs/*.md")}
    return {name: [*inputs, *(shaders if "test" in command[:2] else more.get(name, []))] for name, command in COMMANDS.items()}


def run(stale, _full, log):
    passed = {}
    for name in stale:
        status, said = run_command(log, *COMMANDS[name])
        if status == 0:
            passed[name] = Passed(tests_in(said) if "test" in COMMANDS[name][:2] else 1)
    return passed


PART = Part("features", "lints, docs, and tests of other sets of features", 10, units, run, lambda: versions(rustc=RUSTC))
