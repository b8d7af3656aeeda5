"""The files that a WGSL kernel depends on, by op.

Rust composes a kernel from files that `include_str!` names. So it depends on the Rust files that compose and dispatch an op's kernels,
and on all that these include.
"""

import re

from records import ROOT, Failed, files

GPU = "src/gpu"
# Inputs of every kernel.
COMMON = [f"{GPU}/{name}.rs" for name in ("caps", "device", "kernels", "kernels/compose", "kernels/formats", "kernels/unroll", "pipelines", "wanted")]
COMMON += ["src/ops/op.rs", "src/ops/op/*.rs", "src/ops/variants.rs", "src/ops/features.rs", "src/cache/*.rs"]
DECODE = [*COMMON, f"{GPU}/decode.rs", f"{GPU}/decode/*.rs", f"{GPU}/kernels/decode.rs", "src/ops/decode.rs", "src/plan/tables.rs"]


# What appends and projections count by; no op of its own.
GUARD = ["gpu/ops/guard", "gpu/kernels/guard", "ops/guard"]
# Further inputs of every small op: files of src/gpu, and patterns of src.
MORE = {
    "merge_state": ["gpu/ops/words"],
    "merge_states": ["gpu/ops/words"],
    "correct_attn_out": ["gpu/ops/words", "gpu/ops/merge_states"],
    "kv_append": ["gpu/ops/e4m3_scale", *GUARD],
    "kv_gather": ["gpu/ops/e4m3_scale"],
    "rope_append": ["gpu/ops/rope", "gpu/ops/kv_append", "gpu/ops/e4m3_scale", *GUARD],
    "head_project": ["gpu/kernels/project", "gpu/kernels/decode/coop", "gpu/kernels/decode/plain", *GUARD],
    "indexer_logits": ["gpu/kernels/indexer", "gpu/kernels/indexer/*", "ops/indexer_logits/*"],
    "mla_prefill": ["gpu/kernels/prefill", "gpu/kernels/prefill/*", "ops/mla_prefill/*"],
    "reorg_kvcache": ["plan/shares"],
    "batch_tables": ["ops/batch_tables/*", "plan/shares"],
    "top_k": ["gpu/kernels/top_k"],
    "indexer_append": ["gpu/ops/index_row", "ops/indexer"],
    "indexer_query": ["gpu/ops/index_row", "ops/indexer"],
}


def small(op):
    return [*COMMON, f"{GPU}/ops.rs", f"{GPU}/ops/single.rs", f"{GPU}/ops/table.rs", "src/ops/step_table.rs", f"{GPU}/ops/{op}.rs", f"src/ops/{op}.rs", *(f"src/{name}.rs" for name in MORE.get(op, []))]


# By op: the Rust files that compose and dispatch its kernels. A file of src/gpu/ops is an op if src/ops has one of the same name.
RUST = {
    "decode_plain": [*DECODE, f"{GPU}/kernels/decode/plain.rs"],
    "decode_coop": [*DECODE, f"{GPU}/kernels/decode/coop.rs", f"{GPU}/kernels/decode/plain.rs"],
    **{path.stem: small(path.stem) for path in sorted((ROOT / GPU / "ops").glob("*.rs")) if (ROOT / "src/ops" / path.name).exists() and path.stem != "guard"},
}


def included(path):
    """The files that a Rust file includes by `include_str!`, or by `lib!` of src/gpu/kernels/formats.rs."""
    text = (ROOT / path).read_text()
    names = re.findall(r'include_(?:str|bytes)!\(\s*"([^"]+\.wgsl)"', text)
    for libs in re.findall(r'\blib!\(([^)$]*)\)', text):
        names += [f"../../../shaders/lib/{name}.wgsl" for name in re.findall(r'"(\w+)"', libs)]
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
    """Shaders that no op depends on: a mistake in this table."""
    claimed = {path for op in RUST for path in inputs_of(op)}
    return [path for path in files("shaders/**/*.wgsl") if path not in claimed]


if __name__ == "__main__" and unclaimed():
    raise SystemExit(f"no op in scripts/verify/kernels.py has {' '.join(unclaimed())}")
