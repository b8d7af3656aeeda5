//! `top_k`, by a sort of all that counts.

use std::cmp::Ordering;

/// The indices of the best `k` logits, ascending, then -1 up to `k`. Larger first, +0 equals -0, NaN last, ties by lower index. It compares
/// values; nothing is computed.
pub fn top_k(logits: &[f32], k: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| match (logits[a].is_nan(), logits[b].is_nan()) {
        (false, false) => logits[b].partial_cmp(&logits[a]).expect("numbers").then(a.cmp(&b)),
        (true, false) => Ordering::Greater,
        (false, true) => Ordering::Less,
        (true, true) => a.cmp(&b),
    });
    order.truncate(k);
    order.sort_unstable();
    let mut chosen: Vec<i32> = order.into_iter().map(|index| index as i32).collect();
    chosen.resize(k, -1);
    chosen
}

/// Indices as slots of a sequence whose row of the block table this is; -1 stays.
pub fn slots_of(indices: &[i32], block_table: &[i32], page_size: usize) -> Vec<i32> {
    let slot = |&index: &i32| match usize::try_from(index) {
        Ok(index) => block_table[index / page_size] * page_size as i32 + (index % page_size) as i32,
        Err(_) => -1,
    };
    indices.iter().map(slot).collect()
}
