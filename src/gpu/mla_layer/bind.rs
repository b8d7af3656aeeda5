//! One layer of the model, checked and bound.

use super::prefixes::BoundPrefixes;
use super::{Append, LayerCapacity, MlaLayer};
use crate::Result;
use crate::gpu::LayerBinding;
use crate::gpu::ops::{
    AppendBinding, GatherBinding, MergeBinding, PrefillBinding, ProjectBinding, RotateAppendBinding,
};
use crate::layer::{Layer, LseBase, Query, View};
use crate::mla_layer::{LayerArgs, Target};
use crate::ops::{AppendLayer, Gather, MergeStates, Project, RopeAppend, WeightView};
use crate::prefill::{Prefill, PrefillExtent};

/// A layer of a model, checked and bound.
#[derive(Debug)]
pub struct MlaLayerBinding {
    pub(super) append: BoundAppend,
    pub(super) absorb: ProjectBinding,
    pub(super) decode: LayerBinding,
    pub(super) v_up: ProjectBinding,
    pub(super) gather: GatherBinding,
    pub(super) rows: [ProjectBinding; 2],
    /// Into the output, what takes turns with it, and what is merged.
    pub(super) prefill: [PrefillBinding; 3],
    /// From the output, and from what takes turns with it.
    pub(super) merge: [MergeBinding; 2],
    pub(super) prefixes: Option<BoundPrefixes>,
    pub(super) owner: u64,
}

#[derive(Debug)]
pub(super) enum BoundAppend {
    Rotated(RotateAppendBinding),
    Plain(AppendBinding),
}

impl MlaLayer {
    /// Checks and binds one layer of the model. Its arrays have room for [`LayerCapacity::tokens`] query tokens.
    ///
    /// # Errors
    /// Those of the ops: scales, strides, sizes, usages, aliases, limits.
    pub fn bind(&self, args: &LayerArgs<&wgpu::Buffer>) -> Result<MlaLayerBinding> {
        let (spec, space, device) = (&self.spec, &self.space, self.pipelines.device());
        let LayerCapacity { tokens, decode_tokens, .. } = self.capacity;
        let dims = spec.dims();
        let (w_uk, w_uv) = (WeightView::w_uk(&dims, args.kv_b_proj), WeightView::w_uv(&dims, args.kv_b_proj));
        let (rows, heads) = (space.rows(spec), spec.shape.num_heads);

        let layer = AppendLayer { kv_c: args.kv_c, k_pe: args.k_pe, kv: args.kv, k_scale: args.k_scale };
        let append = match &self.append {
            Append::Plain(append) => BoundAppend::Plain(append.bind(device, &layer, tokens)?),
            Append::Rotated(append) => {
                let args = RopeAppend {
                    q_pe: args.q_pe,
                    q_pe_out: space.q_pe(spec),
                    layer,
                    positions: &space.positions,
                    cos_sin: args.cos_sin,
                    max_position: args.max_position,
                };
                BoundAppend::Rotated(append.bind(device, &args, tokens)?)
            }
        };
        let (ql_nope, latent_out) = (space.ql_nope(spec), space.latent_out(spec));
        let decode = Layer {
            query: Query::Split { q_nope: ql_nope, q_pe: space.q_pe(spec) },
            kv: args.kv,
            out: latent_out,
            // Nobody reads it but the merge with prefixes.
            lse: if self.prefixes.is_some() {
                space.sets(spec).1
            } else {
                View::dense(&space.lse[1], heads, 1)
            },
            lse_base: LseBase::E,
            softmax_scale: args.softmax_scale,
            k_scale: args.k_scale,
            q_scale: 1.0,
        };
        let down = |x, y| Project { x, weight: w_uk, y, num_tokens: decode_tokens };
        let up = |x, weight, y, num_tokens| Project { x, weight, y, num_tokens };
        let gathered = Gather { kv: args.kv, k_scale: args.k_scale, out: rows };
        // All heads read the same row.
        let (shared, num_rows) = (View { head_stride: 0, ..rows }, space.num_rows);
        let attends = |target| self.bind_prefill(args, target);
        let merges = |state| self.bind_merge(args, state);
        Ok(MlaLayerBinding {
            append,
            absorb: self.absorb.bind(device, &down(args.q_nope, ql_nope))?,
            decode: self.decode.bind(decode_tokens, &decode)?,
            v_up: self.v_up.bind(device, &up(latent_out, w_uv, args.out, decode_tokens))?,
            gather: self.gather.bind(device, &gathered, num_rows)?,
            rows: [
                self.k_up.bind(device, &up(shared, w_uk, space.k_nope(spec), num_rows))?,
                self.v_up.bind(device, &up(shared, w_uv, space.v(spec), num_rows))?,
            ],
            prefill: [attends(Target::Out)?, attends(Target::Other)?, attends(Target::Partial)?],
            merge: [merges(Target::Out)?, merges(Target::Other)?],
            prefixes: match &args.expanded {
                Some(expanded) => self.bind_prefixes(args, expanded)?,
                None => None,
            },
            owner: self.id,
        })
    }

    fn bind_prefill(&self, args: &LayerArgs<&wgpu::Buffer>, target: Target) -> Result<PrefillBinding> {
        let (spec, space) = (&self.spec, &self.space);
        let rows = space.rows(spec);
        let (out, lse) = space.target(spec, args.out, target);
        let has_rope = spec.shape.qk_rope_head_dim > 0;
        let args = Prefill {
            q_nope: args.q_nope,
            q_pe: if has_rope { space.q_pe(spec) } else { args.q_nope },
            k_nope: space.k_nope(spec),
            k_pe: View { offset: spec.shape.kv_lora_rank.into(), head_stride: 0, ..rows },
            v: space.v(spec),
            out,
            lse,
            softmax_scale: args.softmax_scale,
        };
        // Without rows there is nothing to attend, and no step does.
        let tokens = if space.num_rows > 0 { self.capacity.tokens } else { 0 };
        let extent = PrefillExtent { tokens, keys: space.num_rows, rows: tokens };
        self.prefill.bind(self.pipelines.device(), &args, extent)
    }

    /// From `state` to what takes turns with it.
    fn bind_merge(&self, args: &LayerArgs<&wgpu::Buffer>, state: Target) -> Result<MergeBinding> {
        let target = |target| self.space.target(&self.spec, args.out, target);
        let ((prefix_output, prefix_lse), (suffix_output, suffix_lse)) =
            (target(state), target(Target::Partial));
        let (output, output_lse) = target(state.turned());
        // The op's LSEs are [heads, tokens] by name only: any strides do.
        let args = MergeStates {
            prefix_output,
            prefix_lse,
            suffix_output,
            suffix_lse,
            output,
            output_lse: Some(output_lse),
            num_tokens: self.capacity.tokens,
            num_heads: self.spec.shape.num_heads,
        };
        self.merge.bind(self.pipelines.device(), &args)
    }
}
