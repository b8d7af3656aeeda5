//! What a layer attends of its cache: all tokens, or the slots of a list that this layer or one before it made.

use super::MlaLayer;
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::view::View;
use crate::cache::KvView;
use crate::ops::op::Use;
use crate::ops::{IndexFormat, IndexSpec};

/// The lightning indexer of a layer that chooses what it attends: [`LayerOptions::indexer`](super::LayerOptions::indexer). Layers that only
/// reuse the lists of others need none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerIndexer {
    /// How index keys and queries are rotated and quantised, from the model's config.
    pub format: IndexFormat,
    /// `Hi`, index heads: 1 to 64.
    pub num_heads: u32,
    /// Dtype of [`OwnSelection::k`] and [`OwnSelection::q`]: f32, f16 or bf16.
    pub input: Dtype,
    /// Tokens of the longest sequence, for which a row of scores has room. 0: all slots of the pool, which may be far more.
    pub max_seq_len: u32,
    /// Bytes of workspace that scores may take, f32 `[rows, max_seq_len]`. Query tokens are scored in rounds of so many rows. 0: room for
    /// 64 rows, or [`LayerCapacity::decode_tokens`](super::LayerCapacity::decode_tokens) if these are fewer.
    pub logits_bytes: u64,
}

impl LayerIndexer {
    /// The index cache of a layer: its pages are those of the layer's block table.
    #[must_use]
    pub const fn index(&self, layer: &MlaLayer) -> IndexSpec {
        IndexSpec { format: self.format, page_size: layer.kv.page_size, num_pages: layer.kv.num_pages }
    }
}

/// What a layer attends in sequences of more than [`LayerOptions::topk`](super::LayerOptions::topk) tokens. Shorter ones are attended
/// whole, whatever stands here, with the bits of a layer without `topk`.
///
/// A list is i32 `[T, topk]`, a row for each query token of the batch: slots as [`Indices::slots`](crate::Indices::slots), at most
/// `topk`, then -1. Only rows of query tokens of the longer sequences mean anything: those of others may be written or not.
#[derive(Debug, Clone, Default)]
pub enum Selection<B> {
    /// All that it sees. A step with a sequence of more than `topk` tokens is refused where `topk` is not 0.
    #[default]
    All,
    /// The `topk` tokens that the layer's own indexer scores highest.
    Own(OwnSelection<B>),
    /// The list of an earlier layer's [`OwnSelection::indices`], for the same batch. The layer needs no index cache.
    Shared(View<B>),
}

/// The indexer of one layer. `T` is the number of query tokens of a batch. Offsets and strides are multiples of 8 elements, but for those
/// of `weights` and `indices`.
#[derive(Debug, Clone)]
pub struct OwnSelection<B> {
    /// `[T, 128]`, the index keys of the new tokens before their LayerNorm.
    pub k: View<B>,
    /// `[T, Hi, 128]`, the index queries before RoPE.
    pub q: View<B>,
    /// f32 `[T, Hi]`, the weights of the heads.
    pub weights: View<B>,
    /// f32 `[128]`, the weight of the keys' LayerNorm.
    pub norm_weight: B,
    /// f32 `[128]`, its bias.
    pub norm_bias: B,
    /// Its epsilon, such as 1e-6.
    pub norm_eps: f32,
    /// f32 `[max_position, 64]`, as [`crate::RopeFrequencies::cos_sin`] makes it. Unread by a format without RoPE.
    pub cos_sin: B,
    /// Positions in `cos_sin`.
    pub max_position: u32,
    /// The layer's index cache: [`LayerIndexer::index`], in the pages of the layer's block table, and in slabs where the layer's cache is.
    pub cache: KvView<B>,
    /// Factor of all weights: usually `(Hi * 128)^-1/2`.
    pub weight_scale: f32,
    /// i32 `[T, topk]`, as `View::dense(buffer, topk, 1)`: the list, which is written and outlives the layer. Its `head_stride` must be 1.
    pub indices: View<B>,
}

impl<B> OwnSelection<B> {
    fn map<'a, C>(&'a self, mut f: impl FnMut(Use, &'a B) -> Result<C>) -> Result<OwnSelection<C>> {
        Ok(OwnSelection {
            k: self.k.map(|buffer| f(Use::Read("selection.k"), buffer))?,
            q: self.q.map(|buffer| f(Use::Read("selection.q"), buffer))?,
            weights: self.weights.map(|buffer| f(Use::Read("selection.weights"), buffer))?,
            norm_weight: f(Use::Read("selection.norm_weight"), &self.norm_weight)?,
            norm_bias: f(Use::Read("selection.norm_bias"), &self.norm_bias)?,
            norm_eps: self.norm_eps,
            cos_sin: f(Use::Read("selection.cos_sin"), &self.cos_sin)?,
            max_position: self.max_position,
            cache: self.cache.map(|buffer| f(Use::Write("selection.cache"), buffer))?,
            weight_scale: self.weight_scale,
            indices: self.indices.map(|buffer| f(Use::Write("selection.indices"), buffer))?,
        })
    }
}

impl<B> Selection<B> {
    /// The same arrays of other handles.
    pub(super) fn map<'a, C>(&'a self, mut f: impl FnMut(Use, &'a B) -> Result<C>) -> Result<Selection<C>> {
        Ok(match self {
            Self::All => Selection::All,
            Self::Own(own) => Selection::Own(own.map(f)?),
            Self::Shared(list) => {
                Selection::Shared(list.map(|buffer| f(Use::Read("selection.indices"), buffer))?)
            }
        })
    }

    /// The list, which is written before it is read if it is the layer's own.
    pub(super) fn list(&self) -> Option<&View<B>> {
        match self {
            Self::All => None,
            Self::Own(own) => Some(&own.indices),
            Self::Shared(list) => Some(list),
        }
    }
}
