//! The rotary part of a config: what it says becomes [`RopeFrequencies`].

use serde::Deserialize;
use wgpu_mla::{RopeFrequencies, Yarn};

/// How a model's rotary embedding turns.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    pub frequencies: RopeFrequencies,
    /// Pairs `(x0, x1), (x2, x3), ..`, as DeepSeek has them; otherwise `(x0, x[R/2]), ..`.
    pub interleaved: bool,
    /// `factor` and `m` of [`wgpu_mla::softmax_scale`].
    pub softmax_mscale: (f64, f64),
    /// Instead of the frequencies' own factor of cosines and sines.
    attention_factor: Option<f64>,
}

/// `rope_parameters` as transformers 5 writes it, or `rope_scaling` as DeepSeek ships it.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(crate) struct RawRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    attention_factor: Option<f64>,
    truncate: Option<bool>,
}

impl RopeConfig {
    /// For `R` rotary elements; `theta` is the config's, where the part has none of its own.
    pub(crate) fn new(
        raw: RawRope,
        theta: Option<f64>,
        interleaved: bool,
        rope_dim: u32,
        max_position: usize,
    ) -> Result<Self, String> {
        let theta = raw.rope_theta.or(theta).unwrap_or(10_000.0);
        let why = |error: wgpu_mla::Error| error.to_string();
        match raw.rope_type.as_deref() {
            None | Some("default") => Ok(Self {
                frequencies: RopeFrequencies::plain(rope_dim, theta).map_err(why)?,
                interleaved,
                softmax_mscale: (1.0, 0.0),
                attention_factor: None,
            }),
            Some("yarn") => {
                let yarn = raw.yarn(max_position)?;
                Ok(Self {
                    frequencies: RopeFrequencies::yarn(rope_dim, theta, &yarn).map_err(why)?,
                    interleaved,
                    softmax_mscale: (yarn.factor, yarn.mscale_all_dim),
                    attention_factor: raw.attention_factor,
                })
            }
            Some(other) => Err(format!("rope_type {other}: must be default or yarn")),
        }
    }

    /// Cosines and sines of every position before `max_position`, as [`RopeFrequencies::cos_sin`] lays them out.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::Shape`].
    pub fn cos_sin(&self, max_position: u32) -> wgpu_mla::Result<Vec<f32>> {
        let mut table = self.frequencies.cos_sin(max_position)?;
        if let Some(factor) = self.attention_factor {
            let by = (factor / self.frequencies.attention_factor()) as f32;
            table.iter_mut().for_each(|x| *x *= by);
        }
        Ok(table)
    }
}

impl RawRope {
    fn yarn(&self, max_position: usize) -> Result<Yarn, String> {
        let original = self.original_max_position_embeddings;
        let original = original.ok_or("original_max_position_embeddings: missing, YaRN needs it")?;
        let plain = Yarn::new(self.factor.unwrap_or(max_position as f64 / original), original);
        // As transformers: 0 is as if it were not there.
        let given = |value: Option<f64>, default| value.filter(|&value| value != 0.0).unwrap_or(default);
        Ok(Yarn {
            beta_fast: given(self.beta_fast, plain.beta_fast),
            beta_slow: given(self.beta_slow, plain.beta_slow),
            mscale: self.mscale.unwrap_or(0.0),
            mscale_all_dim: self.mscale_all_dim.unwrap_or(0.0),
            truncate: self.truncate.unwrap_or(true),
            ..plain
        })
    }
}
