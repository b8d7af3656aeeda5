//! Multi-head Latent Attention (MLA) on any GPU: paged split-KV decode with FP8 caches, prefill, and the layer around them.
//!
//! A cache row is one latent of `L` elements and one rotary key of `R` elements a token, shared by all `H` heads. A decode attends these
//! rows in absorbed form: `s = softmax_scale * (q . k)`, `out = sum softmax(s) * latent` (DeepSeek-V2, arXiv:2405.04434). Batches are
//! ragged. The keys of a sequence are split over workgroups, and partial results are merged by log-sum-exp (FlashDecoding).
//!
//! # On a GPU
//!
//! 64 sequences of 8192 tokens, 16 heads, a bf16 cache:
//!
#![cfg_attr(feature = "wgpu", doc = "```no_run")]
#![cfg_attr(not(feature = "wgpu"), doc = "```ignore")]
//! use wgpu_mla::{Batch, Device, Dtype, KvSpec, MlaDecode, MlaDecodeArgs, MlaShape, PagePool, Plan, SplitPolicy, gpu::Gpu};
//!
//! # fn main() -> wgpu_mla::Result<()> {
//! let gpu = Gpu::new()?; // or `Gpu::on(&adapter, &device, &queue)`: your own
//! let shape = MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 };
//! let kv = KvSpec { layout: Dtype::Bf16.into(), page_size: 64, num_pages: 64 * 128 };
//! let spec = MlaDecode { shape, kv, query: Dtype::Bf16, out: Dtype::Bf16 };
//!
//! // Once a model: selects and compiles a kernel variant. `mla.why()` says which.
//! let mla = gpu.compile(spec)?;
//!
//! // Once a layer: checks and binds its buffers.
//! let [q, cache] = [gpu.buffer(spec.query_bytes(64))?, gpu.buffer(spec.cache_bytes())?];
//! let [out, lse] = [gpu.buffer(spec.out_bytes(64))?, gpu.buffer(spec.lse_bytes(64))?];
//! let scale = wgpu_mla::softmax_scale(128, 64, 40.0, 1.0)?;
//! let layer = mla.bind(&MlaDecodeArgs::dense(&spec, &q, &cache, &out, &lse, scale), 64)?;
//!
//! // Once a step, for all layers: pages, plan, upload.
//! let mut pool = PagePool::new(kv)?;
//! let seqs: Vec<_> = (0..64).map(|_| pool.add()).collect();
//! pool.append_batch(&seqs.iter().map(|&seq| (seq, 8192)).collect::<Vec<_>>())?;
//! let (lens, starts) = (pool.seq_lens(&seqs)?, wgpu_mla::query_start_loc(&[1; 64])?);
//! let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&lens, &starts), SplitPolicy::Auto)?;
//! let mut step = mla.step(Default::default())?;
//! mla.prepare(&mut step, (&plan, pool.block_table(&seqs, -1)?.page_table()))?;
//!
//! // Every layer: `run` submits, `record` adds to your encoder.
//! let mut encoder = gpu.device().create_command_encoder(&Default::default());
//! mla.record(&mut encoder, &step, &layer)?;
//! gpu.queue().submit([encoder.finish()]);
//! # Ok(()) }
//! ```
//!
//! [`AnyBackend::best`]`(&spec)` in place of `Gpu::new()?` takes the best of CUDA, wgpu and the CPU that is here; the last three lines are
//! then `mla.run(&step, &layer)?`. All else stays as it is.
//!
//! # Backends
//!
//! | module | runs on | commands go to |
//! |---|---|---|
//! | [`gpu`], feature `wgpu` (default) | Vulkan, Metal, DX12, WebGPU | the host's encoder or compute pass |
//! | [`cuda`], feature `cuda` | NVIDIA, through the driver; no toolkit is needed | the host's stream; may be captured in a graph |
//! | [`cpu`] | threads | - |
//!
//! # Ops
//!
//! Each op is compiled, prepared, bound and recorded as above; [`Device::once`] does all four. [`ops`] has them all.
//!
//! | op | in vLLM | in FlashInfer |
//! |---|---|---|
//! | [`MlaDecode`] | an MLA backend's decode (FlashMLA) | `BatchMLAPagedAttentionWrapper.run` |
//! | [`MlaPrefill`] | `flash_attn_varlen_func` of the prefill | `BatchPrefillWithRaggedKVCacheWrapper.run` |
//! | [`MlaLayer`] | RoPE, then `MLACommonImpl.forward` | |
//! | [`MlaExpand`] | | |
//! | [`KvAppend`], [`RopeAppend`] | `concat_and_cache_mla`; with RoPE before it | `append_paged_mla_kv_cache` |
//! | [`KvGather`] | `cp_gather_cache`, `gather_and_maybe_dequant_cache` | |
//! | [`ReorgKvCache`] | `reorg_kvcache` | |
//! | [`KvCopyPages`] | `copy_blocks_mla` | |
//! | [`KvCalibrate`] | the `k_scale` of `calculate_kv_scales` | |
//! | [`Rope`] | `rotary_embedding` | `apply_rope_with_cos_sin_cache` |
//! | [`HeadProject`] | the `bmm` with `W_UK_T` and `W_UV` | |
//! | [`IndexerLogits`] | `fp8_paged_mqa_logits` (DeepGEMM) | |
//! | [`MergeState`], [`MergeStates`] | `merge_attn_states`, `dcp_lse_combine` | `merge_state`, `merge_states` |
//! | [`CorrectAttnOut`] | `correct_attn_out` | |
//! | [`IndexerAppend`], [`IndexerQuery`] | `indexer_k_quant_and_cache`, with its LayerNorm, RoPE and Hadamard; the same of queries | |
//! | [`TopK`] | `top_k_per_row` | `top_k` |
//!
//! [`Shares`] says which rank holds which token where a context is sharded over devices (decode context parallelism).
//!
//! [`PagePool`] hands out pages: `block_table`, `slot_mapping`, forks with copy-on-write. [`Plan`] is FlashInfer's `plan`: it turns
//! `seq_lens` and `query_start_loc` into work items on the host, once a step for all layers.
//!
//! # On the CPU
//!
//! The same calls, one sequence of 40 tokens:
//!
//! ```
//! use wgpu_mla::{Batch, Device, Dtype, KvSpec, MlaDecode, MlaDecodeArgs, MlaShape, PageTable, Plan, SplitPolicy, cpu::Cpu};
//!
//! # fn main() -> wgpu_mla::Result<()> {
//! let shape = MlaShape { num_heads: 6, kv_lora_rank: 256, qk_rope_head_dim: 32 };
//! let kv = KvSpec { layout: Dtype::F32.into(), page_size: 16, num_pages: 3 };
//! let spec = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
//! let cpu = Cpu::new();
//! let (q, cache) = (cpu.buffer(spec.query_bytes(1))?, cpu.buffer(spec.cache_bytes())?);
//! let (out, lse) = (cpu.buffer(spec.out_bytes(1))?, cpu.buffer(spec.lse_bytes(1))?);
//! cpu.upload(&cache, 0, &Dtype::F32.encode_all(&[0.5; 3 * 16 * 288]))?;
//!
//! let mla = cpu.compile(spec)?;
//! let layer = mla.bind(&MlaDecodeArgs::dense(&spec, &q, &cache, &out, &lse, 0.1), 1)?;
//! let plan = Plan::new(&spec, &mla.tiling(), &Batch::new(&[40], &[0, 1]), SplitPolicy::Auto)?;
//! let mut step = mla.step(Default::default())?;
//! mla.prepare(&mut step, (&plan, PageTable::Dense { block_table: &[2, 0, 1], max_pages: 3 }))?;
//! mla.run(&step, &layer)?;
//!
//! // The average of equal latents is that latent; 40 logits of 0 have an LSE of ln 40.
//! let (out, lse) = (cpu.download(&out, spec.out_bytes(1))?, cpu.download(&lse, spec.lse_bytes(1))?);
//! assert!(Dtype::F32.decode_all(&out).iter().all(|x| (x - 0.5).abs() < 1e-6));
//! assert!(Dtype::F32.decode_all(&lse).iter().all(|x| (x - 40f32.ln()).abs() < 1e-5));
//! # Ok(()) }
//! ```
//!
//! # Threads
//!
//! Devices, buffers, compiled ops, steps, bindings, plans and pools are `Send + Sync`, in generic code too: [`Device`] and [`Kernel`] ask
//! for it. A step is prepared through `&mut`, all else goes through `&`, so that threads share one compiled op, each with a step, a binding
//! and arrays of its own, or with a step in common. What an op records is one unit, whatever it keeps between its kernels: on the CPU and
//! on CUDA, where an op runs or is launched as it is recorded, threads that record one [`MlaLayer`] take turns; on wgpu they record in
//! parallel, each into an encoder of its own, and the encoders run in the order of their submits. Where commands of several threads use one
//! buffer, the host orders them.
//!
//! On `wasm32` wgpu's objects stay on their thread; there the traits ask for nothing: [`WasmNotSendSync`].
//!
//! # Errors
//!
//! What a caller hands over is checked before anything is recorded: [`Error`] says what is wrong and what to do about it. What is
//! compiled in a browser is an exception: there wgpu reports later, see `gpu::checked`.
//!
#![cfg_attr(not(feature = "wgpu"), doc = "[`gpu`]: https://docs.rs/wgpu-mla/latest/wgpu_mla/gpu/index.html")]
#![cfg_attr(
    not(feature = "cuda"),
    doc = "[`cuda`]: https://docs.rs/wgpu-mla/latest/wgpu_mla/cuda/index.html"
)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![cfg_attr(docsrs, feature(doc_cfg))]

