//! A directory with config.json, weights, tokenizer.json and, for an e4m3 cache, kv_cache_scales.json.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use wgpu_mla::{Dtype, KvLayout};

use crate::weights::Weights;
use crate::{Config, Error, Model, Result, Text, files};

pub struct Checkpoint {
    pub dir: PathBuf,
    pub model: Model,
    /// `k_scale` of each layer for an e4m3 cache; empty where the checkpoint has none, which is 1 for each.
    pub k_scales: Vec<f32>,
}

/// The file of scales that vLLM writes and reads: scales by rank, then by layer.
#[derive(Deserialize)]
struct Scales {
    kv_cache: KvCache,
}

#[derive(Deserialize)]
struct KvCache {
    scaling_factor: HashMap<String, HashMap<String, f32>>,
}

impl Checkpoint {
    /// # Errors
    /// [`Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        let model = Model::open(dir)?;
        let k_scales = k_scales(dir, model.config.num_layers)?;
        Ok(Self { dir: dir.into(), model, k_scales })
    }

    /// A checkpoint from the contents of config.json, model.safetensors and kv_cache_scales.json. [`Text::parse`] makes its tokenizer.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn parse(config: &str, weights: Vec<u8>, scales: &str) -> Result<Self> {
        let config = Config::from_json(config)?;
        let weights = Weights::of("model.safetensors", weights, &config)?;
        let k_scales = parse_scales(Path::new("kv_cache_scales.json"), scales, config.num_layers)?;
        Ok(Self { dir: PathBuf::new(), model: Model::load(config, weights)?, k_scales })
    }

    /// What a person is to be told of a cache of this dtype: that an e4m3 cache has no scales here, and takes 1.
    #[must_use]
    pub fn scales_notice(&self, kv: KvLayout) -> Option<&'static str> {
        (kv == Dtype::E4m3.into() && self.k_scales.is_empty())
            .then_some("no kv_cache_scales.json, so k_scale is 1 in every layer: values beyond 448 saturate")
    }

    /// # Errors
    /// [`Error::File`].
    pub fn tokenizer(&self) -> Result<Text> {
        Text::open(&self.dir)
    }
}

fn k_scales(dir: &Path, layers: usize) -> Result<Vec<f32>> {
    let path = dir.join("kv_cache_scales.json");
    if !files::is_there(&path)? {
        return Ok(Vec::new());
    }
    parse_scales(&path, &files::read_text(&path, "download it again")?, layers)
}

fn parse_scales(path: &Path, text: &str, layers: usize) -> Result<Vec<f32>> {
    let again =
        |error| Error::file(path, format!("{error}; download it again, or delete it for scales of 1"));
    let scales: Scales = serde_json::from_str(text).map_err(again)?;
    let of_layer = |layer: usize| {
        let scale = scales.kv_cache.scaling_factor.get("0").and_then(|rank| rank.get(&layer.to_string()));
        // The cache multiplies by the scale's inverse.
        let served = scale.copied().filter(|scale| *scale > 0.0 && (1.0 / scale).is_finite());
        served.ok_or_else(|| {
            let which = format!("scaling_factor of rank 0 and layer {layer}");
            let cure = "must be there and above 0; delete the file for scales of 1";
            Error::file(path, format!("{which}: {cure}"))
        })
    };
    (0..layers).map(of_layer).collect()
}
