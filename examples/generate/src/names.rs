//! The names of tensors, which the same model may have in files of several styles.

use crate::Config;

/// How a checkpoint's names become those that DeepSeek-V3's have.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    num_layers: usize,
    first_with_experts: usize,
    is_wrapped: bool,
}

impl Names {
    pub fn new(config: &Config) -> Self {
        Self {
            num_layers: config.num_layers,
            first_with_experts: config
                .experts
                .as_ref()
                .map_or(config.num_layers, |experts| experts.first_layer),
            is_wrapped: config.is_wrapped,
        }
    }

    /// The model's name of a tensor. `None` for those that transformers leaves away too: tables of RoPE in old checkpoints, layers of
    /// multi-token prediction, which come after the model's own, and the parts of a wrapper that see or hear.
    pub fn own(&self, name: &str) -> Option<String> {
        let mut own = if self.is_wrapped { unwrapped(name)? } else { name.to_owned() };
        if let Some((layer, part)) = layer_of(&own) {
            // A.X-K1 has this norm in its dense layers too, which do not use it; transformers' own name of it is longer.
            let is_post_norm = part.trim_start_matches("mlp.").starts_with("post_mlp_layernorm.");
            if layer >= self.num_layers || is_post_norm && layer < self.first_with_experts {
                return None;
            }
            if is_post_norm {
                own = format!("model.layers.{layer}.{}", part.trim_start_matches("mlp."));
            }
        }
        (!own.contains(".rotary_emb.")).then_some(own)
    }
}

/// The language model's part of a wrapper's name.
fn unwrapped(name: &str) -> Option<String> {
    let own = match (name.strip_prefix("language_model."), name.strip_prefix("model.language_model.")) {
        (Some(own), _) => own.to_owned(),
        (_, Some(own)) => format!("model.{own}"),
        _ if name.starts_with("lm_head.") => name.to_owned(),
        _ => return None,
    };
    // transformers 5.24 saves kimi_k25 so: a rule for its vision model meets these too.
    Some(match own.strip_prefix("model.blocks.") {
        Some(rest) => format!("model.layers.{rest}"),
        None => own,
    })
}

/// A layer's number, and the name within it.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}
