"""Each decode variant by each group of the conformance suite on this machine's adapter. scripts/check.sh runs representatives only.

A unit is an op; it runs again when its kernels or tests have changed. Host code is tested by scripts/check.sh."""

import re

import kernels
from part import Part, Passed, locked, run as run_command, version_of
from records import ROOT, Failed, files

VARIANTS = re.findall(r'"(\w+)"', re.search(r"WGPU_VARIANTS: .* = (\[.*\]);", (ROOT / "tests/it/conformance.rs").read_text())[1])
SUITE = "tests/support/src/suite"
# Groups of the suite that are of no op of `kernels.RUST`, by their kernels; and files that a group's modules use beside what is common.
KERNELS = {
    "decode": ["decode_plain", "decode_coop"],
    "slabs": ["kv_append", "kv_copy_pages", "kv_gather", "decode_plain", "decode_coop"],
    "layer": list(kernels.RUST),
}
MORE = {
    "decode": ["src/plan/slabs.rs", "src/plan/shares.rs", "tests/it/matrix.rs"],
    "correct_attn_out": [f"{SUITE}/merge_states.rs"],
    "slabs": [f"{SUITE}/layer_rig.rs", "src/plan/slabs.rs"],
    "layer": [f"{SUITE}/layer_rig.rs"],
    "indexer_append": [f"{SUITE}/rope.rs", "tests/support/src/reference/indexer.rs"],
    "indexer_query": [f"{SUITE}/rope.rs", f"{SUITE}/indexer_append.rs", "tests/support/src/reference/indexer.rs"],
}
# A line of `groups` in the suite's mod.rs: an op, and the module of its tests.
GROUP = re.compile(r'^ *"(\w+)" (?:true|false): (\w+) \{', re.M)


def ops():
    """Kernels and test files of each op that the suite tests and that has kernels here; inputs of all tests are added."""
    modules = {}
    for op, module in GROUP.findall((ROOT / SUITE / "mod.rs").read_text()):
        modules.setdefault(op, []).append(module)
    made = {op: KERNELS.get(op, [op]) for op in modules if op in KERNELS or op in kernels.RUST}

    def tests(op):
        # Not every module has an oracle of its own.
        oracles = [f"tests/support/src/reference/{module}.rs" for module in modules[op]]
        return [f"{SUITE}/{module}.rs" for module in modules[op]] + [path for path in oracles if (ROOT / path).exists()]

    return {op: (of, tests(op) + MORE.get(op, [])) for op, of in made.items()}


COMMON = [f"{SUITE}/mod.rs", f"{SUITE}/run.rs", f"{SUITE}/lists.rs", f"{SUITE}/memory.rs", "tests/support/src/*.rs", "tests/support/src/paint/*.rs", "tests/it/harness.rs", "tests/it/conformance.rs"]
TEST = re.compile(r"^test (?:conformance::\w+::\w+::(\w+)|(matrix))::\S+\s+\.\.\. (ok|FAILED|ignored)", re.M)


def inputs(ops, more):
    """The files of some kernels and of their tests."""
    return sorted({path for op in ops for path in kernels.inputs_of(op)} | set(files(*COMMON, *more)))


def units():
    if kernels.unclaimed():
        raise Failed(f"no op in scripts/verify/kernels.py has {' '.join(kernels.unclaimed())}")
    own = [*files("scripts/verify/parts/lavapipe.py"), *locked("naga", "wgpu")]
    return {op: [*own, *inputs(*of)] for op, of in ops().items()}


def filters(op, matrix):
    """Filters that match an op's tests."""
    names = [f"conformance::wgpu::{variant}::{op}::" for variant in VARIANTS] + [f"conformance::direct_wgpu::shared::{op}::"]
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
