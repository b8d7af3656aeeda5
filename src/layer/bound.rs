//! One layer's arrays, bound to each of its ops.

use super::bound_lists::{BindLists, BoundLists};
use super::composed::{Append, Ops, Prefixes};
use super::guard::rows_of;
use super::names::{self, named};
use super::plan::Target;
use super::range::Scales;
use super::{Expanded, LayerCapacity, MlaLayer, MlaLayerArgs};
use crate::base::error::Result;
use crate::base::view::View;
use crate::cache::decode_spec::MlaDecode;
use crate::ops::composes::Composes;
use crate::ops::op::Binding;
use crate::ops::{
    HeadProject, HeadProjectArgs, Indices, KvAppend, KvAppendArgs, KvGather, KvGatherArgs, LseBase,
    MergeState, MergeStateArgs, MergeStates, MergeStatesArgs, MergeStatesExtent, MlaDecodeArgs, MlaPrefill,
    MlaPrefillArgs, PrefillExtent, Query, RopeAppend, RopeAppendArgs, RopeAppendExtent,
};

/// One layer's buffers, bound to each op.
#[derive(Debug)]
pub struct Bindings<D: Composes> {
    pub(super) append: Append<Binding<RopeAppend, D>, Binding<KvAppend, D>>,
    pub(super) codes: Option<Binding<RopeAppend, D>>,
    pub(super) absorb: Binding<HeadProject, D>,
    pub(super) decode: Binding<MlaDecode, D>,
    pub(super) v_up: Binding<HeadProject, D>,
    pub(super) gather: Binding<KvGather, D>,
    pub(super) rows: [Binding<HeadProject, D>; 2],
    /// The projection into each [`Target`], which keeps the scale of expanded values.
    pub(super) prefill: [Binding<MlaPrefill, D>; 3],
    /// The projection into the output of results that no merge follows.
    pub(super) last_prefill: Binding<MlaPrefill, D>,
    /// The merges from [`Target::Out`] to [`Target::Other`] and back, which keep the scale.
    pub(super) merge: [Binding<MergeState, D>; 2],
    /// The last merge, from [`Target::Other`] into the output.
    pub(super) last_merge: Binding<MergeState, D>,
    pub(super) prefixes: Option<BoundPrefixes<D>>,
    pub(super) lists: Option<BoundLists<D>>,
}

#[derive(Debug)]
pub(super) struct BoundPrefixes<D: Composes> {
    pub(super) v_up: Binding<HeadProject, D>,
    pub(super) parts: Binding<MlaPrefill, D>,
    pub(super) merge: Binding<MergeStates, D>,
}

/// What is needed to bind a layer's arrays.
pub(super) struct Bind<'a, D: Composes> {
    pub(super) spec: &'a MlaLayer,
    pub(super) ops: &'a Ops<D>,
    pub(super) args: &'a MlaLayerArgs<&'a D::Buffer>,
    pub(super) room: LayerCapacity,
}

