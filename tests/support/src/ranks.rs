//! A decode cut into ranks: each rank's part of the cache in pages of its own, as context parallelism has it.

use wgpu_mla::{Dtype, MlaDecode, Result, Shares};

use super::paint::{POISON, Problem, Rng, Sees, WILD};

/// What a rank decodes: its own tokens, in their order, and the bounds of the whole. Its result is f32, for a merge.
///
/// The pool has at least as many pages as the whole's, so that problems of one spec stay problems of one spec.
///
/// # Errors
/// Those of [`Shares`].
pub fn cut(whole: &Problem, shares: &Shares, rank: u32) -> Result<Problem> {
    let seq_lens = shares.local_seq_lens(rank, &whole.seq_lens)?;
    let pages: Vec<usize> =
        seq_lens.iter().map(|&len| whole.spec.kv.pages_for(len as u32) as usize).collect();
    let mut kv = whole.spec.kv;
    kv.num_pages = kv.num_pages.max(pages.iter().sum::<usize>() as u32);
    let (page_size, row_bytes) =
        (kv.page_size as usize, whole.spec.shape.row_elems() as usize * kv.dtype.bytes());
    let mut free: Vec<i32> = (0..kv.num_pages as i32).collect();
    Rng(u64::from(rank) + 77).shuffle(&mut free);

    let max_pages = pages.iter().max().copied().unwrap_or(0) + 2;
    let mut block_table: Vec<i32> = (0..pages.len() * max_pages).map(|i| WILD[i % WILD.len()]).collect();
    let mut cache = vec![POISON; kv.num_slots() as usize * row_bytes];
    for (seq, &len) in seq_lens.iter().enumerate() {
        for block in 0..pages[seq] {
            block_table[seq * max_pages + block] = free.pop().expect("enough pages");
        }
        let slot = |table: &[i32], width: usize, token: usize| {
            table[seq * width + token / page_size] as usize * page_size + token % page_size
        };
        for local in 0..len {
            let token = shares.token(rank, local as u32)?;
            let from = slot(&whole.block_table, whole.max_pages, token as usize) * row_bytes;
            let to = slot(&block_table, max_pages, local as usize) * row_bytes;
            cache[to..to + row_bytes].copy_from_slice(&whole.kv[from..from + row_bytes]);
        }
    }
    Ok(Problem {
        name: format!("rank {rank} of {} by {}, {}", shares.world(), shares.interleave(), whole.name),
        spec: MlaDecode { kv, out: Dtype::F32, ..whole.spec },
        seq_lens,
        block_table,
        max_pages,
        sees: Sees::Bounds(bounds(whole, shares, rank)?),
        shared_prefixes: Vec::new(),
        kv: cache,
        ..whole.clone()
    })
}

/// What each query token sees of a rank's tokens.
fn bounds(whole: &Problem, shares: &Shares, rank: u32) -> Result<Vec<u32>> {
    if whole.sees == Sees::Causal {
        return shares.local_bounds(rank, &whole.seq_lens, &whole.query_start_loc);
    }
    // The mask's own bound in the whole, counted.
    let mut bounds = Vec::new();
    for (&len, ends) in whole.seq_lens.iter().zip(whole.query_start_loc.windows(2)) {
        for token in ends[0]..ends[1] {
            let visible = match &whole.sees {
                Sees::Bounds(bounds) => bounds[token as usize].into(),
                Sees::CausalFrom(first) => first.saturating_add(i64::from(token - ends[0])),
                Sees::Full | Sees::Causal => i64::from(len),
            };
            bounds.push(shares.local_len(rank, visible.clamp(0, len.into()) as u32)?);
        }
    }
    Ok(bounds)
}
