#!/usr/bin/env bash
# Lints of the crate for targets that are not run here: what compiles only there must still compile.
#   scripts/targets.sh [TARGET...]    x86_64-pc-windows-msvc and aarch64-apple-darwin unless named; std comes as scripts/std.sh says
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/std.sh

if (($# == 0)); then set -- x86_64-pc-windows-msvc aarch64-apple-darwin; fi
for name in "$@"; do
    (
        std_for "$name" "$(realpath -m "${CARGO_TARGET_DIR:-target}")/std"
        cargo clippy --locked --target "$name" -p wgpu-mla --lib --features cuda -- -D warnings
        cargo clippy --locked --target "$name" -p wgpu-mla --lib --no-default-features -- -D warnings
    )
done
