# std for a target that is not this machine's: the toolchain's, or rustup's, or built once from the library's sources. Sourced.
# shellcheck shell=bash
#
#   std_for TARGET FOLDER    FOLDER keeps what is fetched and built; afterwards RUSTFLAGS name the sysroot, if it was built
#   BUILD_STD=1              builds it even where the toolchain has it

std_die() { printf 'std.sh: %s\n' "$*" >&2; exit 1; }

has_std() { compgen -G "$1/libstd-*.rlib" >/dev/null; }

std_for() {
    local std_target=$1 std_folder=$2 own sysroot
    rustc -V
    if [ "${BUILD_STD:-0}" != 1 ]; then
        own=$(rustc --print target-libdir --target "$std_target")
        has_std "$own" && { echo "std is the toolchain's"; return; }
        if command -v rustup >/dev/null && timeout 180 rustup target add "$std_target" && has_std "$own"; then
            echo "std is rustup's"
            return
        fi
    fi
    # Two parts of the check may want it at once.
    mkdir -p "$std_folder"
    exec 8>"$std_folder/std.lock"
    flock 8
    sysroot=$std_folder/sysroot-$(rustc -vV | awk '/^release/ { release = $2 } /^commit-hash/ { hash = substr($2, 1, 9) } END { print release "-" hash }')
    [ -f "$sysroot/$std_target.complete" ] || build_std "$sysroot"
    exec 8>&-
    echo "std is in $sysroot"
    # With --target these are not the flags of build scripts.
    export RUSTFLAGS="${RUSTFLAGS:-} --sysroot $sysroot"
}

build_std() {
    local sysroot=$1 library
    library=$(rustc --print sysroot)/lib/rustlib/src/rust/library
    [ -f "$library/std/Cargo.toml" ] || { library=$std_folder/rust-src/library; library_sources "$library"; }
    local stub=$std_folder/stub libs=$sysroot/lib/rustlib/$std_target/lib
    rm -rf "$stub" "$libs"
    mkdir -p "$stub/src" "$libs"
    printf '[package]\nname = "stub"\nversion = "0.0.0"\nedition = "2024"\n[workspace]\n' >"$stub/Cargo.toml"
    echo '#![no_std]' >"$stub/src/lib.rs"
    # A stable cargo builds std when it is told that it is its own test.
    (cd "$stub" && RUSTC_BOOTSTRAP=1 __CARGO_TESTS_ONLY_SRC_ROOT=$library CARGO_TARGET_DIR=$stub/target \
        RUSTFLAGS=-Cembed-bitcode=yes cargo build --release --target "$std_target" \
        -Z build-std=std,panic_abort,panic_unwind,test,proc_macro)
    cp "$stub/target/$std_target/release/deps/"*.rlib "$libs/"
    rm -r "$libs"/libstub-*.rlib "$stub"
    touch "$sysroot/$std_target.complete"
}

# The sources of this compiler's library, from Debian's package of them.
library_sources() {
    local library=$1 version package sha256 otherwise
    otherwise="no std for $std_target: rustup target add $std_target, or rustup component add rust-src"
    version=$(rustc -vV | awk '/^release/ { print $2 }')
    case $version in
        1.95.0)
            package=pool/main/r/rustc/rust-src_1.95.0+dfsg1-2~bpo13+1_all.deb
            sha256=7b76db5b880a77f9e52975d2baa6209d2f76d2c9c2789515c3088cb960e2c83b
            ;;
        *) std_die "$otherwise" ;;
    esac
    [ -f "$library/std/Cargo.toml" ] && grep -qx "$version" "$library/../version" && return
    local helper=/usr/lib/apt/apt-helper mirror
    [ -x "$helper" ] || std_die "$otherwise"
    # The mirror and how it is reached are apt's own configuration.
    mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' | awk '$1 == "Debian" { print $2; exit }')
    [ -n "$mirror" ] || std_die "apt knows no mirror of Debian: rustup target add $std_target"
    "$helper" download-file "${mirror%/}/$package" "$std_folder/rust-src.deb" "SHA256:$sha256" \
        || std_die "the library's sources could not be fetched: rustup target add $std_target"
    rm -rf "${library%/*}"
    mkdir -p "${library%/*}"
    dpkg-deb --fsys-tarfile "$std_folder/rust-src.deb" \
        | tar -x -C "${library%/*}" --strip-components=4 "./usr/src/rustc-$version/library"
    rm "$std_folder/rust-src.deb"
    echo "$version" >"${library%/*}/version"
}
