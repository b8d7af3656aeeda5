//! The layer in its expanded form, as DeepSeek-V2's paper writes it (arXiv:2405.04434, equations 9 to 19).

/// One sequence's query tokens over its tokens of the cache, with the values exactly as they were stored.
#[derive(Debug, Clone, Copy)]
pub struct LayerSequence<'a> {
    /// `H`.
    pub num_heads: usize,
    /// `L`.
    pub kv_lora_rank: usize,
    /// `R`.
    pub qk_rope_head_dim: usize,
    /// `P`.
    pub qk_nope_head_dim: usize,
    /// `V`.
    pub v_head_dim: usize,
    /// `[T, H, P]`
    pub q_nope: &'a [f64],
    /// `[T, H, R]`, rotated.
    pub q_pe: &'a [f64],
    /// `[S, L + R]`: latents and rotated keys.
    pub rows: &'a [f64],
    /// `[H, P + V, L]`
    pub kv_b_proj: &'a [f64],
    /// Rows that each token sees, from the first.
    pub visible: &'a [usize],
    /// Factor of the logits.
    pub softmax_scale: f64,
}

/// `[T, H, V]`
pub fn mla_layer(args: &LayerSequence<'_>) -> Vec<f64> {
    let LayerSequence {
        num_heads,
        kv_lora_rank: l,
        qk_rope_head_dim: r,
        qk_nope_head_dim: p,
        v_head_dim: v,
        ..
    } = *args;
    let weight = |head: usize, row: usize| &args.kv_b_proj[(head * (p + v) + row) * l..][..l];
    let mut out = Vec::new();
    for (token, &visible) in args.visible.iter().enumerate() {
        let rows: Vec<&[f64]> = args.rows.chunks(l + r).take(visible).collect();
        for head in 0..num_heads {
            let q_nope = &args.q_nope[(token * num_heads + head) * p..][..p];
            let q_pe = &args.q_pe[(token * num_heads + head) * r..][..r];
            let logit = |row: &&[f64]| {
                let key = |i: usize| dot(&row[..l], weight(head, i));
                let nope: f64 = q_nope.iter().enumerate().map(|(i, q)| q * key(i)).sum();
                args.softmax_scale * (nope + dot(q_pe, &row[l..]))
            };
            let logits: Vec<f64> = rows.iter().map(logit).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..v {
                let value = |row: &&[f64]| dot(&row[..l], weight(head, p + i));
                let total: f64 = rows.iter().zip(&weights).map(|(row, weight)| weight * value(row)).sum();
                out.push(if visible == 0 { 0.0 } else { total / sum });
            }
        }
    }
    out
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
