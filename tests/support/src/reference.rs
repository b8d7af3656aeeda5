//! The f64 oracle: a short definition of each op. It shares no code with any kernel.
//!
//! Values come in as f32, decoded from their dtype; results go out as f64. Arguments that contradict each other
//! panic: an oracle is for tests and for checking one's own host, not for serving.

mod batch_tables;
mod codes;
mod guard;
mod indexer;
mod indexer_logits;
mod kv_calibrate;
mod kv_gather;
mod layer;
mod prefill;
mod project;
mod records;
mod reorg_kvcache;
mod rope;
mod sparse;
mod top_k;

pub use batch_tables::slot_mapping;
pub use codes::{e4m3_code, e4m3_codes};
pub use guard::{Rounding, guard_counts};
pub use indexer::{IndexNorm, IndexRows, index_keys, index_queries, index_scale};
pub use indexer_logits::{IndexRow, indexer_logit};
pub use kv_calibrate::kv_calibrate;
pub use kv_gather::{GatherPages, kv_gather};
pub use layer::{LayerSequence, mla_layer};
pub use prefill::{Expanded, mla_prefill, mla_prefill_row};
pub use project::{Projection, head_project, q8_0_bytes, q8_0_values};
pub use records::{cache_values, group_scale, record};
pub use reorg_kvcache::{Chunk, reorg_kvcache};
pub use rope::{Rotation, rope};
pub use sparse::{Lists, attn_sink, mla_decode_sparse};
pub use top_k::{slots_of, top_k};

use wgpu_mla::{Dtype, KvLayout, LseBase, Mask};

/// Arguments of [`mla_decode`], dense arrays in the shapes of the README.
#[derive(Debug, Clone, Copy)]
pub struct Decode<'a> {
    /// `H`.
    pub num_heads: usize,
    /// `L`.
    pub kv_lora_rank: usize,
    /// `R`.
    pub qk_rope_head_dim: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// `[total_q, H, L + R]`.
    pub q: &'a [f32],
    /// `[num_pages, page_size, L + R]`. Rows that no sequence uses may hold anything.
    pub kv_cache: &'a [f32],
    /// `[batch, max_pages]`. Entries past a sequence's last page may hold anything.
    pub block_table: &'a [i32],
    /// Entries in a row of `block_table`.
    pub max_pages: usize,
    /// `[batch]`, this step's tokens included.
    pub seq_lens: &'a [i32],
    /// `[batch + 1]`.
    pub query_start_loc: &'a [i32],
    /// Which keys a query token sees.
    pub mask: Mask<'a>,
    /// Factor of the logits.
    pub softmax_scale: f64,
    /// Factor of every cache element.
    pub k_scale: f64,
    /// Factor of every query element.
    pub q_scale: f64,
}

/// Attention over a paged latent cache: `out [total_q, H, L]` and the natural `lse [total_q, H]`.
///
/// A row that sees no key has `out` 0 and `lse` -inf.
///
/// # Panics
/// Where the arrays are shorter than the batch says.
pub fn mla_decode(args: &Decode<'_>) -> (Vec<f64>, Vec<f64>) {
    let mut rows = Rows::new(args);
    for (seq, &seq_len) in args.seq_lens.iter().enumerate() {
        let slot = |j: usize| {
            let page = args.block_table[seq * args.max_pages + j / args.page_size] as usize;
            page * args.page_size + j % args.page_size
        };
        let (first, last) = (args.query_start_loc[seq] as usize, args.query_start_loc[seq + 1] as usize);
        for token in first..last {
            // Bottom-right: query i of q_len sees key j where j <= seq_len - q_len + i.
            let visible = match args.mask {
                Mask::Causal => i64::from(seq_len) - (last - first) as i64 + (token - first) as i64 + 1,
                Mask::CausalFrom(bound) => {
                    bound.saturating_add((token - first) as i64).min(i64::from(seq_len))
                }
                Mask::Full => i64::from(seq_len),
                Mask::Bounds(bounds) => i64::from(bounds[token]),
            };
            rows.attend(token, &(0..visible.max(0) as usize).map(slot).collect::<Vec<_>>());
        }
    }
    (rows.out, rows.lse)
}

