#!/usr/bin/env bash
# The check in a browser: the crate builds for wasm32, and tests/web runs in headless Chromium on SwiftShader, so that
# Chromium's own compiler sees every shader that a browser would get. Then it checks that a failing test is noticed.
#   scripts/web.sh [TEST...]       all tests, or those whose names contain a TEST, which takes one page each
#   scripts/web.sh --lints         only that it builds for wasm32 without a warning
#   scripts/web.sh page            builds the page of examples/web into WEB_DIR/page, for any server of files
#   scripts/web.sh page --test     and looks at it in that browser: scripts/web_page.py
#   scripts/web.sh page --shot     and takes docs/page.png of it
# Downloads and builds are kept in WEB_DIR (default target/web) and in cargo's target folder.
#   CHROMIUM, CHROMEDRIVER         these instead of the system's
#   BUILD_STD=1                    build std for wasm32 even where the toolchain has it
# On Debian and Ubuntu it installs what is missing, if it may. A missing tool is a failure, never a skip.
set -euo pipefail
cd "$(dirname "$0")/.."
web=${WEB_DIR:-target/web}
mkdir -p "$web"
web=$(cd "$web" && pwd)
wasm=wasm32-unknown-unknown
. scripts/std.sh

die() { printf 'web.sh: %s\n' "$*" >&2; exit 1; }

# Runs a step and says how long it took.
step() {
    local name=$1 begin=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@"
    times+=("$(printf '%5s s  %s' "$((SECONDS - begin))" "$name")")
}
times=()

# Chromium, and the driver of the same version.
find_browser() {
    local name names=(/usr/lib/chromium/chromium chromium chromium-browser google-chrome)
    chromium=${CHROMIUM:-} chromedriver=${CHROMEDRIVER:-$(command -v chromedriver || true)}
    # The binary before Debian's wrapper, which adds flags of its own.
    for name in "${names[@]}"; do
        [ -n "$chromium" ] || chromium=$(command -v "$name" || true)
    done
    [ -n "$chromium" ] && [ -n "$chromedriver" ]
}

browser() {
    if ! find_browser; then
        scripts/apt.sh chromium chromium-driver fonts-dejavu-core || die "or set CHROMIUM and CHROMEDRIVER"
        find_browser || die "Chromium or chromedriver is still missing after its install"
    fi
    "$chromium" --version
    "$chromedriver" --version
    [ "$(major "$chromium")" = "$(major "$chromedriver")" ] || die "Chromium and chromedriver are of different versions"
}

major() { "$1" --version | grep -oE '[0-9]+' | awk 'NR == 1'; }

# A tool of exactly the wasm-bindgen that the lock file names, from the path or from a folder of its own; `tool` is its path.
wasm_bindgen_tool() {
    local name=$1 version root
    version=$(awk '/^name = / { name = $3 } /^version = / && name == "\"wasm-bindgen\"" { gsub("\"", "", $3); print $3 }' Cargo.lock)
    [ -n "$version" ] || die "Cargo.lock names no wasm-bindgen"
    root=$web/$2-$version
    tool=$(command -v "$name" || true)
    if [ -z "$tool" ] || [[ $("$tool" --version) != *" $version"* ]]; then
        tool=$root/bin/$name
    fi
    if [ ! -x "$tool" ]; then
        local install=(cargo install wasm-bindgen-cli --version "=$version" --no-default-features
            --bin "$name" --root "$root" --target-dir "$web/wasm-bindgen-build")
        export CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_DEBUG=0
        # Its own lock file first; a registry's mirror may lack a version that is in there.
        "${install[@]}" --locked || CARGO_RESOLVER_INCOMPATIBLE_RUST_VERSIONS=fallback "${install[@]}" \
            || die "wasm-bindgen-cli $version could not be built"
        unset CARGO_PROFILE_RELEASE_OPT_LEVEL CARGO_PROFILE_RELEASE_DEBUG
        rm -rf "$web/wasm-bindgen-build"
    fi
    "$tool" --version
}

runner() { wasm_bindgen_tool wasm-bindgen-test-runner wasm-bindgen && runner=$tool; }

bindgen() { wasm_bindgen_tool wasm-bindgen wasm-bindgen-cli && bindgen=$tool; }

lints() {
    cargo clippy --locked --target "$wasm" -p wgpu-mla --lib --no-default-features -- -D warnings
    cargo clippy --locked --target "$wasm" -p wgpu-mla --lib -- -D warnings
    cargo clippy --locked --target "$wasm" -p web_tests --tests -- -D warnings
    cargo clippy --locked --target "$wasm" -p web -- -D warnings
}

