#!/usr/bin/env bash
# The check, in five parts. Each has a switch, and a budget of minutes on 2 cores beyond which it fails.
#
#   scripts/check.sh                all five, each slow suite with one representative of each row, dtype and dims
#   scripts/check.sh --here         20 minutes: format, lints, every test on a GPU adapter (lavapipe where there is no card),
#                                   docs, a window (scripts/here.sh)
#   scripts/check.sh --vendors      8 minutes: every kernel through the compilers of seven other GPUs (scripts/vendors.sh)
#   scripts/check.sh --mesa26       12 minutes: the GPU tests of the rows on matrices, on Mesa 26's software driver
#   scripts/check.sh --web          10 minutes: the tests in a browser (scripts/web.sh)
#   scripts/check.sh --ptx          8 minutes: the CUDA kernels' PTX is what the compiler gives, three assemblers take it
#                                   within its limits, and it runs in an interpreter (scripts/ptx.sh)
#   scripts/check.sh --full ...     the slow suites whole (MLA_FULL=1), ten times the budgets
# Switches may be combined. On Debian and Ubuntu it installs what is missing, if it may. What cannot be had is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

parts=() times=1
for switch in "$@"; do
    case $switch in
        --full) times=10 && export MLA_FULL=1 ;;
        --here | --vendors | --mesa26 | --web | --ptx) parts+=("${switch#--}") ;;
        *) sed -n '2,/^set/{/^#/p}' "$0" >&2 && exit 2 ;;
    esac
done
((${#parts[@]} > 0)) || parts=(here vendors mesa26 web ptx)

took=()
within() {
    local minutes=$(($1 * times)) name=$2 status=0 begin=$SECONDS
    shift 2
    printf '\n=== %s: at most %s minutes (after %s s)\n' "$name" "$minutes" "$SECONDS"
    timeout "${minutes}m" "$@" || status=$?
    ((status != 124)) || echo "check.sh: $name: not done within its $minutes minutes" >&2
    ((status == 0)) || { echo "check.sh: $name failed: $*" >&2; exit "$status"; }
    took+=("$(printf '%5s s  %s' $((SECONDS - begin)) "$name")")
}

for part in "${parts[@]}"; do
    case $part in
        here) within 20 "the tests here" scripts/here.sh ;;
        vendors) within 8 "other vendors' compilers" scripts/vendors.sh compile all ;;
        mesa26) within 12 "Mesa 26's software driver" scripts/vendors.sh mesa26 ;;
        web) within 10 "a browser" scripts/web.sh ;;
        ptx) within 8 "CUDA kernels" bash -c 'scripts/ptx.sh --check && scripts/ptx.sh emulate' ;;
    esac
done
printf '\n=== all is well after %s s\n' "$SECONDS"
printf '%s\n' "${took[@]}"
