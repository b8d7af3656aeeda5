#!/usr/bin/env bash
# Which regions of src the check's tests run, on the CPU and this machine's GPU adapter: the unit tests, tests/it and those of
# examples/context_parallel. By hand: a build of its own and some minutes more than the tests.
#
#   scripts/coverage.sh             prints the share of regions that ran, of all files and by file
#   scripts/coverage.sh FILE...     after that: the places in these files that no test ran; runs no test again
#
# A region is rustc's: a stretch of code without a branch, that of a generic function once for all its types. Left out are src/cuda, NCCL,
# and tests inside of src. The tools are those of rustc's LLVM; on Debian and Ubuntu it installs them, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

llvm=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
command -v "llvm-cov-$llvm" >/dev/null || scripts/apt.sh "llvm-$llvm"
mkdir -p "${CARGO_TARGET_DIR:-target}/coverage"
out=$(realpath "${CARGO_TARGET_DIR:-target}")/coverage

if (($# > 0)); then
    exec python3 scripts/coverage/report.py "$out/regions.json" "$@"
fi

# The crates of this workspace alone are instrumented. Cargo keeps them apart by the path of this program.
printf '#!/bin/sh\nexec "$@" -Cinstrument-coverage\n' >"$out/rustc"
chmod +x "$out/rustc"
export RUSTC_WORKSPACE_WRAPPER=$out/rustc
rm -f "$out"/*.profraw
export MLA_REQUIRE_GPU=1 MLA_CHECKED_SHADERS=1
tests=(cargo test --locked -p wgpu-mla -p wgpu-mla-ptx -p context_parallel --features cuda --lib --test it --test cli)
"${tests[@]}" --no-run --message-format=json-render-diagnostics | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' >"$out/programs"
status=0
LLVM_PROFILE_FILE=$out/%p-%m.profraw "${tests[@]}" --no-fail-fast || status=$?

"llvm-profdata-$llvm" merge -sparse -o "$out/profile" "$out"/*.profraw
rm -f "$out"/*.profraw
mapfile -t programs < <(sort -u "$out/programs")
"llvm-cov-$llvm" export --instr-profile "$out/profile" --skip-expansions "${programs[0]}" "${programs[@]/#/--object=}" \
    --sources "$PWD/src" >"$out/regions.json"
python3 scripts/coverage/report.py "$out/regions.json"
if ((status > 0)); then
    echo "coverage.sh: some tests failed" >&2
fi
exit "$status"
