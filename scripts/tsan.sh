#!/usr/bin/env bash
# The CPU backend's thread pool (src/cpu/pool.rs) under ThreadSanitizer, on pthread's locks in place of std's: std would have to be built
# with it, from sources that a stable toolchain need not have. A program with a race must be told first. Linux on x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp scripts/tsan/*.rs "$work"
sed -e 's/^use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};$/use crate::posix::{Condvar, Mutex, MutexGuard};\nuse std::sync::{Arc, PoisonError};/' \
    -e 's/pub(super) fn/pub fn/' -e '/^#\[cfg(test)\]/,$d' src/cpu/pool.rs > "$work/pool.rs"
grep -q 'use crate::posix' "$work/pool.rs" || { echo "tsan.sh: src/cpu/pool.rs names its locks in another way" >&2; exit 1; }
# The option is a nightly one; all that it needs comes with the stable toolchain.
RUSTC_BOOTSTRAP=1 rustc --edition 2024 -O -g -Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer -Adead_code \
    --target x86_64-unknown-linux-gnu -o "$work/pool" "$work/main.rs"
# The drop of an Arc orders its threads by a fence, which the tool does not know.
echo 'race:<alloc::sync::Arc<*>>::drop_slow
race:<alloc::sync::Arc<*> as core::ops::drop::Drop>::drop' > "$work/suppressions"
export TSAN_OPTIONS="halt_on_error=1 exitcode=66 suppressions=$work/suppressions"
if "$work/pool" racy > "$work/said" 2>&1 || ! grep -q 'data race' "$work/said"; then
    cat "$work/said" >&2
    echo "tsan.sh: a race was not found" >&2
    exit 1
fi
"$work/pool"
echo "tsan.sh: no race"
