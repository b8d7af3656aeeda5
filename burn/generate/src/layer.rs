//! A layer: what is burn's before and after the attention, which is a cache's.

use burn::tensor::{DType, Device, Tensor};
use generate::parts::{self, Either, Query};
use generate::{Config, Error, Result};
use wgpu_mla_burn::PagedCache;

use crate::experts::Experts;
use crate::linear::{Linear, Mlp, Norm};
use crate::times::{Part, Times};
use crate::upload::Upload;

pub struct Layer {
    input_norm: Norm,
    /// One product for the query and for keys and values: `q_a_proj`, or `q_proj`, then `kv_a_proj_with_mqa`.
    down: Linear,
    /// Its columns that are the query's.
    of_query: usize,
    /// `q_a_layernorm` and `q_b_proj`, where the query has a latent.
    up: Option<(Norm, Linear)>,
    kv_norm: Norm,
    latent: usize,
    /// `L + R`.
    row: usize,
    out: Linear,
    post_norm: Norm,
    feed: Feed,
}

enum Feed {
    Dense(Box<Mlp>),
    Experts(Box<Experts>),
}

/// What all layers of a step share.
pub struct Step<'a> {
    pub cache: &'a PagedCache,
    pub device: &'a Device,
    /// What each token's query is multiplied by, `[T, 1]` in f32.
    pub factors: Option<Tensor<2>>,
    /// The factor of what each half of a layer adds.
    pub residuals: f32,
    pub times: &'a mut Times,
}

impl Layer {
    pub fn of(upload: &mut Upload<'_>, layer: &parts::Layer, config: &Config) -> Result<Self> {
        let projections = &layer.projections;
        let (query, up) = match &projections.query {
            Query::Direct(query) => (query, None),
            Query::LowRank(query) => {
                let up = (Norm::of(upload, &query.norm)?, Linear::of(upload, &[&query.up])?);
                (&query.down, Some(up))
            }
        };
        Ok(Self {
            input_norm: Norm::of(upload, &layer.input_norm)?,
            of_query: query.weight.dims()[0],
            down: Linear::of(upload, &[query, &projections.kv_a])?,
            up,
            kv_norm: Norm::of(upload, &projections.kv_norm)?,
            latent: config.shape.kv_lora_rank as usize,
            row: config.shape.row_elems() as usize,
            out: Linear::of(upload, &[&projections.out])?,
            post_norm: Norm::of(upload, &layer.post_norm)?,
            feed: match &layer.mlp {
                Either::Dense(mlp) => Feed::Dense(Box::new(Mlp::of(upload, mlp)?)),
                Either::Experts(experts) => Feed::Experts(Box::new(Experts::of(upload, experts)?)),
            },
        })
    }

    /// `[T, hidden]` to the same, in f32.
    pub fn forward(&self, x: Tensor<2>, layer: usize, step: &mut Step<'_>) -> Result<Tensor<2>> {
        let dtype = self.down.dtype();
        let both = self.down.forward(self.input_norm.forward(x.clone()).cast(dtype));
        let query = both.clone().narrow(1, 0, self.of_query);
        let mut query = match &self.up {
            Some((norm, up)) => up.forward(norm.forward(query).cast(dtype)),
            None => query,
        };
        if let Some(factors) = &step.factors {
            query = (query.cast(DType::F32) * factors.clone()).cast(dtype);
        }
        let kv_a = both.narrow(1, self.of_query, self.row);
        let kv_c = self.kv_norm.forward(kv_a.clone().narrow(1, 0, self.latent)).cast(dtype);
        step.times.end(Part::Burn, step.device);
        let attended = step.cache.attend(layer, query, kv_c, kv_a).map_err(of_burn)?;
        step.times.end(Part::Ours, step.device);

        let scaled = |x: Tensor<2>| if step.residuals == 1.0 { x } else { x * step.residuals };
        let x = x + scaled(self.out.forward(attended).cast(DType::F32));
        let normed = self.post_norm.forward(x.clone());
        let add = match &self.feed {
            Feed::Dense(mlp) => mlp.forward(normed.cast(dtype)),
            Feed::Experts(experts) => {
                let low = normed.clone().cast(dtype);
                experts.forward(normed, &low)?
            }
        };
        Ok(x + scaled(add))
    }
}

/// An error of wgpu-mla-burn.
pub fn of_burn(error: wgpu_mla_burn::Error) -> Error {
    match error {
        wgpu_mla_burn::Error::Mla(error) => error.into(),
        other => Error::Engine(other.to_string()),
    }
}
