# Intel's Vulkan driver (ANV) and the stub of its kernel driver, in the tree of scripts/vendors.sh. Sourced.
#
# Debian's mesa-drm-shim has no stub for Intel, so both are built from Debian's source of Mesa: 15 minutes on two cores, once a machine.

INTEL_MESA=25.0.7-2+deb13u1
INTEL=/opt/intel

# A marker file is written last.
intel_setup() {
    local marker=$tree$INTEL/$INTEL_MESA
    exec 9>"$target/vendors.lock"
    flock 9
    [[ -e $marker ]] || intel_build >>"$target/debootstrap.log"
    exec 9>&-
}

intel_build() {
    step "Intel's driver of Mesa $INTEL_MESA in $tree$INTEL, from source"
    # shellcheck disable=SC2016 # The inner shell expands these.
    inside bash -c 'set -euo pipefail
        export DEBIAN_FRONTEND=noninteractive
        version=$1 folder=$2 upstream=${1%%-*}
        sed "s/^deb /deb-src /" /etc/apt/sources.list >/etc/apt/sources.list.d/source.list
        apt-get update -qq
        # What depends on packages that Mesa brought from backports comes from there too.
        apt-get install -qq -y --no-install-recommends -t trixie-backports libelf-dev libdrm-dev
        apt-get install -qq -y --no-install-recommends build-essential dpkg-dev xz-utils meson ninja-build python3-mako python3-yaml \
            python3-packaging python3-ply bison flex pkg-config libexpat1-dev zlib1g-dev libzstd-dev llvm-19-dev libclang-19-dev clang-19 \
            libclang-cpp19-dev libclc-19 libclc-19-dev libllvmspirvlib-19-dev llvm-spirv-19 spirv-tools glslang-tools libudev-dev \
            libvulkan-dev libdisplay-info-dev
        rm -rf "$folder" && mkdir -p "$folder/source" && cd "$folder/source"
        apt-get source -qq --download-only "mesa=$version"
        tar --strip-components=1 -xf "mesa_$upstream.orig.tar.xz"
        # Its log of each compiled shader, which release builds leave out: INTEL_DEBUG=cs has the same line, and megabytes of listings.
        sed -i "s|^ *//vk_logd(.*str);|   fputs(str, stderr);|" src/intel/vulkan/anv_physical_device.c
        grep -q "fputs(str, stderr)" src/intel/vulkan/anv_physical_device.c
        meson setup build -Dbuildtype=release -Dplatforms= -Dglx=disabled -Degl=disabled -Dgbm=disabled -Dgallium-drivers= \
            -Dvulkan-drivers=intel -Dtools=drm-shim,intel -Dllvm=enabled -Dshared-llvm=enabled -Dvideo-codecs= -Dopengl=false \
            -Dgles1=disabled -Dgles2=disabled -Dintel-rt=disabled -Dvalgrind=disabled -Dlibunwind=disabled -Dbuild-tests=false
        shim=src/intel/tools/libintel_noop_drm_shim.so driver=src/intel/vulkan/libvulkan_intel.so
        ninja -C build "$driver" "$shim"
        cp "build/$driver" "build/$shim" "$folder"
        printf "%s" "{\"file_format_version\": \"1.0.0\", \"ICD\": {\"library_path\": \"$folder/libvulkan_intel.so\", \"api_version\": \"1.3.0\"}}" \
            >"$folder/intel_icd.json"
        cd / && rm -rf "$folder/source"
        touch "$folder/$version"' bash "$INTEL_MESA" "$INTEL"
}
