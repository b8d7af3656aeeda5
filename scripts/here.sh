#!/usr/bin/env bash
# Format, lints, every test on this machine's GPU adapter (lavapipe where there is no card), docs, a window.
# MLA_FULL=1: the slow suites whole. On Debian and Ubuntu it installs what is missing, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s (after %s s)\n' "$*" "$SECONDS"; }

# A software Vulkan driver, a virtual display, and what a window links to.
install_missing() {
    command -v apt-get >/dev/null || return 0
    local missing=()
    for package in mesa-vulkan-drivers xvfb xauth libxkbcommon-x11-0 libx11-xcb1 libxcursor1 libxi6 libxrandr2; do
        dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    step "install ${missing[*]}"
    # A real card does without some of them, and the tests tell.
    scripts/apt.sh "${missing[@]}" || true
}

install_missing
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    chmod 700 "$XDG_RUNTIME_DIR"
fi
# No adapter is a failure here, never a skip.
export MLA_REQUIRE_GPU=1 RUST_BACKTRACE=1

step "format"
cargo fmt --all --check
step "lints"
# Without `cuda` the other parts of the check build it.
cargo clippy --locked --workspace --all-targets --features wgpu-mla/cuda,generate/cuda -- -D warnings
cargo clippy --locked --no-default-features --all-targets -- -D warnings
cargo clippy --locked --no-default-features --features cuda --all-targets -- -D warnings
# Tests keep wgpu's run-time checks of indices and loops in kernels that do without: a wrong index is then a wrong result.
step "tests"
MLA_CHECKED_SHADERS=1 cargo test --locked --features cuda
step "a model"
MLA_CHECKED_SHADERS=1 cargo test --locked -p generate --features cuda
step "conformance of the kernels as they are shipped, without these checks"
cargo test --locked --features cuda --test conformance_wgpu
step "benches, tiny"
cargo test --locked --features cuda --bench decode --bench merge --bench append --bench gather --bench prefill --bench project --bench rope --bench cascade -- --test
step "tests without wgpu"
cargo test --locked --no-default-features --lib --test any --test plan --test pages --test tables
step "docs"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --features cuda
step "a window with its own device"
bash scripts/host_encoder.sh
