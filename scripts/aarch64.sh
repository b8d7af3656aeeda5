#!/usr/bin/env bash
# The crate as a program for aarch64 in qemu's user mode, on its CPU backend: needs no Arm machine, and measures no time.
#   scripts/aarch64.sh decode [OPTION...]    examples/decode on all case files, or on those among the options
#   scripts/aarch64.sh unit [FILTER...]      the unit tests
#   scripts/aarch64.sh it [FILTER...]        tests of tests/it
#   scripts/aarch64.sh loops                 instructions for each fused multiply-add in the inner loops of `neon`, as a release has them
# std comes as scripts/std.sh says. On Debian and Ubuntu it installs what is missing, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
arm=aarch64-unknown-linux-gnu
. scripts/std.sh

# The C library of the target, and what links with it.
tools() {
    local missing=()
    command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
    command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu)
    [[ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ]] || missing+=(libc6-dev-arm64-cross)
    ((${#missing[@]} == 0)) || scripts/apt.sh "${missing[@]}"
    qemu-aarch64 --version | head -n 1
    std_for "$arm" "$target/std"
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
}

on=(--locked --target "$arm" --no-default-features)
verb=${1:-}
(($# == 0)) || shift
case $verb in
    decode)
        tools
        cargo run "${on[@]}" --profile test --example decode -- --backend cpu "$@"
        ;;
    unit)
        tools
        cargo test "${on[@]}" --lib -- "$@"
        ;;
    it)
        tools
        cargo test "${on[@]}" --test it -- "$@"
        ;;
    loops)
        tools
        cargo build "${on[@]}" --release --lib
        python3 scripts/aarch64/loops.py "$target/$arm/release/libwgpu_mla.rlib"
        ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2 ;;
esac
