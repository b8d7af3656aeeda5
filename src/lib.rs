//! Multi-head Latent Attention (MLA) decode on any GPU: paged, split-KV with LSE merge, FP8 caches.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod backend;
pub mod caps;
#[cfg(feature = "wgpu")]
mod compose;
pub mod cpu;
mod dtype;
mod error;
#[cfg(feature = "wgpu")]
pub mod gpu;
#[cfg(feature = "wgpu")]
mod kernel;
pub mod layer;
pub mod ops;
mod pages;
pub mod plan;
pub mod reference;
mod shape;
pub mod tables;
#[cfg(feature = "wgpu")]
mod unroll;

pub use backend::Backend;
pub use caps::{Caps, DeviceKind};
pub use dtype::{Calibration, Dtype, E4M3_MAX, calibrate_k_scale, count_saturated, e4m3_decode, e4m3_encode};
pub use error::{Error, Result};
pub use layer::{KvView, Layer, LseBase, Query, View};
pub use ops::{AppendLayer, AppendSpec, MergeStates, MergeStatesSpec, check_copies};
pub use pages::{Append, AppendBatch, BlockTable, Csr, PagePool, SeqId};
pub use plan::{Batch, Plan, Policy, SharedPrefix, Tiling, Visibility};
pub use shape::{KvSpec, MlaShape, MlaSpec, SUPPORTED_DIMS, softmax_scale};
pub use tables::{Capacity, PageTable, csr_seq_lens, write_tables};

#[cfg(feature = "wgpu")]
pub use wgpu;
