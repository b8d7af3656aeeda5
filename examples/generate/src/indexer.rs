//! The fields of a lightning indexer, which chooses the tokens that a layer attends: DeepSeek-V3.2 and GLM-5.

use wgpu_mla::{Dtype, IndexFormat, RopeLayout};

use crate::defaults::IndexerDefaults;
use crate::fields::{Fields, short};

/// Elements of an index key, and how many of them, the first, RoPE turns.
pub const INDEX_DIM: usize = 128;
const INDEX_ROPE_DIM: u32 = 64;

const MOST_HEADS: usize = 64;
const MOST_TOPK: usize = 8192;

/// An indexer's dims and options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexerConfig {
    /// Hi.
    pub num_heads: u32,
    /// The most tokens that a query token attends.
    pub topk: u32,
    /// Which elements its RoPE turns together; the layer's own may turn others.
    pub rope: RopeLayout,
    /// Whether a layer has an indexer (`full`); one without (`shared`) attends the tokens of the last layer that has.
    pub is_full: Vec<bool>,
}

impl IndexerConfig {
    /// How keys are stored in a cache of a dtype: transformed by a Hadamard matrix, and e4m3 with scales that are powers of two, as
    /// DeepSeek's code has them.
    #[must_use]
    pub fn format(&self, dtype: Dtype) -> IndexFormat {
        IndexFormat { dtype, rope: Some(self.rope), hadamard: true, ue8m0: dtype == Dtype::E4m3 }
    }

    /// The factor of a head's weight, `(Hi * 128)^-1/2`.
    #[must_use]
    pub fn weight_scale(&self) -> f32 {
        (f64::from(self.num_heads) * INDEX_DIM as f64).sqrt().recip() as f32
    }
}

pub fn parse(
    fields: &Fields<'_>,
    defaults: &IndexerDefaults,
    num_layers: usize,
    rope_dim: u32,
) -> Result<IndexerConfig, String> {
    check_what_is_served(fields, defaults, rope_dim)?;
    let within = |name: &str, default: usize, most: usize| match fields.size(name, default)? {
        size if size <= most => Ok(size as u32),
        size => Err(format!("{name} {size}: must be 1 to {most}")),
    };
    let is_full = is_full(fields, num_layers)?;
    if !defaults.shares_lists && is_full.contains(&false) {
        return Err("indexer_types: must be full in every layer for this model_type".into());
    }
    Ok(IndexerConfig {
        num_heads: within("index_n_heads", defaults.index_n_heads, MOST_HEADS)?,
        topk: within("index_topk", defaults.index_topk, MOST_TOPK)?,
        rope: match fields.flag("indexer_rope_interleave", defaults.interleaved)? {
            true => RopeLayout::Interleaved,
            false => RopeLayout::HalfSplit,
        },
        is_full,
    })
}

fn check_what_is_served(
    fields: &Fields<'_>,
    defaults: &IndexerDefaults,
    rope_dim: u32,
) -> Result<(), String> {
    let dim = fields.size("index_head_dim", defaults.index_head_dim)?;
    if dim != INDEX_DIM {
        return Err(format!("index_head_dim {dim}: must be {INDEX_DIM}"));
    }
    if rope_dim != INDEX_ROPE_DIM {
        return Err(format!(
            "qk_rope_head_dim {rope_dim}: must be {INDEX_ROPE_DIM} for this model_type, as so many elements of an index key rotate"
        ));
    }
    if fields.0.get("q_lora_rank").is_some_and(serde_json::Value::is_null) {
        return Err(
            "q_lora_rank null: must be there for this model_type, as index queries are made from it".into()
        );
    }
    if !fields.flag("rope_interleave", true)? {
        return Err("rope_interleave false: must be true for this model_type".into());
    }
    if let Some(other) =
        fields.strings("layer_types")?.into_iter().flatten().find(|&it| it != "indexed_attention")
    {
        return Err(format!("layer_types has {}: must be indexed_attention in every layer", short(other)));
    }
    let quantization = fields.object("quantization_config")?;
    match quantization.map(|it| it.text("scale_fmt")).transpose()?.flatten() {
        None | Some("ue8m0") => Ok(()),
        Some(other) => Err(format!("scale_fmt {} of quantization_config: must be ue8m0", short(other))),
    }
}

/// `indexer_types`, or else the pattern that the other fields make, as in transformers.
fn is_full(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<bool>, String> {
    let is_full = match (fields.strings("indexer_types")?, pattern(fields)?) {
        (Some(types), _) => each_full("indexer_types", types)?,
        (None, Some(types)) => each_full("index_topk_pattern", types)?,
        (None, None) => {
            let (every, first) =
                (fields.count("index_topk_freq", 1)?.max(1), fields.count("index_skip_topk_offset", 2)?);
            (0..num_layers).map(|layer| (layer + 1).saturating_sub(first).is_multiple_of(every)).collect()
        }
    };
    match is_full.len() == num_layers && is_full.first() == Some(&true) {
        true => Ok(is_full),
        false => Err(format!(
            "indexer_types has {} entries: must have one for each of num_hidden_layers, {num_layers}, the first of them full",
            is_full.len()
        )),
    }
}

/// `index_topk_pattern`: a list, or a letter a layer, `"FSSF.."`.
fn pattern<'a>(fields: &Fields<'a>) -> Result<Option<Vec<&'a str>>, String> {
    match fields.0.get("index_topk_pattern").and_then(serde_json::Value::as_str) {
        Some(letters) => Ok(Some(letters.split("").filter(|letter| !letter.is_empty()).collect())),
        None => fields.strings("index_topk_pattern"),
    }
}

fn each_full(name: &str, types: Vec<&str>) -> Result<Vec<bool>, String> {
    let full = |kind| match kind {
        "full" | "F" => Ok(true),
        "shared" | "S" => Ok(false),
        other => Err(format!("{name} has {}: must be full or shared", short(other))),
    };
    types.into_iter().map(full).collect()
}
