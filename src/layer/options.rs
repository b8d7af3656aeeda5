//! The options that a layer is compiled with, and what the compiled layer tells its host.

use super::MlaLayer;
use super::prefix_cost::pays;
use super::selection::LayerIndexer;
use crate::base::error::{Error, Result};
use crate::ops::composes::PrefixCost;
use crate::plan::Tiling;

/// How large a step may be, or how large a step a binding has room for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LayerCapacity {
    /// Query tokens in all.
    pub tokens: u32,
    /// How many of a batch's first query tokens may be attended in absorbed form: each takes `2 * H * L` elements of workspace. These are
    /// decodes and, with [`LayerOptions::topk`], all query tokens of sequences that are longer.
    pub decode_tokens: u32,
    /// Rows of [`MlaLayerArgs::expanded`](super::MlaLayerArgs::expanded), the prefixes that decodes share and that are kept as keys and
    /// values; usually 0, without any.
    pub prefix_rows: u32,
    /// Positions that a step reaches: one more than its last. A binding has those of its own
    /// [`MlaLayerArgs::max_position`](super::MlaLayerArgs::max_position), whatever stands here.
    pub positions: u32,
    /// Query tokens, up to the last that attends the slots of a list. A binding has room for all of them or none, as its
    /// [`MlaLayerArgs::selection`](super::MlaLayerArgs::selection) says, whatever stands here.
    pub listed_tokens: u32,
}

impl LayerCapacity {
    /// `num_absorbed`: query tokens that are attended in absorbed form, wherever they are in the batch.
    ///
    /// # Errors
    /// [`Error::Capacity`] that says what is too small.
    pub(super) fn check_holds(&self, used: &Self, num_absorbed: u32) -> Result<()> {
        let (decode_tokens, decode_cure) = if num_absorbed <= self.decode_tokens {
            let cure = "put decodes first (MlaLayer::decodes_first), then sequences of more than LayerOptions::topk tokens";
            (used.decode_tokens, cure)
        } else {
            (num_absorbed, "compile the layer with more LayerCapacity::decode_tokens")
        };
        for (what, need, limit, cure) in [
            (
                "LayerCapacity::tokens",
                used.tokens,
                self.tokens,
                "compile the layer with more LayerCapacity::tokens",
            ),
            ("LayerCapacity::decode_tokens", decode_tokens, self.decode_tokens, decode_cure),
            (
                "LayerCapacity::prefix_rows",
                used.prefix_rows,
                self.prefix_rows,
                "compile the layer with more LayerCapacity::prefix_rows",
            ),
        ] {
            if need > limit {
                return Err(Error::Capacity { what, got: limit.into(), need: need.into(), cure });
            }
        }
        Ok(())
    }
}

/// Choices of an [`MlaLayer`]. What is compiled owns a workspace for its capacity, which all layers of the model share, one after the
/// other. All that changes with a step is in the [`Step`](crate::Step), so that several may be prepared before what was recorded of them is
/// submitted, and by several threads: see [the crate's page](crate#threads).
#[derive(Debug, Clone, Default)]
pub struct LayerOptions {
    /// Forces a kernel variant of the decode by name, such as one that rounds no softmax weights.
    pub variant: Option<String>,
    /// The largest step, for which the workspace has room.
    pub capacity: LayerCapacity,
    /// Pages of a slab, where the pool is in several: those of the [`KvView::in_slabs`](crate::KvView::in_slabs) that it is bound to. 0: a
    /// pool in one buffer.
    pub slab_pages: u32,
    /// Decodes that begin with a shared prefix: [`DecodeOptions::shared_sequences`](crate::DecodeOptions::shared_sequences).
    pub shared_sequences: u32,
    /// Tokens that a query token of a longer sequence attends, such as 2048; the others attend all. 0: there is no limit. Such layers have
    /// a [`Selection`](super::Selection) of their own or share one.
    pub topk: u32,
    /// The indexer of layers whose selection is their own. `None`: all lists are shared.
    pub indexer: Option<LayerIndexer>,
    /// Whether its kernels count what rounding loses, for a [`LayerGuard`](super::LayerGuard). On wgpu its append then binds nine storage
    /// buffers, as devices of [`gpu::wanted`](crate::gpu::wanted) do.
    pub guard: bool,
}

/// What a compiled [`MlaLayer`] tells its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerFacts {
    /// How its decode cuts work.
    pub tiling: Tiling,
    /// Bytes of the keys and values of prefills: never more than [`MlaLayer::workspace_bytes`], nor than all tokens of the pool take.
    pub workspace_bytes: u64,
    /// Tokens of prompts whose keys and values are in the workspace at a time; longer prompts are attended in chunks.
    pub workspace_rows: u32,
    /// What a step may have: that of [`LayerOptions::capacity`], with `decode_tokens` at most `tokens`.
    pub capacity: LayerCapacity,
    /// Query tokens that an indexer scores at a time; 0 without [`LayerOptions::indexer`].
    pub round_tokens: u32,
    pub(super) spec: MlaLayer,
    pub(super) prefix_cost: PrefixCost,
}

impl LayerFacts {
    /// Whether the decodes of `sequences` sequences, of a query token each, attend an [`ExpandedPrefix`](super::ExpandedPrefix) of `tokens`
    /// tokens through its keys and values. If not, they attend it in absorbed form, which costs less, and it need not be expanded. With
    /// [`SplitPolicy::FixedTokens`](crate::SplitPolicy::FixedTokens) they always attend it expanded.
    #[must_use]
    pub fn attends_expanded(&self, sequences: u32, tokens: u32) -> bool {
        pays(&self.prefix_cost, &self.spec, &self.tiling, tokens, [(sequences, 1)].into_iter(), true)
    }
}
