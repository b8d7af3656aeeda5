#!/usr/bin/env bash
# Every kernel through the real compilers of GPUs that are not here, and the tests on a newer software driver.
#
#   scripts/vendors.sh                        compiles all for each vendor, writes benches/results/vendors.{md,tsv};
#                                             fails where one does not compile, or spills and is the variant that is chosen
#   scripts/vendors.sh compile VENDOR...      some vendors, writes nothing: navi21 navi31 gfx1201 vega20 apple-m1
#                                             adreno740 nvk-turing; or `all`. ONLY=TEXT,TEXT...: the pipelines whose names,
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
# DEBIAN_MIRROR: the mirror where apt has another system's. Needs Debian or Ubuntu, and root or sudo.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tree=$(realpath -m "${MESA_TREE:-$target/mesa-tree}")
logs=$target/vendors
VENDORS=(nvk-turing adreno740 apple-m1 navi21 navi31 gfx1201 vega20)

step() { printf '\n== %s (after %s s)\n' "$*" "$SECONDS" >&2; }

as_root=()
if ((EUID != 0)); then
    command -v sudo >/dev/null || { echo "vendors.sh needs root or sudo: it makes a chroot" >&2; exit 1; }
    as_root=(sudo)
fi

# The mirror of Debian proper, as apt has it.
debian_mirror() {
    if [[ -n ${DEBIAN_MIRROR:-} ]]; then echo "$DEBIAN_MIRROR"; return; fi
    # shellcheck disable=SC2016 # apt expands these.
    apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(RELEASE)' 'Created-By: Packages' |
        awk '$NF !~ /security|updates|backports/ && $1 ~ /debian\/?$/ { print $1; exit }'
}

# A marker file is written last: a tree without it is made again.
setup() {
    # Parallel runs make it once.
    mkdir -p "$target"
    exec 9>"$target/vendors.lock"
    flock 9
    [[ -e $tree/ready ]] || debian_tree
    exec 9>&-
}

debian_tree() {
    step "a Debian tree with Mesa from backports in $tree"
    local mirror
    mirror=$(debian_mirror)
    [[ -n $mirror ]] || { echo "apt knows no Debian mirror here: set DEBIAN_MIRROR" >&2; exit 1; }
    if ! { command -v debootstrap && command -v python3; } >/dev/null; then
        scripts/apt.sh debootstrap debian-archive-keyring python3
    fi
    "${as_root[@]}" rm -rf --one-file-system "$tree"
    "${as_root[@]}" debootstrap --variant=minbase trixie "$tree" "$mirror" >"$target/debootstrap.log"
    "${as_root[@]}" sh -c 'echo "deb $1 trixie-backports main" >"$2/etc/apt/sources.list.d/backports.list"
        cp -r /etc/apt/apt.conf.d "$2/etc/apt/"; cp /etc/resolv.conf "$2/etc/"' sh "$mirror" "$tree"
    inside sh -c 'export DEBIAN_FRONTEND=noninteractive; apt-get update -qq &&
        apt-get install -qq -y --no-install-recommends -t trixie-backports mesa-vulkan-drivers mesa-drm-shim libvulkan1' \
        >>"$target/debootstrap.log"
    "${as_root[@]}" touch "$tree/ready"
}

# Runs a command in the tree, with this repository at its own path. The mounts are in a namespace of their own and end with it:
# through one that stayed, `rm -r target` would reach /dev.
inside() {
    # shellcheck disable=SC2016 # The inner shell expands these.
    "${as_root[@]}" unshare --mount --propagation private bash -c 'set -e
        tree=$1; shift
        for dir in "$1" "$2"; do mkdir -p "$tree$dir"; mount --bind "$dir" "$tree$dir"; done
        shift 2
        for dir in dev proc sys; do mount --rbind "/$dir" "$tree/$dir"; done
        exec chroot "$tree" "$@"' inside "$tree" "$root" "$target" "$@"
}

