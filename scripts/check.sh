#!/usr/bin/env bash
# The check: format, lints, every test on a GPU adapter (lavapipe where there is no card), docs.
#
#   scripts/check.sh                the whole check, with one query dtype for each row, cache dtype and dims in the slow suite
#   scripts/check.sh --full         with every one (MLA_FULL=1)
#   scripts/check.sh --vendors      instead of these: every kernel through other vendors' compilers (scripts/vendors.sh)
#   scripts/check.sh --mesa26       the GPU tests on Mesa 26's software driver, which has cooperative matrices
#   scripts/check.sh --web          the check in a browser (scripts/web.sh)
#   scripts/check.sh --all          all of them, as CI runs it
# Switches may be combined. On Debian and Ubuntu it installs what is missing, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."

here='' vendors='' mesa26='' web=''
(($# > 0)) || here=yes
for switch in "$@"; do
    case $switch in
        --full) here=yes && export MLA_FULL=1 ;;
        --vendors) vendors=yes ;;
        --mesa26) mesa26=yes ;;
        --web) web=yes ;;
        --all) here=yes vendors=yes mesa26=yes web=yes && export MLA_FULL=1 ;;
        *) sed -n '2,/^set/{/^#/p}' "$0" >&2 && exit 2 ;;
    esac
done

step() { printf '\n== %s (after %s s)\n' "$*" "$SECONDS"; }

# A step with a script of its own, which fetches things, and so could wait for ever.
within_12_minutes() {
    local name=$1 status=0
    shift
    step "$name"
    timeout 12m "$@" || status=$?
    ((status != 124)) || echo "check.sh: $name: not done within 12 minutes" >&2
    ((status == 0)) || { echo "check.sh: $name failed: $*" >&2; exit "$status"; }
}

# A software Vulkan driver, a virtual display, and what a window links to.
install_missing() {
    command -v apt-get >/dev/null || return 0
    local missing=()
    for package in mesa-vulkan-drivers xvfb xauth libxkbcommon-x11-0 libx11-xcb1 libxcursor1 libxi6 libxrandr2; do
        dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    step "install ${missing[*]}"
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "please install: ${missing[*]}"; return 0; }
        as_root=(sudo)
    fi
    "${as_root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

install_missing
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    chmod 700 "$XDG_RUNTIME_DIR"
fi
# No adapter is a failure here, never a skip.
export MLA_REQUIRE_GPU=1 RUST_BACKTRACE=1

here() {
    step "format"
    cargo fmt --all --check
    step "lints"
    cargo clippy --locked --workspace --all-targets -- -D warnings
    cargo clippy --locked --no-default-features --all-targets -- -D warnings
    # Tests keep wgpu's run-time checks of indices and loops in kernels that do without: a wrong index is then a wrong result.
    step "tests"
    MLA_CHECKED_SHADERS=1 cargo test --locked
    step "conformance of the kernels as they are shipped, without these checks"
    cargo test --locked --test conformance_wgpu
    step "benches, tiny"
    cargo test --locked --bench decode --bench merge --bench append -- --test
    step "tests without wgpu"
    cargo test --locked --no-default-features --lib --test plan --test pages --test tables
    step "docs"
    RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps
    step "a window with its own device"
    bash scripts/host_encoder.sh
}

# Not `[ ... ] || here`: there `set -e` would not end it.
if [ -n "$here" ]; then here; fi
if [ -n "$vendors" ]; then
    within_12_minutes "other vendors' compilers" scripts/vendors.sh compile \
        nvk-turing adreno740 apple-m1 navi21 navi31 gfx1201 vega20
fi
if [ -n "$mesa26" ]; then within_12_minutes "Mesa 26's software driver" scripts/vendors.sh mesa26; fi
if [ -n "$web" ]; then within_12_minutes "a browser" scripts/web.sh; fi
step "all is well"
