#!/usr/bin/env bash
# The CUDA kernels: PTX from shaders/cuda/kernels/**/*.cu with a pinned compiler, checked by three assemblers and an interpreter.
#
#   scripts/ptx.sh                  writes shaders/cuda/ptx/*.ptx, shaders/cuda/src/manifest.rs (resources and arguments of each entry)
#                                   and benches/results/ptx.{md,tsv}; fails as --check does
#   scripts/ptx.sh --check          writes nothing; fails where a committed file differs from what the compiler gives,
#                                   or an entry exceeds its limits with some ptxas: registers, shared memory, no spill
#   scripts/ptx.sh --check --only NAME...   of some sources, by their stems; --check --list: only whether files, reports and manifest agree
#   scripts/ptx.sh write|--check --code FILE    also writes digests of the code, by which two ways to write the same PTX are compared
#   scripts/ptx.sh emulate [NAME]   the interpreter's tests and the kernels' on the CPU (scripts/ptxemu/run.py); MLA_FULL=1: all
#   scripts/ptx.sh suite [NAME...]  the CUDA backend's tests whose names contain a NAME, on the emulated card of tests/cuda_driver, whose kernels
#                                   run in the interpreter; its variables are in tests/cuda_driver/src/lib.rs
#   scripts/ptx.sh setup            only installs
#
# In a .cu, before the code:   // ptx: compute_89                      instead of compute_80; several with commas
#                              // ptx: compute_80 version=7.4          a later `.version`, so a later driver
# and beside each kernel, or in a .cuh that it includes:
#                              // limits: ENTRY registers=168 threads=256 [shared=101376] [card=204800] [spills=16]
# `threads` is its __launch_bounds__; ENTRY may have a `*`, and a line of its own comes first. `shared` is the most dynamic
# shared memory that it is launched with, in bytes; a constant ENTRY_shared_bytes in the .cu says how much it is. `card` is the
# least that a block may have on the cards that src/cuda launches it on, and `spills` what a kernel that only runs forced may spill.
#
# A kernel's first parameter is `const TYPE args`, a struct of numbers, pointers and such structs: scripts/ptx/layout.py reads it.
# `#include` looks in the source's own folder, then in shaders/cuda/kernels.
#
# What nvcc and each ptxas gave is kept in target/cuda/cache by a digest of all that they were given (sources, headers, flags, pins), so that
# a second run compiles and assembles what has changed, and --check compares with it. A fresh clone keeps nothing: there, as in CI, all is
# compiled. The folder may be removed at any time.
#
# nvcc 13.0, and ptxas of CUDA 12.4 and 12.8, come from PyPI by their hashes (150 MB) into target/cuda. nvcc needs g++.
# On Debian and Ubuntu it installs what is missing, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${CARGO_TARGET_DIR:-target}"
home=$(realpath "${CARGO_TARGET_DIR:-target}")/cuda
pins=scripts/ptx

# g++ preprocesses for nvcc; Debian's python3 comes without venv.
install_missing() {
    { command -v g++ && python3 -c 'import ensurepip'; } >/dev/null 2>&1 || scripts/apt.sh g++ python3 python3-venv
}

# A copy of the pins is written last: a folder without it, or with other pins, is made again.
setup() {
    [[ -e $home/ready ]] && cat "$pins"/*.txt | cmp -s - "$home/ready" && return
    install_missing
    echo "== nvcc 13.0, ptxas 12.4 and 12.8, numpy into $home" >&2
    rm -rf "$home"
    python3 -m venv "$home/venv"
    local pip=("$home/venv/bin/python" -m pip install --quiet --no-deps --require-hashes --only-binary :all:) name
    "${pip[@]}" -r "$pins/numpy.txt"
    # Two versions of one package cannot share a venv.
    for name in nvcc-13.0 ptxas-12.4 ptxas-12.8; do
        "${pip[@]}" --target "$home/$name" -r "$pins/$name.txt"
    done
    cat "$pins"/*.txt >"$home/ready"
}

verb=${1:-write}
(($# == 0)) || shift
case $verb in
    write | --check | emulate | suite | setup) setup ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2 ;;
esac
export CUDA_TOOLS=$home PYTHONDONTWRITEBYTECODE=1
case $verb in
    write) "$home/venv/bin/python" scripts/ptx/build.py "$@" ;;
    --check) "$home/venv/bin/python" scripts/ptx/build.py --check "$@" ;;
    emulate) "$home/venv/bin/python" scripts/ptxemu/run.py "$@" ;;
    suite)
        source scripts/environment.sh
        # In a folder of its own: cargo has target/debug in the path of every test.
        driver=${home%/cuda}/cuda_driver
        cargo build --locked --quiet -p emulated-cuda-driver --target-dir "$driver"
        # With what scripts/check.sh builds.
        tests=(cargo test --locked -p wgpu-mla -p wgpu-mla-ptx -p context_parallel --features cuda --test it)
        if [[ ${1:-} == --no-run ]]; then exec "${tests[@]}" --no-run; fi
        # The driver is looked for before the system's.
        export LD_LIBRARY_PATH=$driver/debug${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} MLA_PYTHON=$home/venv/bin/python MLA_REQUIRE_CUDA=1
        "${tests[@]}" -- "$@"
        ;;
esac
