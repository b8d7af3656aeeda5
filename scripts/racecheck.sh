#!/usr/bin/env bash
# Packs compute-sanitizer's racecheck, the tests and a file of controls for a machine with an NVIDIA card, Python and no toolkit.
#   scripts/racecheck.sh [OUT.tgz]     needs nvcc and pip: scripts/ptx.sh setup
# There: tar xzf OUT.tgz && racecheck/run.sh     (docs/verification.md)
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(realpath "${CARGO_TARGET_DIR:-target}")/cuda
out=${1:-target/racecheck.tgz}
scripts/ptx.sh setup

pack=$(mktemp -d)
trap 'rm -rf "$pack"' EXIT
dir=$pack/racecheck
mkdir -p "$dir"
"$tools/venv/bin/python" -m pip install --quiet --no-deps --require-hashes --only-binary :all: --target "$pack/pip" -r scripts/racecheck/requirements.txt
cp -r "$pack/pip/nvidia/cu13/compute-sanitizer" "$dir/sanitizer"
rm -rf "$dir"/sanitizer/{docs,include,x86}
chmod +x "$dir"/sanitizer/*
"$tools/nvcc-13.0/nvidia/cu13/bin/nvcc" -ptx -arch=sm_90 scripts/racecheck/handover.cu -o "$dir/handover.ptx"
cp scripts/racecheck/launch.py scripts/racecheck/run.sh "$dir"
tests=$(cargo test --release --locked --features cuda --test it --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
strip -o "$dir/it" "$tests"
mkdir -p "$(dirname "$out")"
tar -czf "$out" -C "$pack" racecheck
ls -lh "$out"
