"""Every WGSL kernel through the compilers of other vendors' GPUs. A unit is an op."""

import os
import re
from pathlib import Path

import kernels
from part import Part, Passed, locked, must
from records import ROOT, Failed, files
from tree import tools

# Filters that match an op's pipelines in `examples/pipelines --list`.
FILTERS = {op: f"any {op} " for op in kernels.RUST} | {
    "decode_plain": " subgroup q_, shared q_, any mla_merge ",
    "decode_coop": " coop q_, coop_small q_",
    "mla_prefill": " mla_prefill ",
    "indexer_logits": " indexer_logits ",
}
LOGS = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "vendors"


def units():
    scripts = [*files("scripts/vendors.sh", "scripts/vendors/*", "src/gpu/kernels/tests/dx12.rs", "examples/pipelines.rs", "scripts/verify/parts/vendors.py"), *locked("naga", "wgpu")]
    return {op: [*scripts, *kernels.inputs_of(op)] for op in kernels.RUST}


def run(stale, full, log):
    only = {"ONLY": ",".join(FILTERS[op] for op in stale)} if len(stale) < len(kernels.RUST) else {}
    must(log, "scripts/vendors.sh", *(["--full"] if full else []), "compile", "all", env=only, minutes=600 if full else 60)
    compiled = [name for path in LOGS.glob("*.out") for name in re.findall(r"^ *[\d.]+ ms  (.*)$", path.read_text(), re.M)]
    compiled += [line.split("\t")[4] for line in (LOGS / "hlsl/list.tsv").read_text().splitlines()]
    passed = {op: Passed(sum(any(text in name for text in FILTERS[op].split(",")) for name in compiled)) for op in stale}
    if not compiled:
        raise Failed("nothing was compiled")
    return passed


PART = Part("vendors", "every WGSL kernel through the compilers of five GPU vendors, and Microsoft's", 15, units, run, tools)
