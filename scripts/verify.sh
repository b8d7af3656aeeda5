#!/usr/bin/env bash
# The slow suites, and those that need more tools than scripts/check.sh. A part is made of units, such as a kernel or a test. A unit
# runs only if its inputs have changed since it passed: scripts/verified/PART.tsv has a digest of them (sources, scripts, versions of
# tools). Commit what a run writes there.
#
#   scripts/verify.sh [PART...]     all parts, or these; two run at a time
#   scripts/verify.sh --list        the parts, their units, and why each would run
#   scripts/verify.sh --fresh ...   every unit, changed or not
#   scripts/verify.sh --full ...    every unit, the slow suites whole (MLA_FULL=1): hours
#   scripts/verify.sh --prune       drops records of units that no longer exist, which are a failure
#
# The output of a part is in target/verify/PART.log, and here if it fails. On Debian and Ubuntu a part installs what it needs, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || scripts/apt.sh python3

source scripts/environment.sh
export MLA_REQUIRE_GPU=1 RUST_BACKTRACE=1
python3 scripts/verify/main.py "$@"
