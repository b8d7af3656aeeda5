//! The ops that a layer is made of, and their workspace.

use std::sync::Mutex;

use super::selects::{self, Lists};
use super::workspace::Workspace;
use super::{LayerCapacity, LayerOptions, MlaLayer};
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::ops::composes::{Composes, PrefixCost};
use crate::ops::op::{Compiled, Step};
use crate::ops::{
    DecodeOptions, HeadProject, KvAppend, KvGather, MergeState, MergeStates, MlaPrefill, PrefillOptions,
    RopeAppend,
};

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
    /// The append of decodes whose rotated queries are codes. `None` where all queries have one dtype, or no rotary part.
    pub(super) codes: Option<Compiled<RopeAppend, D>>,
    pub(super) absorb: Compiled<HeadProject, D>,
    pub(super) k_up: Compiled<HeadProject, D>,
    /// Values up to the layer's dtype, and up to the output, if that has another dtype or is counted.
    pub(super) v_up: Compiled<HeadProject, D>,
    pub(super) v_codes: Option<Compiled<HeadProject, D>>,
    pub(super) decode: Compiled<MlaDecode, D>,
    pub(super) gather: Compiled<KvGather, D>,
    pub(super) prefill: Compiled<MlaPrefill, D>,
    pub(super) merge: Compiled<MergeState, D>,
    /// `None` where the capacity has no room for prefixes.
    pub(super) prefixes: Option<Prefixes<D>>,
    /// `None` where every sequence is attended whole.
    pub(super) lists: Option<Lists<D>>,
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
        selects::check(spec, options, &capacity)?;
        let (dims, dtype, weight) = (spec.dims(), spec.dtype, spec.weight);
        let guard = options.guard;
        let rotates = spec.shape.qk_rope_head_dim > 0;
        let decode = DecodeOptions {
            variant: options.variant.clone(),
            query_tokens: spec.decode_threshold,
            shared_sequences: options.shared_sequences,
            ..DecodeOptions::default()
        };
        let decode = device.compile_with(spec.mla(), &decode)?;
        let has_prefixes = capacity.prefix_rows > 0 && capacity.decode_tokens > 0;
        if has_prefixes && spec.out != dtype {
            let cure = "merges with expanded prefixes write the layer's dtype: take it, or compile with LayerCapacity::prefix_rows of 0";
            return Err(Error::DtypeUnsupported { what: "MlaLayer::out", got: spec.out, cure });
        }
        let prefixes = if has_prefixes { Some(Prefixes::new(device, spec, &capacity)?) } else { None };
        let prefill = device.compile(spec.prefill())?;
        let merge = device.compile(spec.merge())?;
        Ok(Self {
            append: if rotates {
                Append::Rotated(device.compile(spec.rope_append(dtype, guard))?)
            } else {
                Append::Plain(device.compile(spec.append(guard))?)
            },
            codes: match rotates && spec.query != dtype {
                true => Some(device.compile(spec.rope_append(spec.query, guard))?),
                false => None,
            },
            absorb: device
                .compile(HeadProject { guard, ..HeadProject::absorb(&dims, dtype, weight, spec.query) })?,
            k_up: device.compile(HeadProject::k_up(&dims, dtype, weight, dtype))?,
            v_up: device.compile(HeadProject::v_up(&dims, dtype, weight, dtype))?,
            v_codes: match spec.out != dtype || guard {
                true => {
                    Some(device.compile(HeadProject {
                        guard,
                        ..HeadProject::v_up(&dims, dtype, weight, spec.out)
                    })?)
                }
                false => None,
            },
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
            lists: Lists::new(device, spec, options, &capacity)?,
            capacity,
            slab_pages: match options.slab_pages {
                0 => 0,
                pages if spec.kv.num_slabs(pages)? == 1 => 0,
                pages => pages,
            },
        })
    }
}

impl<D: Composes> Ops<D> {
    /// What projects the values of decodes into the output.
    pub(super) fn v_out(&self) -> &Compiled<HeadProject, D> {
        self.v_codes.as_ref().unwrap_or(&self.v_up)
    }

    /// The decodes in absorbed form, over all tokens and over lists.
    pub(super) fn decodes(&self) -> impl Iterator<Item = &Compiled<MlaDecode, D>> {
        std::iter::once(&self.decode).chain(self.lists.as_ref().map(|lists| &lists.decode))
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
