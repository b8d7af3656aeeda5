//! The ops that a layer is made of, and their workspace.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::prefix_cost::PrefixCost;
use super::workspace::Workspace;
use super::{LayerCapacity, LayerOptions, MlaLayer};
use crate::ops::op::{Compiled, Device, Kernel, Step};
use crate::ops::{
    DecodeOptions, HeadProject, KvAppend, KvGather, MergeState, MergeStates, MlaPrefill, PrefillOptions,
    RopeAppend,
};
use crate::{MlaDecode, Result};

/// A device that runs the ops of a layer itself.
pub trait Composes:
    Device
    + Kernel<KvAppend>
    + Kernel<RopeAppend>
    + Kernel<HeadProject>
    + Kernel<MlaDecode>
    + Kernel<KvGather>
    + Kernel<MlaPrefill>
    + Kernel<MergeState>
    + Kernel<MergeStates>
{
    /// A guard that is held while a step is recorded. Where recording an op runs it, or launches it on the device's stream, the guard keeps
    /// other threads from using the layer's workspace in between. An encoder belongs to one thread, so on wgpu it guards nothing.
    type Turn<'a>
    where
        Self: 'a;

    /// Takes the guard. `of_layer` is a mutex of the layer that nothing else locks.
    fn turn<'a>(&'a self, of_layer: &'a Mutex<()>) -> Self::Turn<'a>;

    /// The costs of expanded prefixes, for a decode with or without tensor cores and a prefill in tiles of `tile_queries` query tokens.
    fn prefix_cost(on_tensor_cores: bool, tile_queries: u32) -> PrefixCost;
}

impl Composes for crate::cpu::Cpu {
    type Turn<'a> = MutexGuard<'a, ()>;

    fn turn<'a>(&'a self, of_layer: &'a Mutex<()>) -> MutexGuard<'a, ()> {
        of_layer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It multiplies no missing rows of a tile.
    fn prefix_cost(_: bool, _: u32) -> PrefixCost {
        PrefixCost::ARITHMETIC
    }
}
#[cfg(feature = "cuda")]
impl Composes for crate::cuda::Cuda {
    type Turn<'a> = crate::cuda::Taken<'a>;

    /// The guard is the stream's, so that it covers captured graphs of the layer too.
    fn turn<'a>(&'a self, _: &'a Mutex<()>) -> crate::cuda::Taken<'a> {
        crate::cuda::Cuda::turn(self)
    }

    fn prefix_cost(on_tensor_cores: bool, tile_queries: u32) -> PrefixCost {
        if on_tensor_cores { PrefixCost::CUDA } else { PrefixCost::ARITHMETIC }.with_tiles(tile_queries)
    }
}
#[cfg(feature = "wgpu")]
impl Composes for crate::gpu::Gpu {
    type Turn<'a> = ();

    fn turn(&self, _: &Mutex<()>) {}

