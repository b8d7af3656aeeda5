#!/usr/bin/env bash
# What scripts/check.sh leaves: slow suites, and what needs tools of its own. A part runs only where its inputs have changed since
# it passed: scripts/verified/PART.tsv has a digest of them (sources, scripts, versions of tools) for each unit, which is a kernel or a
# test where the part works by kernel or test. Commit what a run writes there.
#
#   scripts/verify.sh [PART...]     all parts, or these; two run at a time
#   scripts/verify.sh --list        the parts, their units, and why each would run
#   scripts/verify.sh --fresh ...   every unit, changed or not
#   scripts/verify.sh --full ...    every unit, the slow suites whole (MLA_FULL=1): hours
#   scripts/verify.sh --prune       drops records of what is not there any more, which are a failure
#
# What a part says is in target/verify/PART.log, and here if it fails. On Debian and Ubuntu a part installs what it needs, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || scripts/apt.sh python3

source scripts/environment.sh
export MLA_REQUIRE_GPU=1 RUST_BACKTRACE=1
python3 scripts/verify/main.py "$@"
