"""The CUDA backend's tests without a card: on the emulated driver (tests/cuda_driver), whose kernels run in the interpreter."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

from part import RUSTC, Part, Passed, must, run as run_command, tests_in, versions
from records import ROOT, files

# The variants of the decode; a card with less shared memory than a data center's, which multiplies FP8 by mma.sync, gets some of them.
VARIANTS = re.findall(r'variant!\("(\w+)"', (ROOT / "src/cuda/decode/variants.rs").read_text())
OF_SMALL_CARDS = [variant for variant in VARIANTS if variant.endswith("_small") or "_fp8_" in variant]
BEST, BOTH_ORDERS = "conformance::cuda::best::", {"MLA_EMULATED_ORDERS": "both"}


def decodes(variant, *tests):
    return [f"conformance::cuda::{variant}::decode::{test}" for test in tests]


# A unit's tests by parts of their names, and variables of tests/cuda_driver. The whole suite would take hours: these are each op's shapes
# and bytes, of each kernel of the decode what reaches most of its paths, and graphs.
UNITS = {
    "caches": ([BEST + op for op in ("kv_append", "kv_copy_pages", "kv_gather", "kv_calibrate", "reorg_kvcache")], BOTH_ORDERS),
    "merges": ([BEST + op for op in ("merge_state::", "correct_attn_out", "merge_states::state_merges")], BOTH_ORDERS),
    "rope": ([BEST + "rope"], BOTH_ORDERS),
    "indexer rows": ([BEST + "indexer_append", BEST + "indexer_query"], BOTH_ORDERS),
    "projections": ([BEST + "head_project", "cuda::projections::what_is_not_finite", "cuda::projections::variants_hold"], {}),
    "prefill": ([BEST + "mla_prefill::prefill_" + test for test in ("shapes", "hard_data", "repeated_rows", "errors")], {}),
    "index logits": ([BEST + "indexer_logits"], {}),
    "lists and records": ([BEST + "decode::" + test for test in ("replayed_lists", "lists_of_records", "record_decodes")], {}),
    "top_k": ([BEST + "top_k"], BOTH_ORDERS),
    "batch tables": (["batch_tables::on_cuda"], {}),
    "graphs": (["cuda::stale", "cuda::ops", "cuda::decodes", "cuda::devices_are_made", "cuda::no_card", "cuda::a_driver", "cuda::memory"], {}),
    "contexts": (["cuda::host::another", "cuda::host::uploads"], {"MLA_EMULATED_CARDS": "2"}),
    "wrong use": ([BEST + "every_op", BEST + "context_parallel", BEST + "slabs::ops_in_slabs", BEST + "slabs::refuses", BEST + "decode::refuses", "limits::inputs_that_are_too_large_for_cuda"], {}),
    **{
        f"decode: {variant}": (decodes(variant, "dtypes_of_256_32", "dtypes_of_512_64", "empty_batches"), {})
        for variant in VARIANTS
        if variant not in OF_SMALL_CARDS
    },
    **{
        f"decode: {variant}, a small card": (decodes(variant, "dtypes_of_256_32", "dtypes_of_512_64"), {"MLA_EMULATED_CAPABILITY": "120"})
        for variant in OF_SMALL_CARDS
    },
}


def units():
    inputs = files(
        "Cargo.lock", "src/*.rs", "src/base/**/*.rs", "src/cache/**/*.rs", "src/cuda/**/*.rs", "src/ops/**/*.rs", "src/plan/**/*.rs", "shaders/cuda/**/*.rs", "shaders/cuda/ptx/*",
        "tests/support/**/*.rs", "tests/it/*.rs", "tests/it/batch_tables/*.rs", "tests/it/cuda/*.rs", "tests/cuda_driver/**/*", "scripts/ptxemu/*.py",
        "scripts/ptx.sh", "scripts/verify/parts/cuda.py",
    )
    return {name: inputs for name in UNITS}


def run(stale, _full, log):
    must(log, "scripts/ptx.sh", "suite", "--no-run")

    def one(name):
        tests, env = UNITS[name]
        with open(os.devnull, "w") as quiet:
            return name, *run_command(quiet, "scripts/ptx.sh", "suite", *tests, env=env, minutes=30)

    passed = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, status, said in pool.map(one, stale):
            log.write(f"\n== {name}\n{said}")
            log.flush()
            if status == 0 and tests_in(said):
                passed[name] = Passed(tests_in(said))
    return passed


PART = Part("cuda", "the CUDA backend's tests, on an emulated card", 15, units, run, lambda: versions(rustc=RUSTC))
