//! The batch of a step.

use super::expanded::ExpandedPrefix;
use crate::plan::SharedPrefix;
use crate::plan::tables::PageTable;

/// One step's batch of an [`MlaLayer`](super::MlaLayer).
#[derive(Debug, Clone, Copy)]
pub struct LayerBatch<'a> {
    /// Tokens of each sequence in the cache, this step's new ones included.
    pub seq_lens: &'a [i32],
    /// Where each sequence's query tokens begin; one entry more than `seq_lens`. A sequence's query tokens are its last ones.
    pub query_start_loc: &'a [i32],
    /// The slot of each query token's row, `page * page_size + offset`; negative for a token that is in the cache already.
    pub slot_mapping: &'a [i64],
    /// The pages of each sequence.
    pub pages: PageTable<'a>,
    /// Groups of sequences that share a prefix. Only sequences that are decoded make use of them.
    pub shared_prefixes: &'a [SharedPrefix],
    /// Prefixes that are kept as keys and values, for those of their sequences that are decoded; these have no part in `shared_prefixes`
    /// then. Where it costs less, and [`SplitPolicy`](crate::SplitPolicy) is not `FixedTokens`, a layer attends such a prefix in absorbed
    /// form instead, in the sequences' pages: on an H100, a prefix of 8192 tokens of fewer than some 35 sequences through Vulkan, 45
    /// through CUDA.
    pub expanded: &'a [ExpandedPrefix],
}
