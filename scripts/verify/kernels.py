"""Which files a WGSL kernel is made of, by op and by variant of a decode.

A kernel's text is composed in Rust from files that `include_str!` names, so the closure of these names over the Rust files that
compose an op's kernels is what it is made of. The Rust files count too: they choose, size and dispatch.
"""

import re

from records import ROOT, Failed, files

GPU = "src/gpu"
# What every kernel passes through.
COMMON = [f"{GPU}/{name}.rs" for name in ("caps", "device", "kernels", "kernels/compose", "kernels/unroll", "pipelines", "wanted")]
COMMON += ["src/ops/op.rs", "src/ops/variants.rs"]
DECODE = [*COMMON, f"{GPU}/decode.rs", f"{GPU}/decode/*.rs", f"{GPU}/kernels/decode.rs", "src/ops/decode.rs", "src/tables.rs"]


def small(op, *others):
    return [*COMMON, f"{GPU}/ops.rs", f"{GPU}/ops/table.rs", f"{GPU}/ops/{op}.rs", f"src/ops/{op}.rs", *(f"{GPU}/{name}.rs" for name in others)]


# By op: the Rust files that compose and dispatch its kernels.
RUST = {
    "decode_plain": [*DECODE, f"{GPU}/kernels/decode/plain.rs"],
    "decode_coop": [*DECODE, f"{GPU}/kernels/decode/coop.rs", f"{GPU}/kernels/decode/plain.rs"],
    "merge_attn_states": small("merge_attn_states"),
    "merge_states": small("merge_states"),
    "kv_append": small("kv_append", "ops/e4m3_scale"),
    "kv_copy_pages": small("kv_copy_pages"),
    "kv_gather": small("kv_gather", "ops/e4m3_scale"),
    "kv_calibrate": small("kv_calibrate"),
    "rope": small("rope"),
    "rope_append": small("rope_append", "ops/rope", "ops/kv_append", "ops/e4m3_scale"),
    "head_project": small("head_project", "kernels/project", "kernels/decode/coop", "kernels/decode/plain"),
    "mla_prefill": [*small("mla_prefill", "kernels/prefill", "kernels/prefill/*"), "src/ops/mla_prefill/*.rs"],
    "batch_tables": [*small("batch_tables"), "src/ops/batch_tables/*.rs"],
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
