//! The oracle of `mla_prefill`.

use super::{dot, softmax};
use wgpu_mla::{Mask, PrefillSequence};

/// Arguments of [`mla_prefill`], dense arrays.
#[derive(Debug, Clone, Copy)]
pub struct Expanded<'a> {
    /// `H`.
    pub num_heads: usize,
    /// `P`.
    pub qk_nope_head_dim: usize,
    /// `R`.
    pub qk_rope_head_dim: usize,
    /// `V`.
    pub v_head_dim: usize,
    /// `[T, H, P]`.
    pub q_nope: &'a [f32],
    /// `[T, H, R]`.
    pub q_pe: &'a [f32],
    /// `[S, H, P]`.
    pub k_nope: &'a [f32],
    /// `[S, R]`, shared by all heads.
    pub k_pe: &'a [f32],
    /// `[S, H, V]`.
    pub v: &'a [f32],
    /// Factor of the logits.
    pub softmax_scale: f64,
}

/// One row of attention over expanded keys: the output `[V]` and the natural LSE of head `head` of query token `token`, which sees the
/// keys `keys`. Without any the output is 0 and the LSE -inf.
///
/// # Panics
/// Where the arrays are too short.
pub fn mla_prefill_row(
    args: &Expanded<'_>,
    token: usize,
    head: usize,
    keys: std::ops::Range<usize>,
) -> (Vec<f64>, f64) {
    let Expanded { num_heads, qk_nope_head_dim: nope, qk_rope_head_dim: rope, v_head_dim: dim, .. } = *args;
    let mut out = vec![0.0; dim];
    if keys.is_empty() {
        return (out, f64::NEG_INFINITY);
    }
    let at = token * num_heads + head;
    let (q_nope, q_pe) = (&args.q_nope[at * nope..][..nope], &args.q_pe[at * rope..][..rope]);
    let logit = |key: usize| {
        let k_nope = &args.k_nope[(key * num_heads + head) * nope..][..nope];
        args.softmax_scale * (dot(q_nope, k_nope) + dot(q_pe, &args.k_pe[key * rope..][..rope]))
    };
    let logits: Vec<f64> = keys.clone().map(logit).collect();
    let (weights, lse) = softmax(&logits);
    for (key, weight) in keys.zip(weights) {
        let value = &args.v[(key * num_heads + head) * dim..][..dim];
        out.iter_mut().zip(value).for_each(|(out, &v)| *out += weight * f64::from(v));
    }
    (out, lse)
}

/// All rows of a batch: `(row, head, out, lse)`, `row` that of the output, for each query token of each sequence and each head.
///
/// # Panics
/// Where the arrays are shorter than the sequences say.
pub fn mla_prefill(args: &Expanded<'_>, sequences: &[PrefillSequence]) -> Vec<(usize, usize, Vec<f64>, f64)> {
    let mut rows = Vec::new();
    for sequence in sequences {
        for i in 0..sequence.q_len {
            let (q_len, kv_len, i_128) =
                (i128::from(sequence.q_len), i128::from(sequence.kv_len), i128::from(i));
            let sees = match sequence.mask {
                Mask::Full => kv_len,
                // Bottom-right: query i of q_len sees key j where j <= kv_len - q_len + i.
                Mask::Causal => kv_len - q_len + i_128 + 1,
                Mask::CausalFrom(first) => i128::from(first) + i_128,
                Mask::Bounds(_) => panic!("a prefill has no bounds"),
            };
            let sees = sees.clamp(0, sequence.kv_len.into()) as usize;
            let (token, begin) = ((sequence.q_begin + i) as usize, sequence.kv_begin as usize);
            for head in 0..args.num_heads {
                let (out, lse) = mla_prefill_row(args, token, head, begin..begin + sees);
                rows.push(((sequence.out_begin + i) as usize, head, out, lse));
            }
        }
    }
    rows
}
