#!/usr/bin/env bash
# For RUSTC_WORKSPACE_WRAPPER: compiles the workspace's packages with LLVM's counters of branches, which stable Rust passes on. What the
# workspace depends on is built as for tests. Build scripts and macros run without the counters' reader, so they get none.
set -euo pipefail
rustc=$1; shift
case " $* " in
*" --crate-name build_script_"* | *" --crate-type proc-macro "* | *" --crate-name ___ "* | *" -vV "*) exec "$rustc" "$@" ;;
esac
exec "$rustc" "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
