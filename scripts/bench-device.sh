#!/usr/bin/env bash
# Packs the benches for a GPU machine that has a Vulkan or CUDA driver and no Rust. The same binaries serve both.
# usage: scripts/bench-device.sh [--tests] [--loader] [OUT.tgz]
#   --tests    the GPU tests and their case files too
#   --loader   this machine's libvulkan.so.1 too, for one that has a driver and no loader
set -euo pipefail
cd "$(dirname "$0")/.."

tests= loader= out=target/bench-device.tgz
for arg in "$@"; do
    case $arg in
        --tests) tests=1 ;;
        --loader) loader=1 ;;
        -*) sed -n '2,5s/^# //p' "$0"; exit 2 ;;
        *) out=$arg ;;
    esac
done

# The path of each executable that a cargo command builds.
built() { cargo "$@" --features cuda --locked --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'; }

pack=$(mktemp -d)
trap 'rm -rf "$pack"' EXIT
dir=$pack/wgpu-mla-bench
mkdir -p "$dir/bin" "$dir/tests"

add() { # FOLDER EXECUTABLE..
    local folder=$1 path
    shift
    [ $# -gt 0 ] || { echo "nothing was built" >&2; exit 1; }
    for path in "$@"; do
        # decode-0123456789abcdef is decode.
        strip -o "$dir/$folder/$(basename "$path" | sed 's/-[0-9a-f]*$//')" "$path"
    done
}

mapfile -t benches < <(built bench --bench decode --bench merge --bench append --bench gather --bench prefill --bench cascade --bench project --bench rope --bench layer --bench slabs --bench combine --bench indexer --bench small_ops)
add bin "${benches[@]}"
if [ -n "$tests" ]; then
    mapfile -t binaries < <(built test --release --test it)
    add tests "${binaries[@]}"
    cp -r tests/cases "$dir/tests/cases"
fi
if [ -n "$loader" ]; then
    mkdir "$dir/lib"
    path=$(ldconfig -p | sed -n 's/.*libvulkan\.so\.1 .*=> //p' | head -n 1)
    [ -n "$path" ] || { echo "no libvulkan.so.1 here: install libvulkan1" >&2; exit 1; }
    cp -L "$path" "$dir/lib/libvulkan.so.1"
fi
git describe --always --dirty >"$dir/revision" 2>/dev/null || true

cat >"$dir/run.sh" <<'RUN'
#!/usr/bin/env bash
# usage: ./run.sh                       all benches; tables and JSON into results/ (or $OUT)
#        ./run.sh cuda [ARGS..]         the same through CUDA
#        ./run.sh decode|merge|append|gather|prefill|cascade|project|rope|layer|slabs|combine|indexer|small_ops ARGS..   one of them with its arguments: see BENCHMARKS.md
#        ./run.sh tests [cuda|TEXT..]   the GPU tests, those through CUDA, or those whose names contain a TEXT; a card that
#                                       is not there is a failure
set -euo pipefail
cd "$(dirname "$0")"
results=${OUT:-results}
mkdir -p "$results"
[ -d lib ] && export LD_LIBRARY_PATH="$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
[ -n "${XDG_RUNTIME_DIR:-}" ] || export XDG_RUNTIME_DIR=/tmp

# NAME ARGS..: its table and JSON, named after the backend unless that is wgpu.
bench() {
    local name=$1 file=$1
    shift
    case " $* " in
        *" --host "*) file=$name-host ;;
        *" --backend cuda "*) file=cuda-$name ;;
    esac
    "bin/$name" --json "$results/$file.json" "$@" | tee "$results/$file.md"
}

all() {
    local name failed=
    for name in decode merge append gather prefill cascade project rope layer slabs combine indexer small_ops; do
        bench $name "$@" || failed+=" $name"
        echo
    done
    [ -z "$failed" ] || { echo "FAILED:$failed"; exit 1; }
}

case ${1:-all} in
    all) all ;;
    cuda) shift && all --backend cuda "$@" ;;
    tests)
        shift
        # A card compiles quickly: every variant by every group.
        export MLA_REQUIRE_GPU=1 MLA_CASES=product
        # Elsewhere those of CUDA are ignored.
        if [ "${1:-}" = cuda ] || command -v nvidia-smi >/dev/null; then export MLA_REQUIRE_CUDA=1; fi
        if [ "${1:-}" = cuda ]; then unset MLA_REQUIRE_GPU && set -- conformance::cuda conformance::direct_cuda cuda:: batch_tables::on_cuda; fi
        if [ $# -eq 0 ]; then
            set -- conformance::wgpu conformance::direct_wgpu matrix:: head_project:: layer_wgpu:: record:: page_list:: devices:: wgpu_ops:: codes:: batch_tables::
            [ -z "${MLA_REQUIRE_CUDA:-}" ] || set -- "$@" conformance::cuda conformance::direct_cuda cuda::
        fi
        tests/it "$@" 2>&1 | tee "$results/tests.log" | grep -v '^test .* ok$' ;;
    *) bench "$@" ;;
esac
RUN
chmod +x "$dir/run.sh"
mkdir -p "$(dirname "$out")"
tar -czf "$out" -C "$pack" wgpu-mla-bench
ls -lh "$out"
cat <<HOW
On the GPU machine:
    tar xzf $(basename "$out") && wgpu-mla-bench/run.sh          (its head says what else it does; run.sh cuda: through CUDA)
Bring back wgpu-mla-bench/results/*.json. If no driver is found there, point VK_DRIVER_FILES at its ICD file.
HOW
