# Microsoft's compilers of HLSL, DXC and FXC, under Wine in the tree of scripts/vendors.sh. Sourced.

# An npm package that has both as libraries for Windows.
DX12_PACKAGE=webgpu@0.6.2
DX12=/opt/dx12

dx12_setup() {
    local marker=$tree$DX12/$DX12_PACKAGE folder
    exec 9>"$target/vendors.lock"
    flock 9
    if [[ ! -e $marker ]]; then
        step "Wine, and the compilers of $DX12_PACKAGE, in $tree"
        command -v npm >/dev/null || scripts/apt.sh npm
        inside bash -c 'export DEBIAN_FRONTEND=noninteractive; apt-get update -qq &&
            apt-get install -qq -y --no-install-recommends wine wine64 libwine gcc-mingw-w64-x86-64-win32' >>"$target/debootstrap.log"
        folder=$(mktemp -d)
        (cd "$folder" && npm pack --silent "$DX12_PACKAGE" >/dev/null && tar -xzf webgpu-*.tgz package/dist/win32-x64)
        "${as_root[@]}" mkdir -p "$tree$DX12"
        "${as_root[@]}" cp "$folder"/package/dist/win32-x64/{dxcompiler,d3dcompiler_47}.dll "$tree$DX12"
        rm -rf "$folder"
        "${as_root[@]}" touch "$marker"
    fi
    exec 9>&-
}

# Has every pipeline written as HLSL and compiles it: $logs/hlsl/list.tsv says what, $logs/hlsl/out.N what came of it. With ONLY, those
# whose name contains a text of it.
dx12_compile() {
    local hlsl=$logs/hlsl
    step "HLSL"
    rm -rf "$hlsl"
    MLA_HLSL=$hlsl cargo test --locked --features cuda --lib every_pipeline_is_written_for_both_of_microsofts_compilers -- --ignored >&2
    if [[ -n ${ONLY:-} ]]; then
        tr , '\n' <<<"$ONLY" >"$hlsl/only"
        grep -F -f "$hlsl/only" "$hlsl/list.tsv" >"$hlsl/some.tsv" || true
        mv "$hlsl/some.tsv" "$hlsl/list.tsv"
    fi
    cp scripts/vendors/hlsl.c "$hlsl"
    step "DXC and FXC, $(wc -l <"$hlsl/list.tsv") kernels"
    # The libraries are found beside the program. The copy of d3dcompiler that Wine has is its own: `n` takes the native one.
    # shellcheck disable=SC2016 # The inner shell expands these.
    inside bash -c 'set -euo pipefail
        cd "$1"
        x86_64-w64-mingw32-gcc -O1 -Wall -Wextra -o hlsl.exe hlsl.c
        cp "$2"/*.dll .
        export WINEPREFIX="$2/prefix" WINEDEBUG=-all DISPLAY= WINEDLLOVERRIDES="d3dcompiler_47=n;mscoree,mshtml="
        wineboot --init >/dev/null 2>&1
        jobs=$(nproc)
        for ((i = 0; i < jobs; i++)); do wine hlsl.exe list.tsv "$i" "$jobs" >"out.$i" & done
        wait
        wineserver -k
        rm -f ./*.dll' bash "$hlsl" "$DX12"
}
