"""wgpu-mla-burn, a workspace of its own: its tests on lavapipe, its lints, and what its package holds."""

from part import RUSTC, Part, Passed, must, tests_in, versions
from records import Failed, files

# What a package must have, and no more than sources and tests beside it.
PACKED = {"Cargo.toml", "Cargo.lock", "README.md", "src/lib.rs"}


def units():
    return {"burn": files("burn/*.toml", "burn/Cargo.lock", "burn/README.md", "burn/src/**/*.rs", "burn/tests/**/*.rs", "burn/examples/*.rs",
                          "burn/generate/Cargo.toml", "burn/generate/src/*.rs", "burn/generate/tests/*.rs", "burn/generate/configs/*.json",
                          "examples/generate/Cargo.toml", "examples/generate/src/**/*.rs", "examples/generate/model/*", "examples/generate/tests/tiny/**/*",
                          "Cargo.toml", "src/**/*.rs", "shaders/**/*.wgsl", "scripts/verify/parts/burn.py")}


def run(_stale, _full, log):
    cargo = lambda command, *options: must(log, "cargo", command, "--locked", "--manifest-path", "burn/Cargo.toml", *options)
    # Without burn's measuring of kernels, which takes long on lavapipe.
    all_of_it = ["--workspace", "--no-default-features"]
    must(log, "cargo", "fmt", "--check", "--all", "--manifest-path", "burn/Cargo.toml")
    cargo("clippy", *all_of_it, "--all-targets", "--", "-D", "warnings")
    packed = set(cargo("package", "--allow-dirty", "--no-verify", "--list").split("\n"))
    if PACKED - packed or any(name.startswith("target/") for name in packed):
        raise Failed(f"the package of burn/ has {sorted(packed)}")
    return {"burn": Passed(tests_in(cargo("test", *all_of_it)))}


PART = Part("burn", "burn's tensors and modules on wgpu-mla's kernels", 15, units, run, lambda: versions(rustc=RUSTC))
