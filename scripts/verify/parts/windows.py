"""The crate as a program for Windows under Wine: on the CPU, and on lavapipe through Wine's Vulkan and, with FXC, its D3D12."""

import os
import re
import tempfile
from pathlib import Path

import kernels
from part import RUSTC, Part, Passed, locked, run as run_command, tests_in, versions
from records import ROOT, files
from tree import tools as tree_tools

SCRIPT = "scripts/windows.sh"
# Devices, and the variants of the decode that each is asked for. Wine's D3D12 has no subgroups.
VARIANTS = {"cpu": ["portable", None], "vulkan": ["subgroup", "shared"], "dx12": ["shared"]}


def units():
    scripts = files(SCRIPT, "scripts/std.sh", "scripts/vendors/tree.sh", "scripts/vendors/dx12.sh", "scripts/verify/parts/windows.py")
    cpu = files("Cargo.toml", "src/cpu.rs", "src/cpu/**/*.rs", "src/base/**/*.rs", "src/cache/**/*.rs")
    wgpu = [*sorted({path for op in kernels.RUST for path in kernels.inputs_of(op)}), *locked("naga", "wgpu")]
    decode = [*scripts, *files("examples/decode/*.rs", "tests/cases/*")]
    return {
        **{f"{device}: case files": [*decode, *(cpu if device == "cpu" else wgpu)] for device in VARIANTS},
        "a wrong result": [*decode, *cpu, *files("scripts/wrong_case.py")],
        "files that are open": [*scripts, *files("src/gpu/disk_cache.rs", "src/gpu/disk_cache/*.rs")],
    }


def run(stale, _full, log):
    passed = {}
    for device, variants in VARIANTS.items():
        unit = f"{device}: case files"
        if unit in stale:
            runs = [run_command(log, SCRIPT, device, "decode", *(["--variant", variant] if variant else [])) for variant in variants]
            cases = [re.search(r"(\d+) PASS, 0 FAIL", said) for status, said in runs if status == 0]
            if len(cases) == len(variants) and all(cases):
                passed[unit] = Passed(sum(int(count[1]) for count in cases))
    if "a wrong result" in stale and wrong_results_fail(log):
        passed["a wrong result"] = Passed(len(VARIANTS))
    if "files that are open" in stale:
        status, said = run_command(log, SCRIPT, "cpu", "unit", "disk_cache")
        if status == 0 and "windows_refuses_to_replace_an_open_file ... ok" in said:
            passed["files that are open"] = Passed(tests_in(said))
    return passed


def wrong_results_fail(log):
    """Whether a case file with a wrong element fails on each device."""
    # Programs in the tree see the repository and the target folder only.
    with tempfile.TemporaryDirectory(dir=os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) as folder:
        wrong = Path(folder) / "wrong.safetensors"
        run_command(log, "python3", "scripts/wrong_case.py", ROOT / "tests/cases/decode_fp8_minicpm3_h40.safetensors", wrong)
        ran = [run_command(log, SCRIPT, device, "decode", wrong) for device in VARIANTS]
    return all(status == 1 and "0 PASS, 1 FAIL" in said for status, said in ran)


PART = Part("windows", "the crate as a program for Windows, under Wine", 15, units, run, lambda: versions(rustc=RUSTC) | tree_tools())
