//! Operations: the trait that describes one, and each op's spec, arguments and checks. Pure: [`crate::gpu`], [`crate::cuda`] and
//! [`crate::cpu`] run them.

mod batch_tables;
mod decode;
mod head_project;
mod kv_append;
mod kv_calibrate;
mod kv_copy_pages;
mod kv_gather;
mod merge_attn_states;
mod merge_states;
pub(crate) mod mla_prefill;
pub(crate) mod op;
mod rope;
mod rope_append;
pub(crate) mod variants;

pub(crate) use batch_tables::Sequences;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use batch_tables::template;
pub use batch_tables::{AppendsSlots, DeviceBatch};
pub use decode::{DecodeOptions, Layer, LseBase, Query};
pub use head_project::{HeadDims, Project, ProjectSpec, WeightOrder, WeightView};
pub use kv_append::{AppendLayer, AppendSpec};
pub use kv_calibrate::{Calibrate, CalibrateSpec, CalibrationStats};
pub use kv_copy_pages::{CopySpec, check_copies};
pub(crate) use kv_gather::Piece;
pub use kv_gather::{Gather, GatherBatch, GatherRange, GatherSpec};
pub use merge_attn_states::{MergeAttnStatesSpec, MergeStates};
pub use merge_states::{MergeStatesSpec, SetsExtent, StateSets};
pub use mla_prefill::{
    Prefill, PrefillExtent, PrefillOptions, PrefillSequence, PrefillSpec, PrefillTiling, PrefillVisible,
};
pub use op::{Binding, Compiled, Device, Kernel, Op, Step, Use};
pub use rope::{Rope, RopeLayout, RopeSpec};
pub use rope_append::{RopeAppend, RopeAppendSpec};
pub use variants::{Candidate, Choice, OpOptions};
