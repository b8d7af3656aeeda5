"""Each decode variant by each group of the conformance suite on this machine's adapter. scripts/check.sh runs representatives only.

A unit is an op; it runs again when its kernels or tests have changed. Host code is tested by scripts/check.sh."""

import re

import kernels
from part import Part, Passed, locked, run as run_command, version_of
from records import Failed, files

VARIANTS = ["coop", "coop_small", "subgroup", "shared"]
# Kernels and test files of each op; inputs of all tests are added.
SUITE = "tests/support/src/suite"
OPS = {
    "decode": (["decode_plain", "decode_coop"], [f"{SUITE}/decode.rs", f"{SUITE}/invariance.rs", f"{SUITE}/errors.rs", f"{SUITE}/ranks.rs", f"{SUITE}/slabs.rs", f"{SUITE}/sums.rs", "src/plan/slabs.rs", "src/shares.rs", "tests/it/matrix.rs", "tests/support/src/reference.rs"]),
    "merge_state": (["merge_state"], [f"{SUITE}/ops.rs"]),
    "merge_states": (["merge_states"], [f"{SUITE}/merge_states.rs", f"{SUITE}/sums.rs"]),
    "correct_attn_out": (["correct_attn_out"], [f"{SUITE}/correct_attn_out.rs", f"{SUITE}/merge_states.rs"]),
    "kv_append": (["kv_append"], [f"{SUITE}/ops.rs", f"{SUITE}/errors.rs"]),
    "kv_copy_pages": (["kv_copy_pages"], [f"{SUITE}/ops.rs"]),
    "kv_gather": (["kv_gather"], [f"{SUITE}/kv_gather.rs", "tests/support/src/reference/kv_gather.rs"]),
    "reorg_kvcache": (["reorg_kvcache"], [f"{SUITE}/reorg_kvcache.rs", "tests/support/src/reference/reorg_kvcache.rs"]),
    "kv_calibrate": (["kv_calibrate"], [f"{SUITE}/kv_calibrate.rs", "tests/support/src/reference/kv_calibrate.rs"]),
    "head_project": (["head_project"], [f"{SUITE}/project.rs", "tests/support/src/reference/project.rs"]),
    "mla_prefill": (["mla_prefill"], [f"{SUITE}/prefill.rs", f"{SUITE}/sums.rs", "tests/support/src/reference/prefill.rs"]),
    "rope": (["rope"], [f"{SUITE}/rope.rs", "tests/support/src/reference/rope.rs"]),
    "rope_append": (["rope_append"], [f"{SUITE}/rope.rs", "tests/support/src/reference/rope.rs"]),
    "slabs": (["kv_append", "kv_copy_pages", "kv_gather", "decode_plain", "decode_coop"], [f"{SUITE}/slabs.rs", f"{SUITE}/layer.rs", "src/plan/slabs.rs"]),
    "layer": (list(kernels.RUST), [f"{SUITE}/layer.rs", "tests/support/src/reference/layer.rs"]),
}
COMMON = [f"{SUITE}/mod.rs", f"{SUITE}/run.rs", f"{SUITE}/memory.rs", "tests/support/src/*.rs", "tests/it/harness.rs", "tests/it/conformance.rs"]
TEST = re.compile(r"^test (?:conformance::\w+::\w+::(\w+)|(matrix))::\S+\s+\.\.\. (ok|FAILED|ignored)", re.M)


def inputs(ops, more):
    """The files of some kernels and of their tests."""
    return sorted({path for op in ops for path in kernels.inputs_of(op)} | set(files(*COMMON, *more)))


def units():
    if kernels.unclaimed():
        raise Failed(f"no op in scripts/verify/kernels.py has {' '.join(kernels.unclaimed())}")
    own = [*files("scripts/verify/parts/lavapipe.py"), *locked("naga", "wgpu")]
    return {op: [*own, *inputs(*of)] for op, of in OPS.items()}


def filters(op, matrix):
    """Filters that match an op's tests."""
    names = [f"conformance::wgpu::{variant}::{op}::" for variant in VARIANTS] + [f"conformance::any_wgpu::shared::{op}::"]
    names += [f"conformance::wgpu::ranks::{op}::", f"conformance::wgpu_and_cpu::ranks::{op}::"]
    return names + ["matrix::"] if matrix and op == "decode" else names


def run(stale, full, log):
    ok, failed = {}, set()
    # With wgpu's run-time checks of indices and loops, then as they are shipped.
    for checks in ({"MLA_CHECKED_SHADERS": "1"}, {}):
        names = [text for op in stale for text in filters(op, bool(checks))]
        command = ["cargo", "test", "--locked", "--features", "cuda", "--test", "it", "--", *names]
        _, said = run_command(log, *command, env=checks | {"MLA_CASES": "product"}, minutes=600 if full else 60)
        seen = set()
        for op, matrix, how in TEST.findall(said):
            op = op or "decode"
            seen.add(op)
            ok[op] = ok.get(op, 0) + (how == "ok")
            if how == "FAILED":
                failed.add(op)
        # A test program that ended early does not report the tests that it left out.
        finished = re.search(r"^test result: ", said, re.M)
        failed |= set(stale) if not finished else set(stale) - seen
    return {op: Passed(ok[op]) for op in stale if op not in failed}


def tools():
    version = version_of(["dpkg-query", "-W", "-f", "${Version}", "mesa-vulkan-drivers"])
    return {"mesa": version} if version else {}


PART = Part("lavapipe", "each decode variant by each group of the conformance suite", 20, units, run, tools)
