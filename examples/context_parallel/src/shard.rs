//! A rank's part of a batch: its own tokens in pages of its own. A serving engine appends only these in the first place; here they are
//! copied from the whole.

use mla_support::paint::{POISON, Problem, Sees};
use wgpu_mla::{KvSpec, Shares};

use crate::{Result, text};

/// The part of a rank, as a problem of its own: the same queries, its own tokens, and a bound of them for each query token.
///
/// # Errors
/// A batch that is none.
pub fn of(whole: &Problem, shares: &Shares, rank: u32) -> Result<Problem> {
    let KvSpec { dtype, page_size, .. } = whole.spec.kv;
    let seq_lens = shares.local_seq_lens(rank, &whole.seq_lens).map_err(text)?;
    let row_bytes = whole.spec.shape.row_elems() as usize * dtype.bytes();
    let page_size = page_size as usize;
    let pages: Vec<usize> = seq_lens.iter().map(|&len| (len as usize).div_ceil(page_size)).collect();
    let (used, max_pages) = (pages.iter().sum::<usize>(), pages.iter().copied().max().unwrap_or(0));
    let num_pages = (used + 1).next_multiple_of(16);
    let mut kv = vec![POISON; num_pages * page_size * row_bytes];
    let mut block_table = vec![-1; seq_lens.len() * max_pages];
    // Backwards, so that pages are not where a mistake would find them.
    let mut free = (0..num_pages).rev();
    for (seq, &len) in seq_lens.iter().enumerate() {
        let row = &mut block_table[seq * max_pages..][..pages[seq]];
        row.iter_mut().zip(&mut free).for_each(|(entry, page)| *entry = page as i32);
        for index in 0..len as u32 {
            let token = shares.token(rank, index).map_err(text)?;
            let from = slot(&whole.block_table[seq * whole.max_pages..], token as usize, page_size);
            let to = slot(&block_table[seq * max_pages..], index as usize, page_size);
            kv[to * row_bytes..][..row_bytes].copy_from_slice(&whole.kv[from * row_bytes..][..row_bytes]);
        }
    }
    let sees = match whole.sees {
        Sees::Full => Sees::Full,
        _ => {
            let bounds = shares.local_bounds(rank, &whole.seq_lens, &whole.query_start_loc);
            Sees::Bounds(bounds.map_err(text)?)
        }
    };
    let mut spec = whole.spec;
    spec.kv.num_pages = num_pages as u32;
    Ok(Problem { spec, seq_lens, block_table, max_pages, sees, shared_prefixes: Vec::new(), kv, ..whole.clone() })
}

fn slot(table: &[i32], token: usize, page_size: usize) -> usize {
    table[token / page_size] as usize * page_size + token % page_size
}

/// Bytes of the cache that a decode of this batch reads, once.
#[must_use]
pub fn bytes_read(part: &Problem) -> u64 {
    let row = u64::from(part.spec.shape.row_elems()) * part.spec.kv.dtype.bytes() as u64;
    let queried = part.seq_lens.iter().zip(part.query_start_loc.windows(2)).filter(|(_, q)| q[1] > q[0]);
    queried.map(|(&len, _)| len.max(0) as u64 * row).sum()
}
