//! Decodes of listed slots, and attention sinks.

use super::{Decode, Rows};

/// The slots that each query token attends.
#[derive(Debug, Clone, Copy)]
pub struct Lists<'a> {
    /// `[total_q, topk]`: what is negative or no slot of the pool is skipped, what stands twice counts twice.
    pub slots: &'a [i32],
    /// Entries of a list.
    pub topk: usize,
    /// `[total_q]`: how many entries of each list count; `None`: all.
    pub topk_length: Option<&'a [i32]>,
}

/// Like [`super::mla_decode`], over lists: the sequences, their pages and the mask are not looked at.
///
/// # Panics
/// Where the lists are shorter than the query.
pub fn mla_decode_sparse(args: &Decode<'_>, lists: &Lists<'_>) -> (Vec<f64>, Vec<f64>) {
    let num_slots = args.kv_cache.len() / (args.kv_lora_rank + args.qk_rope_head_dim);
    let mut rows = Rows::new(args);
    for token in 0..rows.lse.len() / args.num_heads {
        let length = lists.topk_length.map_or(lists.topk, |lengths| lengths[token] as usize);
        let list = &lists.slots[token * lists.topk..][..length];
        let in_pool = |&slot: &i32| usize::try_from(slot).ok().filter(|slot| *slot < num_slots);
        rows.attend(token, &list.iter().filter_map(in_pool).collect::<Vec<_>>());
    }
    (rows.out, rows.lse)
}

/// The outputs of rows with a sink a head: `out * 1 / (1 + exp(sink - lse))`, a factor that is 0 in f32 being 0. Rows without keys stay 0.
///
/// # Panics
/// Where there are not as many sinks as heads.
pub fn attn_sink(out: &mut [f64], lse: &[f64], sinks: &[f32]) {
    let latent = out.len() / lse.len().max(1);
    for (row, &lse) in lse.iter().enumerate().filter(|(_, lse)| **lse != f64::NEG_INFINITY) {
        let share = 1.0 / (1.0 + (f64::from(sinks[row % sinks.len()]) - lse).exp());
        let share = if share as f32 == 0.0 { 0.0 } else { share };
        out[row * latent..][..latent].iter_mut().for_each(|x| *x *= share);
    }
}
