#!/usr/bin/env bash
# examples/context_parallel over two or more NVIDIA cards of this host through NCCL: cases, times, and a rank that is killed; one process for
# all cards, and one a card. Every run ends within its time. The machine needs a driver and NCCL, and no Rust: carry the binary.
#
#   cargo build --release -p context_parallel --no-default-features --features nccl
#   scripts/cards.sh target/release/context_parallel [CARDS] [OUT]       CARDS: 2; OUT: a folder for what is printed, target/cards
set -uo pipefail
cd "$(dirname "$0")/.."
(($# > 0)) || { sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2; }

program=$(realpath "$1") cards=${2:-2} out=${3:-target/cards}
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 NCCL_DEBUG=${NCCL_DEBUG:-WARN} RUST_BACKTRACE=0

# NCCL as pip installs it, where the system has none.
if ! ldconfig -p 2>/dev/null | grep -q 'libnccl\.so\.2'; then
    found=$(python3 -c 'import glob, site, sys
for folder in [*site.getsitepackages(), site.getusersitepackages(), *sys.path]:
    for path in glob.glob(folder + "/nvidia/nccl/lib"): print(path)' 2>/dev/null | head -n 1)
    export LD_LIBRARY_PATH="${found:+$found:}${LD_LIBRARY_PATH:-}"
fi
devices=$(seq -s, -f 'cuda:%g' 0 $((cards - 1)))
failed=0

# NAME STATUS SECONDS COMMAND..: a run that must end with this status in so many seconds.
must() {
    local name=$1 want=$2 limit=$3 begin=$SECONDS status=0
    shift 3
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$?
    printf '\n== %s: status %s (%s is right) after %s s\n' "$name" "$status" "$want" "$((SECONDS - begin))"
    tail -n "${LINES_SHOWN:-60}" "$out/$name.txt"
    ((status == want)) || failed=1
}

# A process for each card, each of which sees them all; ends with the status of the first.
processes() {
    local id rank status=0 pids=()
    id=$(mktemp -u)
    for ((rank = 1; rank < cards; rank++)); do
        "$program" --engine nccl --devices "cuda:$rank" --rank "$rank" --world "$cards" --id-file "$id" "$@" >"$out/rank$rank.txt" 2>&1 &
        pids+=("$!")
    done
    "$program" --engine nccl --devices cuda:0 --rank 0 --world "$cards" --id-file "$id" "$@" || status=$?
    wait "${pids[@]}" || echo "another rank: status $?"
    rm -f "$id"
    return "$status"
}
export -f processes
export program cards out

must cases-threads 0 120 "$program" --engine nccl --devices "$devices" --timeout 30
must cases-processes 0 120 bash -c processes
must bench-threads 0 280 "$program" --engine nccl --devices "$devices" --timeout 30 --bench
must bench-processes 0 280 bash -c 'processes --timeout 30 --bench'
must killed-threads 1 90 "$program" --engine nccl --devices "$devices" --timeout 10 --kill-after 2
must killed-processes 1 90 bash -c 'processes --timeout 10 --kill-after 2'
for name in killed-threads killed-processes; do
    grep -q 'between the ranks failed' "$out/$name.txt" || { echo "$name: no rank says that another is gone"; failed=1; }
done
exit "$failed"
