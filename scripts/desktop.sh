#!/usr/bin/env bash
# Builds examples/host_encoder and runs it for some frames on a virtual X server.
#   scripts/host_encoder.sh [FRAMES]                 60 frames unless said
#   SHOT=docs/host_encoder.png scripts/host_encoder.sh 400      and takes a picture of its window after 4 s
set -euo pipefail
cd "$(dirname "$0")/.."
frames=${1:-60}

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

timeout 1800 cargo build --locked -p host_encoder

if [[ -z ${XDG_RUNTIME_DIR:-} ]]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi
binary=${CARGO_TARGET_DIR:-target}/debug/host_encoder
run() { timeout 300 xvfb-run --auto-servernum --server-args='-screen 0 560x460x24' "$@"; }

if [[ -n ${SHOT:-} ]]; then
    # shellcheck disable=SC2016 # The inner shell expands these.
    run bash -c '"$1" --frames "$2" & sleep 4; import -window root -strip "$3"; wait $!' shot "$binary" "$frames" "$SHOT"
else
    run "$binary" --frames "$frames"
fi
