"""Which files a WGSL kernel is made of, by op and by variant of a decode.

A kernel's text is composed in Rust from files that `include_str!` names, so the closure of these names over the Rust files that
compose an op's kernels is what it is made of. The Rust files count too: they choose, size and dispatch.
"""

import re

from records import ROOT, Failed, files

# What every kernel passes through.
COMMON = ["src/caps.rs", "src/compose.rs", "src/unroll.rs", "src/gpu/pipelines.rs", "src/gpu/wanted.rs"]
SMALL = [*COMMON, "src/gpu/ops/mod.rs", "src/gpu/ops/args.rs", "src/gpu/ops/table.rs"]
DECODE = [*COMMON, "src/kernel.rs", "src/gpu/decode.rs", "src/gpu/step.rs", "src/gpu/binding.rs", "src/tables.rs"]

# By op: the Rust files that compose and dispatch its kernels.
RUST = {
    "decode_plain": [*DECODE, "src/kernel/plain.rs"],
    "decode_coop": [*DECODE, "src/kernel/coop.rs", "src/kernel/plain.rs"],
    "merge_attn_states": [*SMALL, "src/gpu/ops/merge_attn_states.rs"],
    "merge_states": [*SMALL, "src/gpu/ops/merge_states.rs"],
    "kv_append": [*SMALL, "src/gpu/ops/kv_append.rs", "src/gpu/ops/e4m3_scale.rs"],
    "kv_copy_pages": [*SMALL, "src/gpu/ops/kv_copy_pages.rs"],
    "kv_gather": [*SMALL, "src/gpu/ops/kv_gather.rs", "src/gpu/ops/e4m3_scale.rs"],
    "kv_calibrate": [*SMALL, "src/gpu/ops/kv_calibrate.rs"],
    "rope": [*SMALL, "src/gpu/ops/rope.rs"],
    "rope_append": [*SMALL, "src/gpu/ops/rope_append.rs", "src/gpu/ops/rope.rs", "src/gpu/ops/kv_append.rs", "src/gpu/ops/e4m3_scale.rs"],
    "head_project": [*SMALL, "src/gpu/ops/head_project.rs", "src/kernel/project.rs", "src/kernel/coop.rs", "src/kernel/plain.rs"],
    "mla_prefill": [*SMALL, "src/gpu/ops/prefill.rs", "src/gpu/ops/prefill/*.rs"],
    "batch_tables": [*SMALL, "src/gpu/ops/batch_tables.rs"],
}


def included(path):
    """The files that a Rust file puts into the program."""
    text = (ROOT / path).read_text()
    names = re.findall(r'include_(?:str|bytes)!\(\s*"([^"]+\.wgsl)"', text)
    found = []
    for name in names:
        target = ((ROOT / path).parent / name).resolve()
        if not target.exists():
            raise Failed(f"{path} includes {name}, which is not there")
        found.append(target.relative_to(ROOT).as_posix())
    return found


def inputs_of(op):
    """The files that an op's kernels are made of: shaders, and the Rust files that compose them."""
    rust = files(*RUST[op])
    return sorted({*rust, *(shader for path in rust for shader in included(path))})


def unclaimed():
    """Shaders that are of no op: a mistake in this table."""
    claimed = {path for op in RUST for path in inputs_of(op)}
    return [path for path in files("shaders/**/*.wgsl") if path not in claimed]
