#!/usr/bin/env bash
# Every kernel through the real compilers of GPUs that are not here, and the tests on a newer software driver.
#
#   scripts/vendors.sh                        compiles all for each vendor, writes benches/results/vendors.md;
#                                             fails where one does not compile, or spills and is the variant that is chosen
#   scripts/vendors.sh compile VENDOR...      some vendors, writes nothing: navi21 navi31 gfx1201 vega20 apple-m1
#                                             adreno740 nvk-turing intel-skl intel-tgl intel-dg2 intel-mtl intel-lnl
#                                             intel-bmg dx12; or `all`. ONLY=TEXT,TEXT...: the pipelines whose names,
#                                             in `examples/pipelines --list`, contain a TEXT
#   scripts/vendors.sh mesa26 [OP...]         the GPU tests of variants on cooperative matrices, on Mesa 26's lavapipe, which has
#                                             8x8: of all, or of some of decode, head_project, batch_tables
#   scripts/vendors.sh run DRIVER COMMAND...  any command; DRIVER is a vendor, or lavapipe, which alone executes shaders
#   scripts/vendors.sh setup                  only makes the tree
# --full in front, or MLA_FULL=1: every output dtype, and NVK's statistics of every chosen pipeline; all GPU tests, of every
# variant (long).
#
# Mesa's compilers run behind a stub of the kernel driver (mesa-drm-shim): pipelines compile as they would with the card
# in the machine, dispatches do nothing. All of it lives in a Debian trixie tree with backports, made once by debootstrap
# (half a GB) from the Debian mirror that this machine's apt uses. MESA_TREE: where, target/mesa-tree unless set;
# DEBIAN_MIRROR: the mirror where apt has another system's. Needs Debian or Ubuntu, and root or sudo. Intel's driver is built there from
# Mesa's source, which takes 15 minutes on two cores, and DX12's compilers are Microsoft's own, under Wine.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tree=$(realpath -m "${MESA_TREE:-$target/mesa-tree}")
logs=$target/vendors
VENDORS=(nvk-turing adreno740 apple-m1 navi21 navi31 gfx1201 vega20 intel-skl intel-tgl intel-dg2 intel-mtl intel-lnl intel-bmg)

. scripts/vendors/tree.sh
. scripts/vendors/intel.sh
. scripts/vendors/dx12.sh

# The lines of a compiler's output that scripts/vendors/report.py reads.
KEPT='^@@ |^CS SIMD|^(\*\*\* SHADER STATS|SGPRs|VGPRs|Spilled|Code size|LDS size|Subgroups per SIMD|Latency|Inverse)|^CS shader:'
KEPT+='|^(MESA: info: )?shared_size|^MESA: info: (; CL prog|.*\b(stp|ldp)\.)|^(Stage|Instruction count|Static|Max warps|Spills|Num GPRs|SLM)'

# What a program that ends badly says.
WRONG='^error|panicked|[Aa]ssert|terminate|signal'
KEPT+="|$WRONG"

# Compiles pipelines for a vendor: what was compiled goes to $logs/JOB.out, statistics to JOB.stats. JOB is VENDOR.PART.
part() {
    local job=$1 vendor=${1%.*} status=0 before=$SECONDS all=()
    local out=$logs/$job.out stats=$logs/$job.stats
    shift
    [[ -z $full ]] || all=(--all)
    on "$vendor" "$target/debug/examples/pipelines" --markers "${all[@]}" "$@" 2>&1 >"$out" | grep -aE "$KEPT" >"$stats" ||
        status=${PIPESTATUS[0]}
    ((status == 0)) || grep -aE "$WRONG" "$stats" | tail -n 5 >&2
    # A compiler that crashes takes the program with it.
    ((status <= 1)) || echo "    FAILED  the program, with status $status, after the line above" >>"$out"
    echo "$vendor: $(tail -n 1 "$out"), $((SECONDS - before)) s with statistics" >&2
}

# Runs a part beside others, as many at a time as there are cores.
running=0
beside() {
    if ((running >= $(nproc))); then wait -n || true; else running=$((running + 1)); fi
    "$@" &
}