build() {
    cargo test --locked --profile browser --target "$wasm" -p web_tests --no-run
}

# The program, the files that call it, and the checkpoint.
page() {
    local folder=$web/page model=examples/generate/model
    cargo build --locked --profile page --target "$wasm" -p web
    rm -rf "$folder"
    mkdir "$folder"
    "$bindgen" --target web --no-typescript --remove-name-section --remove-producers-section --out-dir "$folder" \
        "${CARGO_TARGET_DIR:-target}/$wasm/page/web.wasm"
    # A third of the size: static servers compress nothing by themselves. The page unpacks it.
    gzip -9n "$folder/web_bg.wasm"
    cp examples/web/static/* "$model"/{config.json,model.safetensors,tokenizer.json,kv_cache_scales.json} "$folder"
    ls -l "$folder"
    du -sb "$folder"
}

page_in_browser() {
    TMPDIR=$browser_files timeout 600 python3 scripts/web_page.py "$web/page" --chromedriver "$chromedriver" \
        --capabilities "$web/webdriver.json" "$@" || die "the page is not as it should be"
}

# The browser is a new one every time, its WebGPU the software device that comes with it.
capabilities() {
    local flags=(--headless=new --no-sandbox --enable-unsafe-webgpu --use-webgpu-adapter=swiftshader
        --disable-dev-shm-usage --no-first-run --disable-background-networking --disable-component-update
        --disable-sync --disable-quic --mute-audio)
    local list
    list=$(printf ',"%s"' "${flags[@]}")
    printf '{"goog:chromeOptions":{"binary":"%s","args":[%s]}}\n' "$chromium" "${list:1}" >"$web/webdriver.json"
}

# Files that a killed browser leaves behind are removed at the end.
browser_files=$(mktemp -d)
trap 'rm -rf "$browser_files"' EXIT

in_browser() {
    TMPDIR=$browser_files CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUNNER=$runner CHROMEDRIVER=$chromedriver \
        WASM_BINDGEN_TEST_WEBDRIVER_JSON=$web/webdriver.json WASM_BINDGEN_TEST_TIMEOUT=800 \
        timeout 900 cargo test --locked --profile browser --target "$wasm" -p web_tests -- "$@" 2>&1
}

# The runner does not fail if it runs no test.
conformance() {
    if (($# == 0)); then one_page; fi
    local name
    for name in "$@"; do one_page "$name"; done
}

one_page() {
    local begin=$SECONDS
    in_browser --nocapture "$@" | tee "$web/page.log" | while IFS= read -r line; do
        case $line in 'Invoking test'* | *'deprecated parameters'* | '') continue ;; esac
        printf '%4s s  %s\n' "$((SECONDS - begin))" "$line"
    done || die "a test failed in the browser"
    grep -qE '^test result: ok\. [1-9][0-9]* passed; 0 failed' "$web/page.log" || die "no test ran"
}

must_fail() {
    if in_browser --include-ignored must_fail >"$web/must_fail.log"; then
        die "tests that must fail passed: see $web/must_fail.log"
    fi
    local name
    for name in a_wrong_result a_wrong_shader; do
        grep -qE "^test must_fail::$name \.\.\. FAIL" "$web/must_fail.log" \
            && grep -q "deliberate: ${name//_/ }" "$web/must_fail.log" \
            || { cat "$web/must_fail.log"; die "must_fail::$name did not fail as it should"; }
        echo "$name fails, as it must"
    done
}

finish() {
    printf '\n== all is well after %s s\n' "$SECONDS"
    printf '%s\n' "${times[@]}"
    exit
}

if [[ ${1:-} == --lints ]]; then
    step "std for $wasm" std_for "$wasm" "$web"
    step "lints for $wasm" lints
    finish
fi
if [[ ${1:-} == page ]]; then
    case ${2:-} in '' | --test | --shot) ;; *) die "page $2: must be --test or --shot" ;; esac
    if [[ -n ${2:-} ]]; then step "browser" browser; fi
    step "std for $wasm" std_for "$wasm" "$web"
    step "wasm-bindgen" bindgen
    step "the page" page
    if [[ -n ${2:-} ]]; then capabilities; fi
    case ${2:-} in
        --test) step "the page in the browser" page_in_browser ;;
        --shot) step "a picture of the page" page_in_browser --shot docs/page.png ;;
    esac
    echo "the page is in $web/page: python3 -m http.server -d $web/page"
    finish
fi
step "browser" browser
step "std for $wasm" std_for "$wasm" "$web"
step "test runner" runner
step "build for $wasm" build
capabilities
step "tests in the browser" conformance "$@"
step "tests that must fail" must_fail
finish
