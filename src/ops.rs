//! Ops: the traits that describe one, and each op's spec, arguments and checks. An op is a plain value; [`Device::compile`] makes a
//! [`Compiled`] of it on the wgpu, CUDA or CPU backend. Each op's page has an example. `lib.rs` exports all that is `pub` here.

mod batch_tables;
pub(crate) mod composes;
mod correct_attn_out;
mod decode;
mod features;
pub(crate) mod guard;
mod head_project;
mod indexer;
mod indexer_append;
pub(crate) mod indexer_logits;
mod indexer_query;
mod kv_append;
mod kv_calibrate;
mod kv_copy_pages;
mod kv_gather;
mod merge_state;
mod merge_states;
pub(crate) mod mla_prefill;
pub(crate) mod op;
mod reorg_kvcache;
mod rope;
mod rope_append;
pub(crate) mod rope_frequencies;
mod samples;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod step_table;
mod top_k;
pub(crate) mod variants;

pub use batch_tables::{AppendsSlots, DeviceBatch};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use batch_tables::{Sequences, check_binding, no_slots, template};
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
pub(crate) use batch_tables::{Sequences, no_slots};
pub use correct_attn_out::{CorrectAttnOut, CorrectAttnOutArgs};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use decode::DecodeRequest;
pub(crate) use decode::Inputs as DecodeInputs;
pub use decode::{DecodeOptions, Indices, LseBase, MlaDecodeArgs, Query};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use features::Features;
pub use guard::{GuardCounts, GuardView};
pub use head_project::{
    HeadDims, HeadProject, HeadProjectArgs, WeightFormat, WeightOrder, WeightScales, WeightView,
};
pub(crate) use indexer::{INDEX_ROPE_DIM, INDEX_SHAPE, MOST_INDEX_HEADS};
pub use indexer::{IndexFormat, IndexSpec};
pub use indexer_append::{IndexerAppend, IndexerAppendArgs};
pub use indexer_logits::{
    IndexerLogits, IndexerLogitsArgs, IndexerLogitsBatch, IndexerLogitsCapacity, IndexerLogitsExtent,
};
pub use indexer_query::{IndexerQuery, IndexerQueryArgs, IndexerQueryBatch};
pub use kv_append::{KvAppend, KvAppendArgs};
pub use kv_calibrate::{CalibrationStats, KvCalibrate, KvCalibrateArgs};
pub use kv_copy_pages::{KvCopyPages, check_copies};
pub(crate) use kv_gather::Piece;
pub use kv_gather::{GatherBatch, GatherRange, KvGather, KvGatherArgs};
pub use merge_state::{MergeState, MergeStateArgs};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use merge_states::is_wide;
pub use merge_states::{MergeStates, MergeStatesArgs, MergeStatesExtent};
pub(crate) use mla_prefill::PrefillTiling;
pub use mla_prefill::{MlaPrefill, MlaPrefillArgs, PrefillExtent, PrefillOptions, PrefillSequence};
#[cfg(feature = "cuda")]
pub(crate) use op::Replay;
pub(crate) use op::Use;
pub use op::{Binding, Compiled, Device, Kernel, Op, Step};
pub use reorg_kvcache::{ReorgBatch, ReorgCapacity, ReorgChunk, ReorgExtent, ReorgKvCache, ReorgKvCacheArgs};
pub use rope::{Rope, RopeArgs, RopeLayout};
pub use rope_append::{RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent};
pub(crate) use top_k::{MOST_COLUMNS, Rows as TopKRows, UNKNOWN};
pub use top_k::{TopK, TopKArgs, TopKBatch, TopKCapacity, TopKExtent, TopKPages, TopKSlots};
pub(crate) use variants::Choice;
pub use variants::{Candidate, OpOptions};

/// Expands `$each!` with every op that has kernels of its own, by its path: `for_each_op!(each)` is `each! { wgpu_mla::MlaDecode, .. }`,
/// and `for_each_op!(each ..)` begins with the other words. [`MlaLayer`](crate::MlaLayer) and [`MlaExpand`](crate::MlaExpand) are made of
/// these.
///
/// ```
/// use wgpu_mla::{Op, for_each_op};
///
/// macro_rules! names {
///     ($($op:ty),*) => { [$(<$op>::NAME),*] };
/// }
/// assert!(for_each_op!(names).contains(&"kv_gather"));
/// ```
#[macro_export]
macro_rules! for_each_op {
    ($each:ident $($more:tt)*) => {
        $each! {
            $($more)*
            $crate::MlaDecode, $crate::MergeState, $crate::MergeStates, $crate::CorrectAttnOut, $crate::KvAppend, $crate::KvCopyPages,
            $crate::KvGather, $crate::ReorgKvCache, $crate::KvCalibrate, $crate::Rope, $crate::RopeAppend, $crate::HeadProject,
            $crate::MlaPrefill, $crate::IndexerAppend, $crate::IndexerQuery, $crate::IndexerLogits, $crate::TopK
        }
    };
}

pub(crate) use for_each_op;
