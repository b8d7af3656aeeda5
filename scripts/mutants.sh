#!/usr/bin/env bash
# Breaks the code on purpose, and sees that a test fails: scripts/mutants/*.toml has the mutants, each with the test that must catch it.
#
#   scripts/mutants.sh [ID...]           all, or these; a mutant that lives, or that no test was run for, is a failure
#   scripts/mutants.sh --file FILE...    those of these files
#   scripts/mutants.sh --list            ids, files, what each stands for; runs nothing
#   scripts/mutants.sh --report FILE ... a line of FILE for each mutant that went as the table says
#
# One build serves all of them (scripts/mutants/run.py says how). Nothing is changed outside of target/mutants.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || scripts/apt.sh python3

source scripts/environment.sh
export MLA_REQUIRE_GPU=1
python3 scripts/mutants/run.py "$@"