/// The results of a decode's rows, 0 and -inf until they attend keys.
struct Rows<'a> {
    args: &'a Decode<'a>,
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl<'a> Rows<'a> {
    fn new(args: &'a Decode<'a>) -> Self {
        let rows = args.q.len() / (args.kv_lora_rank + args.qk_rope_head_dim);
        Self { args, out: vec![0.0; rows * args.kv_lora_rank], lse: vec![f64::NEG_INFINITY; rows] }
    }

    /// All heads of a query token attend the keys in these slots.
    fn attend(&mut self, token: usize, slots: &[usize]) {
        let args = self.args;
        let (heads, latent) = (args.num_heads, args.kv_lora_rank);
        let row = latent + args.qk_rope_head_dim;
        let key = |slot: usize| &args.kv_cache[slot * row..][..row];
        if slots.is_empty() {
            return;
        }
        for at in token * heads..(token + 1) * heads {
            let q = &args.q[at * row..][..row];
            let scale = args.softmax_scale * args.q_scale * args.k_scale;
            let logits: Vec<f64> = slots.iter().map(|&slot| scale * dot(q, key(slot))).collect();
            let weights;
            (weights, self.lse[at]) = softmax(&logits);
            for (&slot, weight) in slots.iter().zip(weights) {
                for (out, &v) in self.out[at * latent..][..latent].iter_mut().zip(key(slot)) {
                    *out += weight * args.k_scale * f64::from(v);
                }
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// Weights that add up to 1, and the LSE. The weights do not come from the LSE: at logits of 1e30 that has lost the `ln` of their number.
fn softmax(logits: &[f64]) -> (Vec<f64>, f64) {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (weights.iter().map(|weight| weight / sum).collect(), max + sum.ln())
}

/// Merges partial results `(out, lse)` of one row over different keys.
///
/// One whose LSE is not finite is empty, and what its `out` holds is ignored, as is one whose weight is 0 in f32. A single non-empty one is
/// returned bit for bit; none gives 0 and -inf.
///
/// # Panics
/// Without any partial result, since nothing then says how long a row is.
pub fn merge_states(partials: &[(&[f64], f64)]) -> (Vec<f64>, f64) {
    merge_states_in(LseBase::E, partials)
}

/// [`merge_states`] with LSEs in another base, the one that comes out too.
///
/// # Panics
/// Without any partial result.
pub fn merge_states_in(base: LseBase, partials: &[(&[f64], f64)]) -> (Vec<f64>, f64) {
    let some: Vec<_> = partials.iter().filter(|(_, lse)| lse.is_finite()).collect();
    match some[..] {
        [] => (vec![0.0; partials[0].0.len()], f64::NEG_INFINITY),
        [&(out, lse)] => (out.to_vec(), lse),
        _ => {
            let natural = match base {
                LseBase::E => 1.0,
                LseBase::Two => std::f64::consts::LN_2,
            };
            let (weights, lse) = softmax(&some.iter().map(|(_, lse)| lse * natural).collect::<Vec<_>>());
            let mut merged = vec![0.0; partials[0].0.len()];
            for ((out, _), weight) in some.into_iter().zip(weights) {
                if weight as f32 > 0.0 {
                    merged.iter_mut().zip(*out).for_each(|(sum, x)| *sum += weight * x);
                }
            }
            (merged, lse / natural)
        }
    }
}

/// One rank's `out` of a row, weighted by the LSEs of all ranks, and the LSE of the whole: the outputs of all ranks add up to
/// [`merge_states_in`].
///
/// # Panics
/// For a rank that there is not.
pub fn correct_attn_out(base: LseBase, out: &[f64], lses: &[f64], rank: usize) -> (Vec<f64>, f64) {
    // Nothing of the others is left where they are zeros.
    let zeros = vec![0.0; out.len()];
    let partials: Vec<(&[f64], f64)> =
        lses.iter().enumerate().map(|(r, &lse)| (if r == rank { out } else { &zeros[..] }, lse)).collect();
    merge_states_in(base, &partials)
}

/// Outputs `[tokens, heads, head_size]` with their LSEs `[heads, tokens]`.
#[derive(Debug, Clone, Copy)]
pub struct State<'a> {
    /// `[tokens, heads, head_size]`.
    pub output: &'a [f32],
    /// `[heads, tokens]`, natural.
    pub lse: &'a [f32],
}

/// The pairwise [`merge_states`] of whole batches: `output [tokens, heads, head_size]`, `output_lse [heads, tokens]`.
///
/// # Panics
/// Where the arrays do not have these shapes.
pub fn merge_state(
    prefix: State<'_>,
    suffix: State<'_>,
    num_heads: usize,
    head_size: usize,
) -> (Vec<f64>, Vec<f64>) {
    let tokens = prefix.lse.len() / num_heads;
    let mut output = Vec::with_capacity(prefix.output.len());
    let mut output_lse = vec![0.0; prefix.lse.len()];
    for row in 0..tokens * num_heads {
        let (token, head) = (row / num_heads, row % num_heads);
        let [a, b] = [prefix, suffix].map(|side| -> (Vec<f64>, f64) {
            let out = side.output[row * head_size..][..head_size].iter().map(|&x| x.into()).collect();
            (out, side.lse[head * tokens + token].into())
        });
        let (out, lse) = merge_states(&[(&a.0, a.1), (&b.0, b.1)]);
        output.extend(out);
        output_lse[head * tokens + token] = lse;
    }
    (output, output_lse)
}

/// Arguments of [`concat_and_cache`]: encoded arrays, little-endian and dense.
#[derive(Debug, Clone, Copy)]
pub struct Concat<'a> {
    /// `[tokens, L]` of `input`.
    pub kv_c: &'a [u8],
    /// `[tokens, R]` of `input`.
    pub k_pe: &'a [u8],
    /// Dtype of `kv_c` and `k_pe`.
    pub input: Dtype,
    /// `[tokens]`: `page * page_size + offset`; negative for a token to skip.
    pub slot_mapping: &'a [i64],
    /// `L`.
    pub kv_lora_rank: usize,
    /// `R`.
    pub qk_rope_head_dim: usize,
    /// An e4m3 cache holds `x / k_scale`; unread for others.
    pub k_scale: f32,
}

/// Writes new rows into a cache `[num_slots]` tokens of a layout. Nothing else in it changes.
///
/// Bits are copied where the dtypes agree; else each element is the nearest one, ties to even.
///
/// # Panics
/// Where the arrays are shorter than `slot_mapping` says.
pub fn concat_and_cache(args: &Concat<'_>, layout: impl Into<KvLayout>, cache: &mut [u8]) {
    let KvLayout::Plain(dtype) = layout.into() else { return concat_and_cache_records(args, cache) };
    let row_bytes = (args.kv_lora_rank + args.qk_rope_head_dim) * dtype.bytes();
    for (token, &slot) in args.slot_mapping.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let mut row = Vec::with_capacity(row_bytes);
        for (part, dim) in [(args.kv_c, args.kv_lora_rank), (args.k_pe, args.qk_rope_head_dim)] {
            let part = &part[token * dim * args.input.bytes()..][..dim * args.input.bytes()];
            match dtype {
                _ if dtype == args.input => row.extend_from_slice(part),
                Dtype::E4m3 => {
                    args.input.decode_all(part).iter().for_each(|x| dtype.encode(x / args.k_scale, &mut row));
                }
                _ => args.input.decode_all(part).iter().for_each(|&x| dtype.encode(x, &mut row)),
            }
        }
        cache[slot as usize * row_bytes..][..row_bytes].copy_from_slice(&row);
    }
}

fn concat_and_cache_records(args: &Concat<'_>, cache: &mut [u8]) {
    let part = |part: &[u8], token: usize, dim: usize| -> Vec<f32> {
        args.input.decode_all(&part[token * dim * args.input.bytes()..][..dim * args.input.bytes()])
    };
    for (token, &slot) in args.slot_mapping.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let (latent, rope) =
            (part(args.kv_c, token, args.kv_lora_rank), part(args.k_pe, token, args.qk_rope_head_dim));
        let row = record(&latent, &rope);
        cache[slot as usize * row.len()..][..row.len()].copy_from_slice(&row);
    }
}

/// Copies pages `(from, to)` of a cache `[num_pages, page_bytes]`, in order.
///
/// # Panics
/// For a page past the cache's end.
pub fn copy_pages(cache: &mut [u8], page_bytes: usize, copies: &[(u32, u32)]) {
    for &(from, to) in copies {
        let from = from as usize * page_bytes;
        cache.copy_within(from..from + page_bytes, to as usize * page_bytes);
    }
}
