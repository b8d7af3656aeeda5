//! The names of GGUF's tensors.

/// Parts of names in a layer: `blk.N.` and `model.layers.N.`.
const OF_LAYERS: [(&str, &str); 23] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
];

/// Whole names, but for stacked experts, whose names in checkpoints of transformers do not end in `.weight`.
const OTHERS: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// The router's bias.
const BIAS: (&str, &str) = ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias");

/// LongRoPE's factors, which are a part of the config here.
pub const FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// The name of a tensor in a checkpoint of transformers; one that is not known is left as it is but for its layer. `None` for those that
/// the weights do not have, which are read with the config.
pub fn own(name: &str) -> Option<String> {
    match FACTORS.contains(&name) {
        true => None,
        false => Some(known(name, false).unwrap_or_else(|| name.into())),
    }
}

/// A tensor's name in GGUF files.
pub fn theirs(name: &str) -> String {
    known(name, true).unwrap_or_else(|| name.into())
}

/// From GGUF to transformers, or back.
fn known(name: &str, is_back: bool) -> Option<String> {
    let turn = |(theirs, own)| if is_back { (own, theirs) } else { (theirs, own) };
    let other = |all: &[(&'static str, &'static str)], part: &str| {
        all.iter().map(|&pair| turn(pair)).find(|(from, _)| *from == part).map(|(_, to)| to)
    };
    let (from, to) = turn(("blk.", "model.layers."));
    let Some((layer, part)) = name.strip_prefix(from).and_then(|rest| rest.split_once('.')) else {
        let (stem, end) = name.rsplit_once('.')?;
        return Some(format!("{}.{end}", other(&OTHERS, stem)?));
    };
    if let Some(bias) = other(&[BIAS], part) {
        return Some(format!("{to}{layer}.{bias}"));
    }
    if let Some(stack) = other(&OF_LAYERS, part).filter(|_| is_back) {
        return Some(format!("{to}{layer}.{stack}.weight"));
    }
    let (stem, end) = part.rsplit_once('.')?;
    let Some(stem) = other(&OF_LAYERS, stem) else { return Some(format!("{to}{layer}.{part}")) };
    let is_stack = stem.starts_with("mlp.experts.");
    Some(if is_stack { format!("{to}{layer}.{stem}") } else { format!("{to}{layer}.{stem}.{end}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_there_and_back() {
        for (name, of_transformers) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("blk.12.attn_kv_a_mqa.weight", "model.layers.12.self_attn.kv_a_proj_with_mqa.weight"),
            ("blk.0.attn_q_a.bias", "model.layers.0.self_attn.q_a_proj.bias"),
            ("blk.3.exp_probs_b.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
            ("blk.3.ffn_gate_exps.weight", "model.layers.3.mlp.experts.gate_proj"),
            ("blk.3.ffn_gate_inp.weight", "model.layers.3.mlp.gate.weight"),
            ("blk.3.odd.weight", "model.layers.3.odd.weight"),
            ("odd.weight", "odd.weight"),
        ] {
            assert_eq!(own(name).as_deref(), Some(of_transformers));
            assert_eq!(theirs(of_transformers), name);
        }
        assert_eq!(own("rope_factors_long.weight"), None);
    }
}