// It waits for its device, which a browser does not allow.
#[cfg(not(target_arch = "wasm32"))]
pub mod any;
mod base;
mod cache;
pub mod communicator;
mod context_parallel;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "wgpu")]
pub mod gpu;
pub mod layer;
pub mod ops;
mod pages;
pub mod plan;

#[cfg(not(target_arch = "wasm32"))]
pub use any::AnyBackend;
pub use base::dtype::{
    Calibration, Dtype, E4M3_MAX, calibrate_k_scale, count_saturated, e4m3_decode, e4m3_encode,
};
pub use base::error::{Error, Result};
pub use base::mask::Mask;
pub use base::threads::WasmNotSendSync;
pub use base::view::View;
pub use cache::decode_spec::{MlaDecode, softmax_scale};
pub use cache::{KvLayout, KvSpec, KvView, MlaShape, SUPPORTED_DIMS, Scales, Section, Slabs, TokenLayout};
pub use communicator::form::CombineForm;
pub use context_parallel::{ContextParallel, ContextParallelSpec};
#[cfg(feature = "wgpu")]
pub use gpu::{Caps, DeviceKind};
pub use layer::backend::Backend;
pub use layer::kv_b_proj::{E4m3Weights, KvBProj, QuantisationError, ScaleSharing};
pub use layer::{
    ExpandBatch, Expanded, ExpandedPrefix, GuardPlace, LayerArrays, LayerBatch, LayerCapacity, LayerFacts,
    LayerGuard, LayerIndexer, LayerOptions, LayerPlan, ListPlan, MlaExpand, MlaExpandArgs, MlaLayer,
    MlaLayerArgs, OwnSelection, PageCopies, Selection,
};
pub use ops::rope_frequencies::{RopeFrequencies, Yarn};
pub use ops::*;
pub use pages::{Append, AppendBatch, BlockTable, Csr, PagePool, SeqId};
pub use plan::shares::Shares;
pub use plan::tables::{Capacity, PageTable, csr_seq_lens, query_start_loc, write_tables};
pub use plan::{Batch, Plan, SharedPrefix, SlabPlan, SlabTable, SparseBatch, SplitPolicy, Tiling};

#[cfg(feature = "wgpu")]
pub use wgpu;

#[cfg(all(doctest, feature = "wgpu"))]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(all(doctest, feature = "wgpu"))]
#[doc = include_str!("../docs/using.md")]
struct Using;