# The slow ones come first.
compile_all() {
    local vendor only=()
    [[ -z ${ONLY:-} ]] || only=(--only "$ONLY")
    rm -f "$logs"/*.{out,stats}
    for vendor in "$@"; do
        if [[ $vendor == dx12 ]]; then
            dx12_compile
        elif [[ $vendor != nvk-turing ]]; then
            STATS=1 beside part "$vendor.0" "${only[@]}"
        elif [[ -n $full ]]; then
            beside part "$vendor.1" --only offered "${only[@]}"
            STATS=1 beside part "$vendor.0" --only chosen "${only[@]}"
        else
            # NVK's statistics come with six megabytes of listings a kernel, in tiny writes: ten seconds each. So only some are collected.
            beside part "$vendor.1" "${only[@]}"
            STATS=1 beside part "$vendor.0" --only chosen --only "$NVK_STATS" "${only[@]}"
        fi
    done
    wait
    for vendor in "$@"; do
        [[ $vendor != dx12 ]] || continue
        for ending in out stats; do cat "$logs/$vendor".*."$ending" >"$logs/$vendor.$ending"; done
    done
}

# The largest kernel of each variant on cooperative matrices, with 16 heads and with more, and of each other kernel.
NVK_STATS='512/64x16 coop q_bf16.kv_bf16,512/64x20 coop q_bf16.kv_bf16,512/64x16 coop q_bf16.kv_e4m3'
NVK_STATS+=',merge_state bf16 head_size 33,kv_append e4m3 bf16,kv_copy_pages e4m3,kv_gather e4m3 f16,kv_calibrate bf16,batch_tables'

# Tests on lavapipe; their output goes to $logs/mesa26-JOB.log, and here when they end. JOB is a number.
mesa26_tests() {
    local job=$1 begin=$SECONDS status=0
    shift
    MLA_REQUIRE_GPU=1 RUST_BACKTRACE=1 on lavapipe "$binary" "$@" >"$logs/mesa26-$job.log" 2>&1 || status=$?
    step "$* ($((SECONDS - begin)) s)"
    cat "$logs/mesa26-$job.log"
    # Tests of what this driver does not offer are ignored; some must run.
    grep -qE '^test result: ok\. [1-9][0-9]* passed' "$logs/mesa26-$job.log" || status=1
    return "$status"
}

# lavapipe compiles a kernel on cooperative matrices for 10 to 60 s on one core; compiled ones are kept in $logs/lavapipe. So without
# --full only these run: the smallest dims with each dtype of the cache and all head counts; of the conformance suite, also at the
# smallest dims, the groups that share the kernels of bf16 and e4m3 (VARLEN, empty rows, LSE, page sizes, invariance, shared prefixes), and
# large logits; and one group at 512/64. Other variants run on this machine's own driver.
# The variant `coop` needs 48 KiB of workgroup memory, and lavapipe has 32. mla_prefill's kernels on cooperative matrices compile for
# minutes: only with --full.
mesa26() {
    local group decode=conformance::wgpu::coop_small::decode status=0 job
    local matrix=(matrix::coop_small::256_32) conformance=()
    for group in page_sizes varlen masks policies shared_prefixes empty_batches a_step_serves bits_of rising equal_large_logits; do
        conformance+=("$decode::$group")
    done
    step "tests on lavapipe"
    # With the feature `cuda` they are those of scripts/check.sh, built once.
    binary=$(cargo test --locked --features cuda --no-run --test it --message-format json |
        sed -n 's/.*"name":"it".*"executable":"\([^"]*\)".*/\1/p')
    [[ -x $binary ]] || { echo "vendors.sh: the tests were not built" >&2; return 1; }
    export MLA_CASES=product
    if [[ -n $full ]]; then
        matrix=(matrix::) conformance=(conformance::wgpu::)
    else
        export MLA_DIMS=256/32
    fi
    if wanted decode; then
        mesa26_tests 1 "${matrix[@]}" &
        job=$!
        mesa26_tests 2 "${conformance[@]}" || status=$?
        [[ -n $full ]] || MLA_DIMS=512/64 mesa26_tests 3 "$decode::varlen" || status=$?
        wait "$job" || status=$?
        mesa26_tests 6 devices::made || status=$?
    fi
    if wanted head_project; then mesa26_tests 4 head_project::coop || status=$?; fi
    if wanted batch_tables; then mesa26_tests 5 batch_tables::on_wgpu || status=$?; fi
    return "$status"
}

# Whether a part of mesa26 is asked for, by name or with all.
wanted() { [[ ${#names[@]} == 0 || " ${names[*]} " == *" $1 "* ]]; }

full=''
[[ ${MLA_FULL:-} != 1 ]] || full=yes
if [[ ${1:-} == --full ]]; then
    full=yes
    export MLA_FULL=1
    shift
fi
verb=${1:-compile}
(($# == 0)) || shift
case $verb in
    setup) setup ;;
    run)
        setup
        [[ ${1:-} != intel-* ]] || intel_setup
        on "$@"
        ;;
    mesa26)
        names=("$@")
        setup
        mkdir -p "$logs"
        mesa26
        ;;
    compile)
        setup
        # The profile of the tests, so that dependencies are not built twice.
        cargo build --locked --profile test --features cuda --example pipelines
        mkdir -p "$logs"
        out=()
        if (($# == 0)); then
            set -- all
            out=(--out benches/results)
        fi
        if [[ $* == all ]]; then set -- dx12 "${VENDORS[@]}"; fi
        [[ -z ${ONLY:-} ]] || out=(--partial)
        if [[ " $*" == *" intel-"* ]]; then intel_setup; fi
        if [[ " $* " == *" dx12 "* ]]; then dx12_setup; fi
        step "compile"
        compile_all "$@"
        step "report"
        python3 scripts/vendors/report.py "$logs" "$@" "${out[@]}"
        ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2 ;;
esac