    fn prefix_cost(on_tensor_cores: bool, tile_queries: u32) -> PrefixCost {
        if on_tensor_cores { PrefixCost::MATRICES } else { PrefixCost::ARITHMETIC }.with_tiles(tile_queries)
    }
}

/// With a rotary part, or without.
#[derive(Debug)]
pub(super) enum Append<R, P> {
    Rotated(R),
    Plain(P),
}

/// The ops of a layer, and their workspace. All layers of a model share it.
#[derive(Debug)]
pub struct Ops<D: Composes> {
    pub(super) append: Append<Compiled<RopeAppend, D>, Compiled<KvAppend, D>>,
    pub(super) absorb: Compiled<HeadProject, D>,
    pub(super) k_up: Compiled<HeadProject, D>,
    pub(super) v_up: Compiled<HeadProject, D>,
    pub(super) decode: Compiled<MlaDecode, D>,
    pub(super) gather: Compiled<KvGather, D>,
    pub(super) prefill: Compiled<MlaPrefill, D>,
    pub(super) merge: Compiled<MergeState, D>,
    /// `None` where the capacity has no room for prefixes.
    pub(super) prefixes: Option<Prefixes<D>>,
    pub(super) prefix_cost: PrefixCost,
    /// The only step of `merge`, which has nothing that changes with a step.
    pub(super) merge_step: Step<MergeState, D>,
    pub(super) space: Workspace<D::Buffer>,
    /// For [`Composes::turn`].
    pub(super) turn: Mutex<()>,
    pub(super) capacity: LayerCapacity,
    /// 0 for a pool in one buffer.
    pub(super) slab_pages: u32,
}

/// The ops of decodes that attend expanded prefixes.
#[derive(Debug)]
pub(super) struct Prefixes<D: Composes> {
    pub(super) prefill: Compiled<MlaPrefill, D>,
    pub(super) merge: Compiled<MergeStates, D>,
    /// Sets of partial results: one of what each decode attends alone, and one for each part of a prefix.
    pub(super) num_sets: u32,
}

impl<D: Composes> Ops<D> {
    pub(super) fn new(device: &D, spec: &MlaLayer, options: &LayerOptions) -> Result<Self> {
        let capacity = options.capacity;
        let capacity =
            LayerCapacity { decode_tokens: capacity.decode_tokens.min(capacity.tokens), ..capacity };
        let (dims, dtype, weight) = (spec.dims(), spec.dtype, spec.weight);
        let decode = DecodeOptions {
            variant: options.variant.clone(),
            query_tokens: spec.decode_threshold,
            shared_sequences: options.shared_sequences,
            ..DecodeOptions::default()
        };
        let decode = device.compile_with(spec.mla(), &decode)?;
        let has_prefixes = capacity.prefix_rows > 0 && capacity.decode_tokens > 0;
        let prefixes = if has_prefixes { Some(Prefixes::new(device, spec, &capacity)?) } else { None };
        let prefill = device.compile(spec.prefill())?;
        let merge = device.compile(spec.merge())?;
        Ok(Self {
            append: if spec.shape.qk_rope_head_dim == 0 {
                Append::Plain(device.compile(spec.append())?)
            } else {
                Append::Rotated(device.compile(spec.rope_append())?)
            },
            absorb: device.compile(HeadProject::absorb(&dims, dtype, weight, dtype))?,
            k_up: device.compile(HeadProject::k_up(&dims, dtype, weight, dtype))?,
            v_up: device.compile(HeadProject::v_up(&dims, dtype, weight, dtype))?,
            // Variants that round the softmax weights are those on tensor cores.
            prefix_cost: D::prefix_cost(
                decode.rounds_weights(),
                prefixes.as_ref().map_or(&prefill, |prefixes| &prefixes.prefill).facts().rows,
            ),
            decode,
            gather: device.compile(spec.gather())?,
            prefill,
            merge_step: merge.step(())?,
            merge,
            space: Workspace::new(device, spec, &capacity, prefixes.as_ref().map_or(0, |all| all.num_sets))?,
            turn: Mutex::new(()),
            prefixes,
            capacity,
            slab_pages: match options.slab_pages {
                0 => 0,
                pages if spec.kv.num_slabs(pages)? == 1 => 0,
                pages => pages,
            },
        })
    }
}

impl<D: Composes> Prefixes<D> {
    fn new(device: &D, spec: &MlaLayer, capacity: &LayerCapacity) -> Result<Self> {
        let options = PrefillOptions { query_tokens: capacity.decode_tokens, ..PrefillOptions::default() };
        let prefill = device.compile_with(spec.prefill(), &options)?;
        // One query token has the fewest tiles, so the keys are split into the most parts.
        let num_sets = prefill.facts().key_parts(1, capacity.prefix_rows) + 1;
        Ok(Self { prefill, merge: device.compile(spec.merge_sets())?, num_sets })
    }
}
