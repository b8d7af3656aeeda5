//! Multi-head Latent Attention (MLA) decode on any GPU: paged, split-KV with LSE merge, FP8 caches.
//!
//! MLA keeps one latent row of `L + R` elements a token, shared by all `H` heads. In its absorbed form a head attends those
//! rows directly: `s = softmax_scale * (q . k)`, `out = sum softmax(s) * latent`, where the value is the first `L` elements of
//! the key (DeepSeek-V2, arXiv:2405.04434). This crate runs that step over a paged cache, for a ragged batch, with the keys of
//! a sequence split over workgroups and the partial results merged by their log-sum-exp (FlashDecoding).
//!
//! - `gpu` is the wgpu backend, on the host's own device and encoder; `cuda` the CUDA backend, on the host's stream; [`cpu`] is the
//!   same on host memory. `AnyBackend::best` finds the best of them that is here.
//! - [`Device::compile`] makes a [`Compiled`] of an op, such as a decode ([`MlaDecode`]): `prepare` a step, `bind` a layer, `record` it.
//!   These are the same for every op of [`ops`] and every backend.
//! - [`PagePool`] owns page ids; [`Plan`] turns a batch into work items; [`MlaDecodeArgs`] describes one layer's buffers.
//!
//! ```
//! use wgpu_mla::{Batch, Capacity, Device, Dtype, KvSpec, MlaDecodeArgs, MlaShape, MlaDecode, PagePool, Plan, SplitPolicy, cpu::Cpu};
//!
//! # fn main() -> wgpu_mla::Result<()> {
//! let spec = MlaDecode {
//!     shape: MlaShape { num_heads: 6, kv_lora_rank: 256, qk_rope_head_dim: 32 },
//!     kv: KvSpec { dtype: Dtype::F32, page_size: 16, num_pages: 4 },
//!     query: Dtype::F32,
//!     out: Dtype::F32,
//! };
//! // `AnyBackend::best(&spec)` in place of `Cpu::new()` runs the same on a GPU, if there is one.
//! let backend = Cpu::new();
//! let (q, kv) = (backend.buffer(6 * 288 * 4)?, backend.buffer(4 * 16 * 288 * 4)?);
//! let (out, lse) = (backend.buffer(6 * 256 * 4)?, backend.buffer(6 * 4)?);
//! backend.upload(&kv, 0, bytemuck::cast_slice(&[0.5f32; 4 * 16 * 288]))?;
//!
//! // One sequence of 40 tokens, one query token.
//! let mut pool = PagePool::new(spec.kv)?;
//! let seq = pool.add();
//! pool.append(seq, 40)?;
//! let (table, lens) = (pool.block_table(&[seq], -1)?, pool.seq_lens(&[seq])?);
//!
//! let mla = backend.compile(spec)?;
//! let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&lens, &[0, 1]), SplitPolicy::Auto)?;
//! let mut step = mla.step(Capacity::default())?;
//! mla.prepare(&mut step, (&plan, table.page_table()))?;
//! let binding = mla.bind(&MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.1), 1)?;
//! mla.run(&step, &binding)?;
//!
//! // All values are 0.5, so their average is; 40 equal logits of 0 have a log-sum-exp of ln 40.
//! let lse = Dtype::F32.decode_all(&backend.download(&lse, 6 * 4)?);
//! let out = Dtype::F32.decode_all(&backend.download(&out, 6 * 256 * 4)?);
//! assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-6));
//! assert!(lse.iter().all(|x| (x - 40f32.ln()).abs() < 1e-5));
//! # Ok(()) }
//! ```
#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![cfg_attr(docsrs, feature(doc_cfg))]

// It waits for its device, which a browser does not allow.
#[cfg(not(target_arch = "wasm32"))]
pub mod any;
mod backend;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
mod error;
#[cfg(feature = "wgpu")]
pub mod gpu;
mod kv_b_proj;
pub mod layer;
mod mask;
pub mod ops;
mod pages;
pub mod plan;
mod rope;
mod shape;
pub mod tables;
mod view;

#[cfg(not(target_arch = "wasm32"))]
pub use any::AnyBackend;
pub use backend::Backend;
pub use dtype::{Calibration, Dtype, E4M3_MAX, calibrate_k_scale, count_saturated, e4m3_decode, e4m3_encode};
pub use error::{Error, Result};
#[cfg(feature = "wgpu")]
pub use gpu::{Caps, DeviceKind};
pub use kv_b_proj::KvBProj;
pub use layer::{
    ExpandBatch, Expanded, ExpandedPrefix, LayerBatch, LayerCapacity, LayerFacts, LayerOptions, LayerPlan,
    MlaExpand, MlaExpandArgs, MlaLayer, MlaLayerArgs,
};
pub use mask::Mask;
pub use ops::{
    Binding, CalibrationStats, Candidate, Compiled, DecodeOptions, Device, DeviceBatch, GatherBatch,
    GatherRange, HeadDims, HeadProject, HeadProjectArgs, Kernel, KvAppend, KvAppendArgs, KvCalibrate,
    KvCalibrateArgs, KvCopyPages, KvGather, KvGatherArgs, LseBase, MergeState, MergeStateArgs, MergeStates,
    MergeStatesArgs, MergeStatesExtent, MlaDecodeArgs, MlaPrefill, MlaPrefillArgs, Op, OpOptions,
    PrefillExtent, PrefillOptions, PrefillSequence, Query, Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch,
    RopeAppendExtent, RopeArgs, RopeLayout, Step, WeightOrder, WeightView, check_copies,
};
pub use pages::{Append, AppendBatch, BlockTable, Csr, PagePool, SeqId};
pub use plan::{Batch, Plan, SharedPrefix, SplitPolicy, Tiling};
pub use rope::{RopeFrequencies, Yarn};
pub use shape::{KvSpec, MlaDecode, MlaShape, SUPPORTED_DIMS, softmax_scale};
pub use tables::{Capacity, PageTable, csr_seq_lens, query_start_loc, write_tables};
pub use view::{KvView, View};

#[cfg(feature = "wgpu")]
pub use wgpu;

#[cfg(all(doctest, feature = "wgpu"))]
#[doc = include_str!("../README.md")]
struct Readme;
