#!/usr/bin/env bash
# The crate as a program for Windows under Wine, on the CPU and on lavapipe through Wine's Vulkan and D3D12: needs no Windows machine.
#   scripts/windows.sh DEVICE decode [OPTION...]    examples/decode on all case files, or on those among the options
#   scripts/windows.sh DEVICE it [FILTER...]        tests of tests/it
#   scripts/windows.sh DEVICE unit [FILTER...]      the unit tests
#   scripts/windows.sh DEVICE desktop [OPTION...]   examples/desktop, in a window on a virtual X server
# DEVICE is cpu, vulkan, or dx12, whose shaders are compiled by Microsoft's FXC as wgpu does where a program ships no DXC.
#
# Wine and lavapipe are those of the tree of scripts/vendors.sh (Debian trixie with backports; root or sudo), FXC is npm's; std comes as
# scripts/std.sh says. Wine's D3D12 has shader model 5.1, so no subgroups, and no DXC.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tree=$(realpath -m "${MESA_TREE:-$target/mesa-tree}")
windows=x86_64-pc-windows-gnu
folder=$target/windows
. scripts/std.sh
. scripts/vendors/tree.sh
. scripts/vendors/dx12.sh

usage() { sed -n '2,/^set/{/^#/p}' scripts/windows.sh >&2; exit 2; }

# Wine draws nothing without a display.
wine_setup() {
    setup
    dx12_setup
    exec 9>"$target/vendors.lock"
    flock 9
    if [[ ! -x $tree/usr/bin/Xvfb ]]; then
        step "Xvfb in $tree"
        inside sh -c 'export DEBIAN_FRONTEND=noninteractive; apt-get update -qq &&
            apt-get install -qq -y --no-install-recommends xvfb' >>"$target/debootstrap.log"
    fi
    exec 9>&-
}

# Builds one program: its path goes to stdout.
build() {
    command -v x86_64-w64-mingw32-gcc >/dev/null || scripts/apt.sh gcc-mingw-w64-x86-64-win32 >&2
    std_for "$windows" "$target/std" >&2
    export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc
    "$@" --locked --target "$windows" --message-format json |
        sed -n 's/.*"executable":"\([^"]*\.exe\)".*/\1/p' | tail -n 1
}

# Runs a program under Wine, on a display of its own. One at a time: the wineserver that ends with it serves the whole prefix.
in_wine() {
    local device=$1 program=$2 env=() name
    shift 2
    mkdir -p "$folder/$device"
    ln -f "$program" "$folder/$device/" 2>/dev/null || cp "$program" "$folder/$device/"
    env=(WINEPREFIX="$folder/prefix" WINEDEBUG=-all WINE_D3D_CONFIG=renderer=vulkan XDG_RUNTIME_DIR=/tmp LC_ALL=C.UTF-8
        VK_DRIVER_FILES=/usr/share/vulkan/icd.d/lvp_icd.json GALLIVM_PERF=nopt "MESA_SHADER_CACHE_DIR=$folder/lavapipe")
    if [[ $device == dx12 ]]; then
        # It is found beside the program. The copy that Wine has is its own: `n` takes the native one.
        cp "$tree$DX12/d3dcompiler_47.dll" "$folder/dx12/"
        env+=(WGPU_BACKEND=dx12 'WINEDLLOVERRIDES=d3dcompiler_47=n;mscoree,mshtml=')
    else
        env+=(WGPU_BACKEND=vulkan 'WINEDLLOVERRIDES=mscoree,mshtml=')
    fi
    for name in "${!MLA_@}" RUST_BACKTRACE RUST_LOG; do [[ -z ${!name+x} ]] || env+=("$name=${!name}"); done
    exec 7>"$folder/wine.lock"
    flock 7
    # shellcheck disable=SC2016 # The inner shell expands these.
    inside /usr/bin/env --chdir="$root" "${env[@]}" bash -c 'set -uo pipefail
        number=$(mktemp)
        Xvfb -displayfd 3 -screen 0 1180x760x24 -nolisten tcp 3>"$number" 2>/dev/null &
        screen=$!
        for ((i = 0; i < 100; i++)); do [ -s "$number" ] && break; sleep 0.1; done
        export DISPLAY=:$(cat "$number")
        [ -e "$WINEPREFIX/system.reg" ] || wineboot --init >/dev/null 2>&1
        wine "$@"
        status=$?
        wineserver -k
        kill "$screen"
        rm -f "$number"
        exit "$status"' wine "$folder/$device/$(basename "$program")" "$@"
}

(($# >= 2)) || usage
device=$1 verb=$2
shift 2
case $device in
    cpu) backend=cpu ;;
    vulkan | dx12) backend=wgpu ;;
    *) usage ;;
esac
case $verb in
    decode) program=(cargo build --profile test --example decode) arguments=(--backend "$backend" "$@") ;;
    unit) program=(cargo test --lib --no-run) arguments=("$@") ;;
    it) program=(cargo test --test it --no-run) arguments=("$@") ;;
    desktop) program=(cargo build -p desktop) arguments=("$@") ;;
    *) usage ;;
esac
mkdir -p "$folder"
wine_setup
program=$(build "${program[@]}")
[[ -f $program ]] || { echo "windows.sh: $verb was not built" >&2; exit 1; }
in_wine "$device" "$program" "${arguments[@]}"
