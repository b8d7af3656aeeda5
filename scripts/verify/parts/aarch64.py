"""The CPU backend as a program for aarch64, in qemu's user mode: kernels with NEON, and the portable ones where those are forced off."""

import re
import tempfile
from pathlib import Path

from part import RUSTC, Part, Passed, run as run_command, tests_in, versions
from records import ROOT, files

SCRIPT = "scripts/aarch64.sh"
KERNELS = ["Cargo.toml", "src/cpu/kernels.rs", "src/cpu/kernels/*.rs"]
HOST = ["src/cpu.rs", "src/cpu/**/*.rs", "src/base.rs", "src/base/**/*.rs", "src/cache.rs", "src/cache/**/*.rs"]
SUITE = ["tests/it/conformance.rs", "tests/it/harness.rs", "tests/support/src/*.rs", "tests/support/src/paint/*.rs"]
SUITE += ["tests/support/src/reference/*.rs", "tests/support/src/suite/*.rs"]

# Variants, by what their tests are called: `neon` is the best there is, and `portable` what is left where it is forced off.
VARIANTS = {"neon": "best", "portable": "portable"}
# The groups of the conformance suite that reach each path of the kernels: dims and dtypes, shapes of tiles, rows that see few keys, sums that
# move to f64, and what is not finite. scripts/check.sh runs all, without an emulator.
GROUPS = ["decode::" + group for group in (
    "case_files", "dtypes_of_512_0", "dtypes_of_256_32", "heads", "varlen", "lengths", "masks", "hard_data", "rising_logits", "empty_batches",
    "bits_of_tile_mates", "non_finite", "huge_logits", "equal_large_logits", "rising_sums", "record_decodes", "lists_of_records", "sinks",
)]
GROUPS += ["mla_prefill::prefill_shapes", "mla_prefill::prefill_hard_data"]
# What no variant changes runs once.
ONCE = ["kv_append::", "kv_gather::", "merge_state::", "correct_attn_out::", "rope_append::rotated", "head_project::projected_codes"]

DECODES = {f"case files, {variant}": variant for variant in VARIANTS}
SUITES = {f"suite, {variant}": variant for variant in VARIANTS}


def units():
    scripts = files(SCRIPT, "scripts/std.sh", "scripts/verify/parts/aarch64.py")
    decode = [*scripts, *files("Cargo.toml", *HOST, "examples/decode/*.rs", "tests/cases/*")]
    return {
        "inner loops": [*scripts, *files(*KERNELS, "scripts/aarch64/loops.py")],
        "unit tests": [*scripts, *files("Cargo.toml", *HOST)],
        "a wrong result": [*decode, *files("scripts/wrong_case.py")],
        **{unit: decode for unit in DECODES},
        **{unit: [*scripts, *files("Cargo.toml", *HOST, *SUITE)] for unit in SUITES},
    }


def run(stale, _full, log):
    passed = {}
    if "inner loops" in stale:
        status, said = run_command(log, SCRIPT, "loops")
        held = re.search(r"^loops: (\d+) loops passed", said, re.M)
        if status == 0 and held:
            passed["inner loops"] = Passed(int(held[1]))
    if "unit tests" in stale:
        status, said = run_command(log, SCRIPT, "unit", "cpu::", "base::", "cache::")
        if status == 0 and re.search(r"^test cpu::kernels::neon::\S+ \.\.\. ok$", said, re.M):
            passed["unit tests"] = Passed(tests_in(said))
    for unit, variant in DECODES.items():
        if unit in stale:
            status, said = run_command(log, SCRIPT, "decode", "--variant", variant)
            cases = re.search(r"(\d+) PASS, 0 FAIL", said)
            if status == 0 and cases:
                passed[unit] = Passed(int(cases[1]))
    if "a wrong result" in stale and wrong_results_fail(log):
        passed["a wrong result"] = Passed(len(VARIANTS))
    for unit, variant in SUITES.items():
        if unit in stale:
            tests = [f"conformance::cpu::{VARIANTS[variant]}::{group}" for group in [*GROUPS, *(ONCE if variant == "neon" else [])]]
            status, said = run_command(log, SCRIPT, "it", *tests)
            if status == 0:
                passed[unit] = Passed(tests_in(said))
    return passed


def wrong_results_fail(log):
    """Whether a case file with a wrong element fails on each variant."""
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong.safetensors"
        run_command(log, "python3", "scripts/wrong_case.py", ROOT / "tests/cases/decode_fp8_minicpm3_h40.safetensors", wrong)
        ran = [run_command(log, SCRIPT, "decode", "--variant", variant, wrong) for variant in VARIANTS]
    return all(status == 1 and "0 PASS, 1 FAIL" in said for status, said in ran)


PART = Part("aarch64", "the CPU backend as a program for aarch64, in qemu", 15, units, run, lambda: versions(rustc=RUSTC, qemu=["qemu-aarch64", "--version"]))
