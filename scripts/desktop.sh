#!/usr/bin/env bash
# Builds examples/desktop and runs it on a virtual X server: its greedy text, with a fork, is compared with the CPU's, a decode with the oracle.
#   scripts/desktop.sh [FRAMES [OPTION...]]              120 frames unless said; options of the program, such as `--p95 50` or `--lose 20`
#   SHOT=docs/desktop.png scripts/desktop.sh 700         and takes a picture of its window, with two forks, shortly before it closes
set -euo pipefail
cd "$(dirname "$0")/.."
frames=${1:-120}
options=("${@:2}")

# winit and wgpu load the libraries of X and Vulkan at run time, so a missing one is not found by the linker.
packages=(xvfb xauth libvulkan1 mesa-vulkan-drivers libx11-6 libx11-xcb1 libxcursor1 libxi6 libxkbcommon0 libxkbcommon-x11-0 libxrandr2)
if [[ -n ${SHOT:-} ]]; then packages+=(imagemagick); fi
if command -v apt-get >/dev/null; then
    missing=()
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
    done
    if ((${#missing[@]} > 0)); then scripts/apt.sh "${missing[@]}"; fi
fi

timeout 1800 cargo build --locked -p desktop

if [[ -z ${XDG_RUNTIME_DIR:-} ]]; then
    runtime_folder=$(mktemp -d)
    export XDG_RUNTIME_DIR=$runtime_folder
    trap 'rm -rf "$runtime_folder"' EXIT
fi
binary=${CARGO_TARGET_DIR:-target}/debug/desktop
run() { timeout 300 xvfb-run --auto-servernum --server-args='-screen 0 1180x760x24' "$@"; }

if [[ -n ${SHOT:-} ]]; then
    # shellcheck disable=SC2016 # The inner shell expands these.
    run bash -c '"${@:2}" & window=$!
        while sleep 1 && kill -0 $window 2>/dev/null; do
            import -window root -strip "png:$1.new"
            if kill -0 $window 2>/dev/null; then mv "$1.new" "$1"; fi
        done
        rm -f "$1.new"; wait $window' shot "$SHOT" \
        "$binary" --frames "$frames" --theme light --fork 12 --fork 40 "${options[@]}"
else
    run "$binary" --frames "$frames" --temperature 0 --fork 10 "${options[@]}"
fi