impl<D: Composes> Bind<'_, D> {
    pub(super) fn all(&self) -> Result<Bindings<D>> {
        let (ops, args, space) = (self.ops, self.args, &self.ops.space);
        let LayerCapacity { decode_tokens, .. } = self.room;
        let (w_uk, w_uv) = self.spec.weights(args.kv_b_proj, args.kv_b_scales);
        let (rows, num_rows) = (space.rows(), space.num_rows);
        let gathered = KvGatherArgs { kv: args.kv.clone(), k_scale: args.k_scale, out: rows };
        // All heads read the same row.
        let shared = View { head_stride: 0, ..rows };
        let Scales { keys, values, saturates } = self.spec.scales();
        let project = |x, weight, y, scale| HeadProjectArgs {
            x,
            weight,
            y,
            scale,
            out_scale: 1.0,
            saturates,
            guard: None,
        };
        let [_, of_query, of_output] = rows_of(args.guard);
        let absorb = HeadProjectArgs {
            guard: of_query,
            out_scale: args.q_scale,
            ..project(args.q_nope, w_uk, space.ql_nope(), self.spec.query_scale())
        };
        // The output itself: what it does not hold is infinite, but for codes.
        let whole = HeadProjectArgs {
            guard: of_output,
            out_scale: args.out_scale,
            saturates: false,
            ..project(space.latent_out(), w_uv, args.out, 1.0)
        };
        Ok(Bindings {
            append: self.append()?,
            codes: self.codes()?,
            absorb: ops.absorb.bind(&absorb, decode_tokens).map_err(named(names::ABSORB))?,
            decode: self.decode()?,
            v_up: ops.v_out().bind(&whole, decode_tokens).map_err(named(names::V_UP))?,
            gather: ops.gather.bind(&gathered, num_rows)?,
            rows: [
                ops.k_up
                    .bind(&project(shared, w_uk, space.k_nope(), keys), num_rows)
                    .map_err(named(names::K_UP))?,
                ops.v_up
                    .bind(&project(shared, w_uv, space.v(), values), num_rows)
                    .map_err(named(names::K_UP))?,
            ],
            prefill: [
                self.prefill(Target::Out, 1.0)?,
                self.prefill(Target::Other, 1.0)?,
                self.prefill(Target::Partial, 1.0)?,
            ],
            last_prefill: self.prefill(Target::Out, 1.0 / values)?,
            merge: [self.merge(Target::Out, 1.0)?, self.merge(Target::Other, 1.0)?],
            last_merge: self.merge(Target::Other, 1.0 / values)?,
            prefixes: match (&ops.prefixes, &args.expanded) {
                (Some(prefixes), Some(expanded)) => Some(self.prefixes(prefixes, expanded)?),
                _ => None,
            },
            lists: BindLists {
                spec: self.spec,
                ops: ops.lists.as_ref(),
                args,
                room: self.room,
                slab_pages: ops.slab_pages,
                unread: &space.positions,
            }
            .all(|indices| self.decode_args(Some(indices)))?,
        })
    }

    fn append(&self) -> Result<Append<Binding<RopeAppend, D>, Binding<KvAppend, D>>> {
        let tokens = self.room.tokens;
        Ok(match &self.ops.append {
            Append::Plain(append) => Append::Plain(append.bind(&self.new_rows(), tokens)?),
            Append::Rotated(append) => {
                let args = self.rotated(self.ops.space.q_pe(), self.spec.scales().keys);
                Append::Rotated(append.bind(&args, RopeAppendExtent::of(tokens))?)
            }
        })
    }

    fn codes(&self) -> Result<Option<Binding<RopeAppend, D>>> {
        let Some(append) = &self.ops.codes else { return Ok(None) };
        let rotated = self.rotated(self.ops.space.absorbed_q_pe(), self.spec.query_scale());
        let args = RopeAppendArgs { q_scale: self.args.q_scale, ..rotated };
        append.bind(&args, RopeAppendExtent::of(self.room.decode_tokens)).map(Some)
    }

    fn new_rows(&self) -> KvAppendArgs<&D::Buffer> {
        let args = self.args;
        KvAppendArgs {
            kv_c: args.kv_c,
            k_pe: args.k_pe,
            kv: args.kv.clone(),
            k_scale: args.k_scale,
            guard: args.guard,
        }
    }

    /// The append of new rows, with the rotation of queries into an array.
    fn rotated<'a>(&'a self, q_pe_out: View<&'a D::Buffer>, scale: f32) -> RopeAppendArgs<&'a D::Buffer> {
        RopeAppendArgs {
            q_pe: self.args.q_pe,
            q_pe_out,
            layer: self.new_rows(),
            positions: &self.ops.space.positions,
            cos_sin: self.args.cos_sin,
            max_position: self.args.max_position,
            q_pe_scale: scale,
            q_scale: 1.0,
        }
    }

    fn decode(&self) -> Result<Binding<MlaDecode, D>> {
        self.ops.decode.bind(&self.decode_args(None), self.room.decode_tokens)
    }

    /// The decode in absorbed form, over all tokens or the slots of lists.
    fn decode_args<'a>(&'a self, indices: Option<Indices<&'a D::Buffer>>) -> MlaDecodeArgs<&'a D::Buffer> {
        let (args, space) = (self.args, &self.ops.space);
        // Only the merge with prefixes reads the LSE.
        let lse = match self.ops.prefixes {
            Some(_) => space.sets().1,
            None => space.target(args.out, Target::Other).1,
        };
        MlaDecodeArgs {
            query: Query::Split { q_nope: space.ql_nope(), q_pe: space.absorbed_q_pe() },
            kv: args.kv.clone(),
            out: space.latent_out(),
            lse,
            lse_base: LseBase::E,
            softmax_scale: args.softmax_scale / self.spec.query_scale(),
            k_scale: args.k_scale,
            q_scale: args.q_scale,
            indices,
            attn_sink: None,
        }
    }

    /// The factor of the logits of expanded keys, which are stored scaled.
    fn softmax_scale(&self) -> f32 {
        self.args.softmax_scale / self.spec.scales().keys
    }

    /// The rotated part of the query, if it has one.
    fn q_pe(&self) -> View<&D::Buffer> {
        if self.spec.shape.qk_rope_head_dim > 0 { self.ops.space.q_pe() } else { self.args.q_nope }
    }

    fn prefill(&self, target: Target, v_scale: f32) -> Result<Binding<MlaPrefill, D>> {
        let (args, space) = (self.args, &self.ops.space);
        let (out, lse) = space.target(args.out, target);
        let rows = space.rows();
        let prefill = MlaPrefillArgs {
            q_nope: args.q_nope,
            q_pe: self.q_pe(),
            k_nope: space.k_nope(),
            k_pe: View { offset: self.spec.shape.kv_lora_rank.into(), head_stride: 0, ..rows },
            v: space.v(),
            out,
            lse,
            softmax_scale: self.softmax_scale(),
            v_scale,
        };
        // A workspace without rows belongs to a layer whose steps have no prefills.
        let tokens = if space.num_rows > 0 { self.room.tokens } else { 0 };
        self.ops.prefill.bind(&prefill, PrefillExtent { tokens, keys: space.num_rows, rows: tokens })
    }

    /// Merges [`Target::Partial`] into `state` and writes the other of the two.
    fn merge(&self, state: Target, output_scale: f32) -> Result<Binding<MergeState, D>> {
        let target = |target| self.ops.space.target(self.args.out, target);
        let ((prefix_output, prefix_lse), (suffix_output, suffix_lse)) =
            (target(state), target(Target::Partial));
        let (output, output_lse) = target(state.turned());
        // Without rows in the workspace no step has what is merged.
        let num_tokens = if self.ops.space.num_rows > 0 { self.room.tokens } else { 0 };
        // The op takes LSEs of any strides; here they are [tokens, heads].
        let args = MergeStateArgs {
            prefix_output,
            prefix_lse,
            suffix_output,
            suffix_lse,
            output,
            output_lse: Some(output_lse),
            num_tokens,
            num_heads: self.spec.shape.num_heads,
            output_scale,
        };
        self.ops.merge.bind(&args, ()).map_err(named(names::MERGE))
    }

    fn prefixes(&self, prefixes: &Prefixes<D>, expanded: &Expanded<&D::Buffer>) -> Result<BoundPrefixes<D>> {
        let (spec, args, ops) = (self.spec, self.args, self.ops);
        let LayerCapacity { decode_tokens, prefix_rows, .. } = self.room;
        let (states, lse) = ops.space.sets();
        let scales = spec.scales();
        // The stride of a set is that of the workspace, not of the binding's room.
        let set_rows = u64::from(ops.capacity.decode_tokens);
        let sets = MergeStatesArgs {
            states,
            set_stride: states.token_stride * set_rows,
            lse,
            lse_set_stride: lse.token_stride * set_rows,
            output: args.out,
            output_lse: None,
            lse_base: LseBase::E,
            num_heads: spec.shape.num_heads,
            output_scale: 1.0 / scales.values,
        };
        let parts = MlaPrefillArgs {
            q_nope: args.q_nope,
            q_pe: self.q_pe(),
            k_nope: expanded.k_nope,
            k_pe: expanded.k_pe(spec),
            v: expanded.v,
            out: states,
            lse,
            softmax_scale: self.softmax_scale(),
            v_scale: 1.0,
        };
        let rows = ops.capacity.decode_tokens * prefixes.num_sets;
        let (_, w_uv) = spec.weights(args.kv_b_proj, args.kv_b_scales);
        let own = HeadProjectArgs {
            x: ops.space.latent_out(),
            weight: w_uv,
            y: states,
            scale: scales.values,
            out_scale: 1.0,
            saturates: scales.saturates,
            guard: None,
        };
        Ok(BoundPrefixes {
            v_up: ops.v_up.bind(&own, decode_tokens).map_err(named(names::K_UP))?,
            parts: prefixes
                .prefill
                .bind(&parts, PrefillExtent { tokens: decode_tokens, keys: prefix_rows, rows })
                .map_err(named(names::PARTS))?,
            merge: prefixes
                .merge
                .bind(&sets, MergeStatesExtent { tokens: decode_tokens, sets: prefixes.num_sets })
                .map_err(named(names::MERGE))?,
        })
    }
}
