//! A decode cut into ranks: each rank's part of the cache in pages of its own, as context parallelism has it.

use wgpu_mla::{Dtype, MlaDecode, Result, Shares};

use super::paint::{POISON, Problem, Rng, Sees, WILD};

/// What a rank decodes: its own tokens, in their order, and the bounds of the whole. Its result is f32, for a merge.
///
/// The pool has at least as many pages as the whole's, so that problems of one spec stay problems of one spec.
///
/// # Errors
/// The errors of [`Shares`].
pub fn cut(whole: &Problem, shares: &Shares, rank: u32) -> Result<Problem> {
    let mut parts = Vec::new();
    for (sequence, len) in (0..).zip(shares.local_seq_lens(rank, &whole.seq_lens)?) {
        let tokens = (0..len as u32).map(|index| shares.token(rank, index)).collect::<Result<_>>()?;
        parts.push(Part { sequence, tokens });
    }
    let name = format!("rank {rank} of {} by {}", shares.world(), shares.interleave());
    // Where the mask is the usual one, the bounds are those that an engine would compute.
    let bounds = match whole.sees {
        Sees::Causal => shares.local_bounds(rank, &whole.seq_lens, &whole.query_start_loc)?,
        _ => bounds(whole, |visible| shares.local_len(rank, visible))?,
    };
    Ok(of_parts(whole, &name, &parts, bounds, u64::from(rank) + 77))
}

/// Each of a rank's blocks of `interleave` tokens as a sequence of its own, which all query tokens of its sequence attend: what a block
/// gives does not depend on which rank has it. With the problem come each part's sequence and block.
///
/// # Errors
/// The errors of [`Shares`].
pub fn cut_blocks(whole: &Problem, shares: &Shares, rank: u32) -> Result<(Problem, Vec<(usize, u32)>)> {
    let interleave = shares.interleave();
    let (mut parts, mut places, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, &len) in whole.seq_lens.iter().enumerate() {
        for block in 0..(len as u32).div_ceil(interleave) {
            let (begin, end) = (block * interleave, ((block + 1) * interleave).min(len as u32));
            if shares.owner(begin) != rank {
                continue;
            }
            let bounds = bounds(whole, |visible| Ok(visible.clamp(begin, end) - begin))?;
            let queries =
                whole.query_start_loc[sequence] as usize..whole.query_start_loc[sequence + 1] as usize;
            all.extend_from_slice(&bounds[queries]);
            parts.push(Part { sequence, tokens: (begin..end).collect() });
            places.push((sequence, block));
        }
    }
    let name = format!("blocks of rank {rank} of {}", shares.world());
    Ok((of_parts(whole, &name, &parts, all, u64::from(rank) + 99), places))
}

/// Tokens of one sequence of the whole.
struct Part {
    sequence: usize,
    tokens: Vec<u32>,
}

/// A problem whose sequences are parts of the whole's, each with all query tokens of its sequence, in pages drawn anew.
fn of_parts(whole: &Problem, name: &str, parts: &[Part], bounds: Vec<u32>, seed: u64) -> Problem {
    let mut kv = whole.spec.kv;
    let pages: Vec<usize> =
        parts.iter().map(|part| kv.pages_for(part.tokens.len() as u32) as usize).collect();
    kv.num_pages = kv.num_pages.max(pages.iter().sum::<usize>() as u32);
    let shape = whole.spec.shape;
    let (page_size, row_bytes) = (kv.page_size as usize, shape.row_elems() as usize * kv.dtype().bytes());
    let mut free: Vec<i32> = (0..kv.num_pages as i32).collect();
    Rng(seed).shuffle(&mut free);

    let max_pages = pages.iter().max().copied().unwrap_or(0) + 2;
    let mut block_table: Vec<i32> = (0..parts.len() * max_pages).map(|i| WILD[i % WILD.len()]).collect();
    let mut cache = vec![POISON; kv.num_slots() as usize * row_bytes];
    let slot = |table: &[i32], row: usize, width: usize, token: usize| {
        table[row * width + token / page_size] as usize * page_size + token % page_size
    };
    let query_bytes = (shape.num_heads * shape.row_elems()) as usize * whole.spec.query.bytes();
    let (mut q, mut query_start_loc) = (Vec::new(), vec![0]);
    for (row, part) in parts.iter().enumerate() {
        for block in 0..pages[row] {
            block_table[row * max_pages + block] = free.pop().expect("enough pages");
        }
        for (local, &token) in part.tokens.iter().enumerate() {
            let from = slot(&whole.block_table, part.sequence, whole.max_pages, token as usize) * row_bytes;
            let to = slot(&block_table, row, max_pages, local) * row_bytes;
            cache[to..to + row_bytes].copy_from_slice(&whole.kv[from..from + row_bytes]);
        }
        let [begin, end] = [0, 1].map(|i| whole.query_start_loc[part.sequence + i]);
        q.extend_from_slice(&whole.q[begin as usize * query_bytes..end as usize * query_bytes]);
        query_start_loc.push(query_start_loc[row] + end - begin);
    }
    Problem {
        name: format!("{name}, {}", whole.name),
        spec: MlaDecode { kv, out: Dtype::F32, ..whole.spec },
        seq_lens: parts.iter().map(|part| part.tokens.len() as i32).collect(),
        query_start_loc,
        block_table,
        max_pages,
        sees: Sees::Bounds(bounds),
        shared_prefixes: Vec::new(),
        q,
        kv: cache,
        ..whole.clone()
    }
}

/// What `of` makes of the keys that each query token of the whole sees.
fn bounds(whole: &Problem, of: impl Fn(u32) -> Result<u32>) -> Result<Vec<u32>> {
    let mut bounds = Vec::new();
    for (&len, ends) in whole.seq_lens.iter().zip(whole.query_start_loc.windows(2)) {
        for token in ends[0]..ends[1] {
            let i = i64::from(token - ends[0]);
            let visible = match &whole.sees {
                Sees::Bounds(bounds) => bounds[token as usize].into(),
                Sees::CausalFrom(first) => first.saturating_add(i),
                Sees::Full => i64::from(len),
                Sees::Causal => i64::from(len) - i64::from(ends[1] - ends[0]) + i + 1,
            };
            bounds.push(of(visible.clamp(0, len.into()) as u32)?);
        }
    }
    Ok(bounds)
}
