//! The ops that a layer is made of, and what lies between them.

use super::workspace::Workspace;
use super::{LayerCapacity, LayerOptions, MlaLayerSpec};
use crate::ops::op::{Compiled, Device, Kernel, Step};
use crate::ops::{
    AppendSpec, DecodeOptions, GatherSpec, MergeAttnStatesSpec, MergeStatesSpec, PrefillOptions, PrefillSpec,
    ProjectSpec, RopeAppendSpec,
};
use crate::{MlaSpec, Result};

/// A device that runs the ops of a layer itself.
pub trait Composes:
    Device
    + Kernel<AppendSpec>
    + Kernel<RopeAppendSpec>
    + Kernel<ProjectSpec>
    + Kernel<MlaSpec>
    + Kernel<GatherSpec>
    + Kernel<PrefillSpec>
    + Kernel<MergeAttnStatesSpec>
    + Kernel<MergeStatesSpec>
{
}

impl Composes for crate::cpu::Cpu {}
#[cfg(feature = "cuda")]
impl Composes for crate::cuda::Cuda {}
#[cfg(feature = "wgpu")]
impl Composes for crate::gpu::Gpu {}

/// With a rotary part, or without.
#[derive(Debug)]
pub(super) enum Append<R, P> {
    Rotated(R),
    Plain(P),
}

/// The ops of a layer, and what lies between them. All layers of a model share it.
#[derive(Debug)]
pub struct Ops<D: Composes> {
    pub(super) append: Append<Compiled<RopeAppendSpec, D>, Compiled<AppendSpec, D>>,
    pub(super) absorb: Compiled<ProjectSpec, D>,
    pub(super) k_up: Compiled<ProjectSpec, D>,
    pub(super) v_up: Compiled<ProjectSpec, D>,
    pub(super) decode: Compiled<MlaSpec, D>,
    pub(super) gather: Compiled<GatherSpec, D>,
    pub(super) prefill: Compiled<PrefillSpec, D>,
    pub(super) merge: Compiled<MergeAttnStatesSpec, D>,
    /// `None` without room for any.
    pub(super) prefixes: Option<Prefixes<D>>,
    /// What a merge of two states is recorded with: it has nothing that changes with a step.
    pub(super) merge_step: Step<MergeAttnStatesSpec, D>,
    pub(super) space: Workspace<D::Buffer>,
    pub(super) capacity: LayerCapacity,
}

/// The ops of decodes that attend expanded prefixes.
#[derive(Debug)]
pub(super) struct Prefixes<D: Composes> {
    pub(super) prefill: Compiled<PrefillSpec, D>,
    pub(super) merge: Compiled<MergeStatesSpec, D>,
    /// What the decodes attend alone, and as many parts of a prefix as there is room for.
    pub(super) num_sets: u32,
}

impl<D: Composes> Ops<D> {
    pub(super) fn new(device: &D, spec: &MlaLayerSpec, options: &LayerOptions) -> Result<Self> {
        let capacity = options.capacity;
        let capacity =
            LayerCapacity { decode_tokens: capacity.decode_tokens.min(capacity.tokens), ..capacity };
        let (dims, dtype, weight) = (spec.dims(), spec.dtype, spec.weight);
        let decode = DecodeOptions {
            variant: options.variant.clone(),
            query_tokens: spec.decode_threshold,
            ..DecodeOptions::default()
        };
        let has_prefixes = capacity.prefix_rows > 0 && capacity.decode_tokens > 0;
        let prefixes = if has_prefixes { Some(Prefixes::new(device, spec, &capacity)?) } else { None };
        let merge = device.compile(spec.merge())?;
        Ok(Self {
            append: if spec.shape.qk_rope_head_dim == 0 {
                Append::Plain(device.compile(spec.append())?)
            } else {
                Append::Rotated(device.compile(spec.rope_append())?)
            },
            absorb: device.compile(ProjectSpec::absorb(&dims, dtype, weight, dtype))?,
            k_up: device.compile(ProjectSpec::k_up(&dims, dtype, weight, dtype))?,
            v_up: device.compile(ProjectSpec::v_up(&dims, dtype, weight, dtype))?,
            decode: device.compile_with(spec.mla(), &decode)?,
            gather: device.compile(spec.gather())?,
            prefill: device.compile(spec.prefill())?,
            merge_step: merge.step(())?,
            merge,
            space: Workspace::new(device, spec, &capacity, prefixes.as_ref().map_or(0, |all| all.num_sets))?,
            prefixes,
            capacity,
        })
    }
}

impl<D: Composes> Prefixes<D> {
    fn new(device: &D, spec: &MlaLayerSpec, capacity: &LayerCapacity) -> Result<Self> {
        let options = PrefillOptions { query_tokens: capacity.decode_tokens, ..PrefillOptions::default() };
        let prefill = device.compile_with(spec.prefill(), &options)?;
        // Fewer query tokens are fewer tiles, and leave room for more parts.
        let num_sets = prefill.facts().key_parts(1, capacity.prefix_rows) + 1;
        Ok(Self { prefill, merge: device.compile(spec.merge_sets())?, num_sets })
    }
}
