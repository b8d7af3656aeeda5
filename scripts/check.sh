#!/usr/bin/env bash
# The check: format, and every test on the CPU and on this machine's GPU adapter (lavapipe where there is no card). Lints and docs, for
# which all dependencies are read a second time (scripts/verify.sh features), slower suites, and those that need more tools are in
# scripts/verify.sh.
#
#   scripts/check.sh             all of it: 9 minutes on 2 idle cores of a new machine, 6 from a fresh clone where Mesa has kept the shaders
#                                that it compiled, 2.5 in a tree where it has passed before
#   scripts/check.sh NAME...     only the tests whose names contain a NAME, such as an op: scripts/check.sh kv_gather
#   scripts/check.sh --list      the ops and suites that can be named
#
# At the end it prints the time of each step, and fails at twice its budget. On Debian and Ubuntu it installs what is missing, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

case ${1:-} in
    --list)
        tests=$(cargo test --quiet --locked --features cuda --test it -- --list | sed 's/: test$//')
        echo "ops:    $(awk -F:: '$1 == "conformance" && NF == 5 { print $4 }' <<<"$tests" | sort -u | xargs)"
        echo "suites: $(awk -F:: '{ print $1 }' <<<"$tests" | sort -u | xargs)"
        echo "and any part of a test's name: cargo test --features cuda --lib --test it -- --list"
        exit
        ;;
    -*) sed -n '2,/^set/{/^#/p}' "$0" >&2 && exit 2 ;;
esac

# A software Vulkan driver. A real card does not need it, and the tests fail if there is no adapter.
if command -v apt-get >/dev/null && ! dpkg -s mesa-vulkan-drivers >/dev/null 2>&1; then
    scripts/apt.sh mesa-vulkan-drivers || true
fi
# No adapter is a failure here, never a skip.
export MLA_REQUIRE_GPU=1 RUST_BACKTRACE=1
# With wgpu's run-time checks of indices and loops, which shipped kernels lack: a wrong index then gives a wrong result.
export MLA_CHECKED_SHADERS=1

# The tests of some names, which may all be unit tests, or none of them.
some() {
    local log status=0 unit_tests
    log=$(mktemp)
    cargo test --locked --features cuda --lib -- "$@" | tee "$log" || status=$?
    unit_tests=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$log")
    rm "$log"
    if ((${unit_tests:-0} == 0)) || names "$@" >/dev/null; then
        cargo test --locked --features cuda --test it -- "$@" || status=$?
    fi
    return "$status"
}

names() { cargo test --quiet --locked --features cuda --test it -- --list "$@"; }

if (($# > 0)); then
    some "$@"
    exit
fi

# A tree is warm if this has passed in it with the same dependencies.
passed=${CARGO_TARGET_DIR:-target}/check.passed
budget=360
if cmp -s Cargo.lock "$passed"; then budget=150; fi

begin=$SECONDS table=''
step() {
    local name=$1 since=$SECONDS
    shift
    printf '\n== %s (after %s s)\n' "$name" "$((since - begin))"
    "$@"
    table+=$(printf '%6s s  %s' "$((SECONDS - since))" "$name")$'\n'
}

# What is published, and what is tested with it: one set of packages and features, so that each is built once.
crates=(-p wgpu-mla -p wgpu-mla-ptx -p context_parallel)

step "format" cargo fmt --all --check
# verify.sh knows by a table which kernels a file is of: a new shader has to be in it.
if command -v python3 >/dev/null; then step "table of kernels" python3 scripts/verify/kernels.py; fi
step "tests: build" cargo test --locked "${crates[@]}" --features cuda --no-run
step "unit tests" cargo test --locked "${crates[@]}" --features cuda --lib
step "tests" cargo test --locked "${crates[@]}" --features cuda --test it
step "several devices" cargo test --locked "${crates[@]}" --features cuda --test cli
step "examples in the docs" cargo test --locked "${crates[@]}" --features cuda --doc

total=$((SECONDS - begin))
printf '\n== where the time went\n%s%6s s  in all, of a budget of %s s\n' "$table" "$total" "$budget"
if ((total > budget)); then
    echo "check.sh: LATE by $((total - budget)) s: a slow or busy machine, or the check has grown"
fi
if ((total > 2 * budget)); then
    echo "check.sh: failed: over twice its budget" >&2
    exit 1
fi
cp Cargo.lock "$passed"
echo "all is well; scripts/verify.sh does the rest"