# Runs a command on one driver, inside the tree. STATS=1: the compiler writes its statistics to stderr.
on() {
    local driver=$1 icd shim env=() stats=()
    shift
    case $driver in
        # With a cache of compiled kernels for later processes; without LLVM's optimiser, since a test runs each kernel briefly.
        lavapipe) icd=lvp shim='' env=("MESA_SHADER_CACHE_DIR=$logs/lavapipe" GALLIVM_PERF=nopt) ;;
        navi* | gfx* | vega*) icd=radeon shim=amdgpu env=("AMDGPU_GPU_ID=$driver") stats=(RADV_DEBUG=shaderstats) ;;
        apple-m1) icd=asahi shim=asahi stats=(AGX_MESA_DEBUG=shaderdb) ;;
        adreno740) icd=freedreno shim=freedreno env=(FD_GPU_ID=740) stats=(IR3_SHADER_DEBUG=cs) ;;
        nvk-turing)
            icd=nouveau shim=nouveau env=(NOUVEAU_CHIPSET=174 NVK_I_WANT_A_BROKEN_VULKAN_DRIVER=1) stats=(NAK_DEBUG=print) ;;
        *) echo "vendors.sh: no driver $driver; there are lavapipe ${VENDORS[*]}" >&2; exit 2 ;;
    esac
    # A vendor without a cache compiles every pipeline, and prints its statistics, each time.
    [[ $driver == lavapipe ]] || env+=(MESA_SHADER_CACHE_DISABLE=true)
    env+=(WGPU_BACKEND=vulkan XDG_RUNTIME_DIR=/tmp
        "VK_DRIVER_FILES=/usr/share/vulkan/icd.d/${icd}_icd.json")
    # sudo passes no environment on.
    local name
    for name in "${!MLA_@}"; do env+=("$name=${!name}"); done
    [[ -z ${STATS:-} ]] || env+=("${stats[@]}")
    [[ -z $shim ]] || env+=("LD_PRELOAD=/usr/lib/x86_64-linux-gnu/lib${shim}_noop_drm_shim.so")
    inside /usr/bin/env --chdir="$root" "${env[@]}" "$@"
}

# The lines of a compiler's output that scripts/vendors_report.py reads.
KEPT='^@@ |^(\*\*\* SHADER STATS|SGPRs|VGPRs|Spilled|Code size|LDS size|Subgroups per SIMD|Latency|Inverse)|^CS shader:'
KEPT+='|^(MESA: info: )?shared_size|^MESA: info: (; CL prog|.*\b(stp|ldp)\.)|^(Stage|Instruction count|Static|Max warps|Spills|Num GPRs|SLM)'

# Compiles pipelines for a vendor: what was compiled goes to $logs/JOB.out, statistics to JOB.stats. JOB is VENDOR.PART.
part() {
    local job=$1 vendor=${1%.*} status=0 before=$SECONDS all=()
    local raw=$logs/$job.raw out=$logs/$job.out
    shift
    [[ -z $full ]] || all=(--all)
    on "$vendor" "$target/debug/examples/pipelines" --markers "${all[@]}" "$@" >"$out" 2>"$raw" || status=$?
    grep -aE "$KEPT" "$raw" >"$logs/$job.stats" || true
    ((status == 0)) || tail -n 5 "$raw" >&2
    # A compiler that crashes takes the program with it.
    ((status <= 1)) || echo "    FAILED  the program, with status $status, after the line above" >>"$out"
    rm -f "$raw"
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
        if [[ $vendor != nvk-turing ]]; then
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
        for ending in out stats; do cat "$logs/$vendor".*."$ending" >"$logs/$vendor.$ending"; done
    done
}

# The largest kernel of each variant on cooperative matrices, with 16 heads and with more, and of each other kernel.
NVK_STATS='512/64x16 coop q_bf16.kv_bf16,512/64x20 coop q_bf16.kv_bf16,512/64x16 coop q_bf16.kv_e4m3'
NVK_STATS+=',merge_state bf16 head_size 33,kv_append bf16 into e4m3,kv_copy_pages e4m3,kv_gather e4m3 to f16,kv_calibrate bf16,batch_tables'

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
# smallest dims, the groups that share the kernels of bf16 and e4m3 (VARLEN, empty rows, LSE, page sizes, invariance, shared prefixes);
# and one group at 512/64. Other variants run on this machine's own driver.
# The variant `coop` needs 48 KiB of workgroup memory, and lavapipe has 32. mla_prefill's kernels on cooperative matrices compile for
# minutes: only with --full.
mesa26() {
    local group decode=conformance::wgpu::coop_small::decode status=0 job
    local matrix=(matrix::coop_small::256_32) conformance=()
    for group in page_sizes varlen masks policies shared_prefixes empty_batches a_step_serves bits_of rising; do
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
    run) setup && on "$@" ;;
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
        step "compile"
        out=()
        if (($# == 0)); then
            set -- "${VENDORS[@]}"
            out=(--out benches/results)
        fi
        if [[ $* == all ]]; then set -- "${VENDORS[@]}"; fi
        [[ -z ${ONLY:-} ]] || out=(--partial)
        compile_all "$@"
        step "report"
        python3 scripts/vendors_report.py "$logs" "$@" "${out[@]}"
        ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2 ;;
esac
