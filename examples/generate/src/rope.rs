//! Rotary embedding: frequencies, with YaRN or without, and what it does to a row.

use std::f64::consts::PI;

use serde::Deserialize;

/// The rotary part of a config.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    /// Pairs `(x0, x1), (x2, x3), ..`, as DeepSeek has them; otherwise `(x0, x[R/2]), ..`.
    pub interleaved: bool,
    pub yarn: Option<Yarn>,
}

/// YaRN's stretching of a context.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original_max_position_embeddings: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub mscale_all_dim: f64,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
}

/// `rope_parameters` as transformers 5 writes it, or `rope_scaling` as DeepSeek ships it.
#[derive(Deserialize)]
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
}

/// Cosines and sines of every position: f32 `[max_position, R]`, in a row `R/2` cosines, then `R/2` sines.
#[derive(Debug, Clone)]
pub struct CosSin {
    pub table: Vec<f32>,
    pub rope_dim: usize,
    pub interleaved: bool,
}

fn mscale(factor: f64, m: f64) -> f64 {
    if factor > 1.0 { 0.1 * m * factor.ln() + 1.0 } else { 1.0 }
}

impl RopeConfig {
    pub(crate) fn new(
        raw: Option<RawRope>,
        theta: Option<f64>,
        interleaved: bool,
        max_position: usize,
    ) -> Result<Self, String> {
        let Some(raw) = raw else {
            return Ok(Self { theta: theta.unwrap_or(10_000.0), interleaved, yarn: None });
        };
        let theta = raw.rope_theta.or(theta).unwrap_or(10_000.0);
        if !(theta.is_finite() && theta > 1.0) {
            return Err(format!("rope_theta {theta}: must be greater than 1"));
        }
        let yarn = match raw.rope_type.as_deref() {
            None | Some("default") => None,
            Some("yarn") => Some(Yarn::new(&raw, max_position)?),
            Some(other) => return Err(format!("rope_type {other}: must be default or yarn")),
        };
        Ok(Self { theta, interleaved, yarn })
    }

    /// `factor` and `m` of [`wgpu_mla::softmax_scale`].
    pub fn softmax_mscale(&self) -> (f64, f64) {
        self.yarn.as_ref().map_or((1.0, 0.0), |yarn| (yarn.factor, yarn.mscale_all_dim))
    }

    /// Radians a position, of each pair.
    pub fn frequencies(&self, rope_dim: usize) -> Vec<f32> {
        let plain = |pair: usize| self.theta.powf(-(2.0 * pair as f64) / rope_dim as f64);
        let Some(yarn) = &self.yarn else {
            return (0..rope_dim / 2).map(|pair| plain(pair) as f32).collect();
        };
        let (low, high) = yarn.ramp(self.theta, rope_dim as f64);
        let stretched = |pair: usize| {
            let slow = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            plain(pair) * (slow / yarn.factor + 1.0 - slow)
        };
        (0..rope_dim / 2).map(|pair| stretched(pair) as f32).collect()
    }

    /// The table of all positions before `max_position`.
    pub fn cos_sin(&self, rope_dim: usize, max_position: usize) -> CosSin {
        let frequencies = self.frequencies(rope_dim);
        let factor = self.yarn.as_ref().map_or(1.0, |yarn| yarn.attention_factor) as f32;
        let mut table = Vec::with_capacity(max_position * rope_dim);
        for position in 0..max_position {
            // f32 as in transformers: a more exact angle is another one.
            let angles = frequencies.iter().map(|frequency| frequency * position as f32);
            table.extend(angles.clone().map(|angle| angle.cos() * factor));
            table.extend(angles.map(|angle| angle.sin() * factor));
        }
        CosSin { table, rope_dim, interleaved: self.interleaved }
    }
}

impl Yarn {
    fn new(raw: &RawRope, max_position: usize) -> Result<Self, String> {
        let original = raw.original_max_position_embeddings;
        let original = original.ok_or("original_max_position_embeddings: missing, YaRN needs it")?;
        let factor = raw.factor.unwrap_or(max_position as f64 / original);
        if !(factor.is_finite() && factor > 0.0 && original.is_finite() && original > 0.0) {
            return Err("factor and original_max_position_embeddings: must be greater than 0".into());
        }
        let given = |value: Option<f64>| value.filter(|&value| value != 0.0);
        let attention_factor =
            raw.attention_factor.unwrap_or(match (given(raw.mscale), given(raw.mscale_all_dim)) {
                (Some(m), Some(all)) => mscale(factor, m) / mscale(factor, all),
                _ => mscale(factor, 1.0),
            });
        Ok(Self {
            factor,
            original_max_position_embeddings: original,
            beta_fast: given(raw.beta_fast).unwrap_or(32.0),
            beta_slow: given(raw.beta_slow).unwrap_or(1.0),
            mscale_all_dim: raw.mscale_all_dim.unwrap_or(0.0),
            attention_factor,
        })
    }

    /// The pairs between which frequencies go over from as they are to divided by the factor.
    fn ramp(&self, theta: f64, rope_dim: f64) -> (f64, f64) {
        let pair_that_turns = |times: f64| {
            rope_dim * (self.original_max_position_embeddings / (times * 2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let low = pair_that_turns(self.beta_fast).floor().max(0.0);
        let high = pair_that_turns(self.beta_slow).ceil().min(rope_dim - 1.0);
        if low == high { (low, high + 0.001) } else { (low, high) }
    }
}

impl CosSin {
    /// Rotates one row of `R` elements to its position. The order of its elements stays.
    pub fn rotate(&self, row: &mut [f32], position: usize) {
        let half = self.rope_dim / 2;
        let (cos, sin) = self.table[position * self.rope_dim..][..self.rope_dim].split_at(half);
        for pair in 0..half {
            let (a, b) = if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let (x, y) = (row[a], row[b]);
            row[a] = x * cos[pair] - y * sin[pair];
            row[b] = y * cos[pair] + x * sin[pair];
        }
    }
}
