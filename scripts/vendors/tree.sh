# The tree of scripts/vendors.sh: a Debian trixie with Mesa from backports, and programs in it on one driver. Sourced.

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
    local driver=$1 icd shim library env=() stats=()
    shift
    case $driver in
        # With a cache of compiled kernels for later processes; without LLVM's optimiser, since a test runs each kernel briefly.
        lavapipe) icd=lvp shim='' env=("MESA_SHADER_CACHE_DIR=$logs/lavapipe" GALLIVM_PERF=nopt) ;;
        navi* | gfx* | vega*) icd=radeon shim=amdgpu env=("AMDGPU_GPU_ID=$driver") stats=(RADV_DEBUG=shaderstats) ;;
        apple-m1) icd=asahi shim=asahi stats=(AGX_MESA_DEBUG=shaderdb) ;;
        adreno740) icd=freedreno shim=freedreno env=(FD_GPU_ID=740) stats=(IR3_SHADER_DEBUG=cs) ;;
        nvk-turing)
            icd=nouveau shim=nouveau env=(NOUVEAU_CHIPSET=174 NVK_I_WANT_A_BROKEN_VULKAN_DRIVER=1) stats=(NAK_DEBUG=print) ;;
        intel-*)
            # It prints its statistics in any case.
            icd=intel shim=intel env=("INTEL_STUB_GPU_PLATFORM=${driver#intel-}")
            ;;
        *) echo "vendors.sh: no driver $driver; there are lavapipe ${VENDORS[*]}" >&2; exit 2 ;;
    esac
    # A vendor without a cache compiles every pipeline, and prints its statistics, each time.
    [[ $driver == lavapipe ]] || env+=(MESA_SHADER_CACHE_DISABLE=true)
    library=/usr/share/vulkan/icd.d/${icd}_icd.json
    shim=${shim:+/usr/lib/x86_64-linux-gnu/lib${shim}_noop_drm_shim.so}
    if [[ $icd == intel ]]; then library=$INTEL/intel_icd.json shim=$INTEL/libintel_noop_drm_shim.so; fi
    env+=(WGPU_BACKEND=vulkan XDG_RUNTIME_DIR=/tmp "VK_DRIVER_FILES=$library")
    # sudo passes no environment on.
    local name
    for name in "${!MLA_@}"; do env+=("$name=${!name}"); done
    [[ -z ${STATS:-} ]] || env+=("${stats[@]}")
    [[ -z $shim ]] || env+=("LD_PRELOAD=$shim")
    inside /usr/bin/env --chdir="$root" "${env[@]}" "$@"
}
