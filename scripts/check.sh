#!/usr/bin/env bash
# The check, in five parts. Each has a switch, and a budget of minutes on 2 cores, also with another part beside it. One that
# takes longer says so, and fails at three times as much: machines differ by a factor of two.
#
#   scripts/check.sh                all five, each slow suite with one representative of each row, dtype and dims
#   scripts/check.sh --here         40 minutes: format, lints, every test on a GPU adapter (lavapipe where there is no card),
#                                   docs, a window (scripts/here.sh)
#   scripts/check.sh --vendors      20 minutes: every kernel through the compilers of seven other GPUs (scripts/vendors.sh)
#   scripts/check.sh --mesa26       20 minutes: the GPU tests of the rows on matrices, on Mesa 26's software driver
#   scripts/check.sh --web          20 minutes: the tests in a browser (scripts/web.sh)
#   scripts/check.sh --ptx          20 minutes: the CUDA kernels' PTX is what the compiler gives, three assemblers take it
#                                   within its limits, and it runs in an interpreter (scripts/ptx.sh)
#   scripts/check.sh --full ...     the slow suites whole (MLA_FULL=1), ten times the budgets
# Switches may be combined. Two parts run at a time, and what each says is printed when it ends; one alone runs as it is.
# On Debian and Ubuntu it installs what is missing, if it may. What cannot be had is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

# It is run once, and nobody steps through it: what cargo would keep for the next time, or for a debugger, costs more than it brings.
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
export CARGO_PROFILE_DEV_DEBUG=${CARGO_PROFILE_DEV_DEBUG:-0} CARGO_PROFILE_TEST_DEBUG=${CARGO_PROFILE_TEST_DEBUG:-0}

parts=() times=1
for switch in "$@"; do
    case $switch in
        --full) times=10 && export MLA_FULL=1 ;;
        --here | --vendors | --mesa26 | --web | --ptx) parts+=("${switch#--}") ;;
        *) sed -n '2,/^set/{/^#/p}' "$0" >&2 && exit 2 ;;
    esac
done
# `here` is the longest, and makes what vendors and mesa26 build upon.
((${#parts[@]} > 0)) || parts=(here ptx web vendors mesa26)

part() {
    case $1 in
        here) within 40 "the tests here" scripts/here.sh ;;
        vendors) within 20 "other vendors' compilers" scripts/vendors.sh compile all ;;
        mesa26) within 20 "Mesa 26's software driver" scripts/vendors.sh mesa26 ;;
        web) within 20 "a browser" scripts/web.sh ;;
        ptx) within 20 "CUDA kernels" bash -c 'scripts/ptx.sh --check && scripts/ptx.sh emulate' ;;
    esac
}

within() {
    local minutes=$(($1 * times)) name=$2 status=0 begin=$SECONDS
    shift 2
    timeout "$((3 * minutes))m" "$@" &
    # shellcheck disable=SC2064 # This one.
    trap "kill $!; exit 130" INT TERM
    wait $! || status=$?
    local seconds=$((SECONDS - begin)) late=''
    ((seconds <= minutes * 60)) || late=', LATE: a slow machine, or the part has grown'
    case $status in
        0) echo "check.sh: $name: well, $seconds s of a budget of $((minutes * 60))$late" ;;
        124) echo "check.sh: $name: not done within three times its $minutes minutes" ;;
        *) echo "check.sh: $name failed with status $status: $*" ;;
    esac
    return "$status"
}

if ((${#parts[@]} == 1)); then
    part "${parts[0]}"
    exit
fi

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# shellcheck disable=SC2046 # Several words.
trap 'kill $(jobs -p); exit 130' INT TERM

# Waits for a part, and prints what it said.
failed=()
reap() {
    local job status=0 name
    wait -n -p job || status=$?
    name=${names[$job]}
    printf '\n=== %s (after %s s)\n' "$name" "$SECONDS"
    cat "$logs/$name"
    ((status == 0)) || failed+=("$name")
    running=$((running - 1))
}

# One part alone leaves much of two cores idle: it fetches, links, or waits for one test.
declare -A names
running=0
for name in "${parts[@]}"; do
    ((running < 2)) || reap
    echo "check.sh: $name begins (after $SECONDS s)"
    part "$name" >"$logs/$name" 2>&1 &
    names[$!]=$name
    running=$((running + 1))
done
while ((running > 0)); do reap; done

printf '\n=== after %s s\n' "$SECONDS"
grep -h '^check.sh: ' "$logs"/*
((${#failed[@]} == 0)) || { echo "check.sh: failed: ${failed[*]}" >&2; exit 1; }
echo "all is well"
