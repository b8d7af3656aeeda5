//! The projections of a lightning indexer.

use candle_core::Tensor;

use crate::attention::IndexRows;
use crate::indexer::{INDEX_DIM, IndexerConfig};
use crate::layer::{Linear, values};
use crate::weights::{Dim, Weights};
use crate::{Config, Result};

pub struct IndexProjections {
    query: Linear,
    key: Linear,
    weights: Linear,
}

impl IndexProjections {
    /// `rank`: of the layer's queries, which are of low rank.
    pub fn take(
        weights: &mut Weights,
        name: &str,
        config: &Config,
        indexer: &IndexerConfig,
        rank: Dim,
    ) -> Result<Self> {
        let (hidden, key) = (Dim(config.hidden_size, "hidden_size"), Dim(INDEX_DIM, "index_head_dim"));
        let heads = Dim(indexer.num_heads as usize, "index_n_heads");
        let queries = Dim(heads.0 * INDEX_DIM, "index_n_heads * index_head_dim");
        Ok(Self {
            query: Linear::take(weights, &format!("{name}.wq_b"), queries, rank)?,
            key: Linear::take(weights, &format!("{name}.wk"), key, hidden)?,
            weights: Linear::take(weights, &format!("{name}.weights_proj"), heads, hidden)?,
        })
    }

    /// From a layer's normed input `[T, hidden]`, and the normed input of its queries' second projection, `[T, rank]`.
    pub fn rows(&self, x: &Tensor, low_rank: &Tensor) -> Result<IndexRows> {
        Ok(IndexRows {
            q: values(&self.query.of(low_rank)?)?,
            k: values(&self.key.of(x)?)?,
            weights: values(&self.weights.of(x)?)?,
        })
    }
}

/// Weight and bias of the LayerNorm of index keys, `[128]` each.
pub struct IndexNorm {
    pub weight: Vec<f32>,
    pub bias: Vec<f32>,
}

impl IndexNorm {
    /// transformers gives it this one, whatever the config says.
    pub const EPS: f32 = 1e-6;

    pub fn take(weights: &mut Weights, name: &str) -> Result<Self> {
        let size = [Dim(INDEX_DIM, "index_head_dim")];
        let mut take = |part: &str| values(&weights.take(&format!("{name}.k_norm.{part}"), &size)?);
        Ok(Self { weight: take("weight")?, bias: take("bias")? })
    }
}
