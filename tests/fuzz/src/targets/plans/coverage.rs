//! What a plan covers: each query row attends each key that it sees once.

use std::collections::HashMap;

use wgpu_mla::{Batch, Dtype, KvSpec, Mask, MlaDecode, MlaShape, Plan, SplitPolicy, Tiling};

use crate::Verdict;
use crate::source::Source;

/// Rows of items past which a plan is not looked at.
const MOST_ROWS: u64 = 1 << 18;

/// # Panics
/// Where a key is attended twice, or not at all.
pub fn check(plan: &Plan, spec: &MlaDecode, batch: &Batch<'_>) {
    let parts: Vec<&Plan> = if plan.slabs().is_empty() {
        vec![plan]
    } else {
        plan.slabs().iter().map(|slab| slab.plan()).collect()
    };
    let rows: u64 = parts.iter().flat_map(|part| &part.items).map(|item| u64::from(item.num_rows)).sum();
    if rows > MOST_ROWS {
        return;
    }
    let heads = spec.shape.num_heads;
    let mut seen: HashMap<(u32, u32), u64> = HashMap::new();
    for part in parts {
        for item in &part.items {
            for row in item.first_row..item.first_row + item.num_rows {
                let query = part.queries[(row / heads) as usize];
                let keys = query.visible.min(item.kv_end).saturating_sub(item.kv_begin);
                *seen.entry((query.token, row % heads)).or_default() += u64::from(keys);
            }
        }
    }
    for (seq, &len) in batch.seq_lens.iter().enumerate() {
        let (first, last) = (batch.query_start_loc[seq], batch.query_start_loc[seq + 1]);
        for token in first..last {
            let len = i64::from(len);
            let i = i64::from(token - first);
            let visible = match batch.mask {
                Mask::Causal => len - i64::from(last - first) + i + 1,
                Mask::CausalFrom(from) => from.saturating_add(i).min(len),
                Mask::Full => len,
                Mask::Bounds(bounds) => bounds[token as usize].into(),
            };
            for head in 0..heads {
                let got = seen.get(&(token as u32, head)).copied().unwrap_or(0);
                assert_eq!(
                    got,
                    visible.max(0) as u64,
                    "keys of token {token}, head {head}: {spec:?} {batch:?}"
                );
            }
        }
    }
}

/// A batch of any size, which is planned and not run.
pub fn large(source: &mut Source<'_>) -> Verdict {
    let number =
        |source: &mut Source<'_>| if source.chance(32) { source.hostile() } else { source.between(1, 256) };
    let kv_lora_rank = 512;
    let shape = MlaShape { num_heads: source.between(1, 128), kv_lora_rank, qk_rope_head_dim: 64 };
    let page_size = number(source);
    let num_pages = match source.below(3) {
        0 => source.hostile(),
        _ => ((1u32 << 31) - 1) / page_size.max(1),
    };
    let kv = KvSpec { layout: Dtype::Bf16.into(), page_size, num_pages };
    let spec = MlaDecode { shape, kv, query: Dtype::Bf16, out: Dtype::Bf16 };
    let (mut lens, mut q_lens) = (Vec::new(), Vec::new());
    for _ in 0..source.below(20) {
        lens.push(if source.chance(128) {
            source.hostile() as i32
        } else {
            source.between(0, 1 << 20) as i32
        });
        q_lens.push(if source.chance(16) { source.hostile() } else { source.between(0, 300) });
    }
    let Ok(starts) = wgpu_mla::query_start_loc(&q_lens) else { return Verdict::Refused };
    let any =
        |source: &mut Source<'_>| if source.chance(128) { source.hostile() } else { source.between(0, 4096) };
    let tiling = Tiling {
        rows_per_tile: any(source),
        tokens_per_block: any(source),
        target_items: any(source),
        min_split_tokens: any(source),
        single_sequence_items: any(source),
        item_overhead_tokens: any(source),
    };
    let (split, first) = (any(source), i64::from(source.hostile()) - (1 << 31));
    let policy = source.pick(&[SplitPolicy::Auto, SplitPolicy::FixedTokens(split), SplitPolicy::OneSplit]);
    let mask = source.pick(&[Mask::Causal, Mask::Full, Mask::CausalFrom(first)]);
    let batch = Batch { mask, ..Batch::new(&lens, &starts) };
    match Plan::new(&spec, &tiling, &batch, policy) {
        Ok(plan) => {
            check(&plan, &spec, &batch);
            Verdict::Ran
        }
        Err(_) => Verdict::Refused,
    }
}
