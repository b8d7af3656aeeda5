//! Cases of sparse decodes: each query token attends a list of slots.

use mla_support::case::{Saved, SparseCase};
use wgpu_mla::{
    Capacity, Device, Dtype, Indices, MlaDecodeArgs, PageTable, Plan, Result, SparseBatch, SplitPolicy, View,
};

use crate::check::{self, dtypes};
use crate::run::{Ran, Runner, poisoned, time, upload};

pub fn run(runner: &mut Runner<'_>, case: &SparseCase) -> Result<Ran> {
    let (backend, spec, topk) = (runner.backend, &case.spec, case.lists.topk as u32);
    let decode = runner.decode_with(spec, topk, case.attn_sink.is_some())?;
    let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
    let tokens = case.lse.len() / heads;
    let batch = SparseBatch::new(tokens as u32, topk);
    let plan = Plan::sparse(spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
    let mut step = decode.step(Capacity::of(&plan))?;
    decode.prepare(&mut step, (&plan, PageTable::Indices))?;

    let words = |words: &[i32]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        upload(backend, &bytes)
    };
    let (q, kv) = (upload(backend, &case.q)?, upload(backend, &case.kv_cache)?);
    let slots = words(&case.lists.slots)?;
    let lengths = case.lists.topk_length.as_ref().map(|lengths| words(lengths)).transpose()?;
    let (out, lse) = (poisoned(backend, case.out.len() * 4)?, poisoned(backend, case.lse.len() * 4)?);
    let layer = MlaDecodeArgs {
        k_scale: case.k_scale,
        q_scale: case.q_scale,
        indices: Some(Indices {
            topk_length: lengths.as_ref().map(|lengths| View::dense(lengths, 1, 1)),
            ..Indices::dense(&slots, topk)
        }),
        attn_sink: case.attn_sink.clone(),
        ..MlaDecodeArgs::dense(spec, &q, &kv, &out, &lse, case.softmax_scale)
    };
    let binding = decode.bind(&layer, plan.num_queries)?;
    let seconds = time(backend, || decode.run(&step, &binding))?;

    let out = Dtype::F32.decode_all(&backend.download(&out, case.out.len() as u64 * 4)?);
    let lse = Dtype::F32.decode_all(&backend.download(&lse, case.lse.len() as u64 * 4)?);
    let verdict = check::sparse(case, decode.rounds_weights(), &out, &lse);
    let computed =
        vec![Saved::f32s("out", &[tokens, heads, latent], &out), Saved::f32s("lse", &[tokens, heads], &lse)];
    Ok(Ran { seconds, variant: decode.variant(), verdict, computed })
}

pub fn shape(case: &SparseCase) -> String {
    let (shape, kv) = (case.spec.shape, case.spec.kv);
    let (heads, latent, rope) = (shape.num_heads, shape.kv_lora_rank, shape.qk_rope_head_dim);
    let tokens = case.lse.len() / heads as usize;
    let sink = if case.attn_sink.is_some() { " sink" } else { "" };
    let types = dtypes(case.spec.query, kv.layout);
    format!("q{tokens} H{heads} {latent}+{rope} topk {} page {} {types}{sink}", case.lists.topk, kv.page_size)
}

/// Tokens of the cache that lists name, as often as they do.
pub fn bytes(case: &SparseCase) -> u64 {
    let kv = case.spec.kv;
    case.lists.named(kv.num_slots() as usize).count() as u64 * kv.token(&case.spec.shape).bytes
}
