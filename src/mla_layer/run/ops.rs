//! One layer of a step, op by op.

use super::super::plan::{Chunk, Round, Target};
use super::super::{Expanded, LayerArgs, MlaLayerSpec};
use super::MlaLayer;
use super::workspace::Room;
use crate::layer::{Query, View};
use crate::ops::{
    AppendLayer, Gather, GatherRange, MergeStates, Project, ProjectSpec, RopeAppend, StateSets, WeightView,
};
use crate::prefill::{Prefill, PrefillSequence};
use crate::tables::PageTable;
use crate::{Backend, Error, Layer, LseBase, Result};

/// One layer's ops in a step.
pub(super) struct Ops<'a, B: Backend> {
    pub(super) layer: &'a MlaLayer<B>,
    pub(super) backend: &'a B,
    pub(super) args: &'a LayerArgs<&'a B::Buffer>,
}

impl<'a, B: Backend> Ops<'a, B> {
    fn spec(&self) -> &'a MlaLayerSpec {
        &self.layer.spec
    }

    /// A dense array of the workspace, `[rows, heads, dim]`.
    fn dense(&self, room: &'a Room<B::Buffer>, heads: u32, dim: u32) -> Result<View<&'a B::Buffer>> {
        Ok(View::dense(room.buffer()?, heads, dim))
    }

    /// Rotates, and writes the new rows to the cache: what follows reads them there.
    pub(super) fn append(&self) -> Result<()> {
        let (spec, args) = (self.spec(), self.args);
        let layer = AppendLayer { kv_c: args.kv_c, k_pe: args.k_pe, kv: args.kv, k_scale: args.k_scale };
        if spec.shape.qk_rope_head_dim == 0 {
            return self.backend.kv_append(&spec.append(), &self.layer.slot_mapping, &layer);
        }
        let args = RopeAppend {
            q_pe: args.q_pe,
            q_pe_out: self.q_pe()?,
            layer,
            positions: self.layer.space.positions.buffer()?,
            cos_sin: args.cos_sin,
            max_position: args.max_position,
        };
        self.backend.rope_append(&spec.rope_append(), &self.layer.slot_mapping, &args)
    }

    /// The rotated part of the query.
    fn q_pe(&self) -> Result<View<&'a B::Buffer>> {
        let shape = self.spec().shape;
        self.dense(&self.layer.space.q_pe, shape.num_heads, shape.qk_rope_head_dim)
    }

    /// Tokens that are decoded, run by run: into the latent space, over the cache, and back.
    pub(super) fn decode(&self) -> Result<()> {
        let (spec, args, space) = (self.spec(), self.args, &self.layer.space);
        if self.layer.plan.decoded.is_empty() {
            return Ok(());
        }
        let (heads, latent) = (spec.shape.num_heads, spec.shape.kv_lora_rank);
        let ql_nope = self.dense(&space.ql_nope, heads, latent)?;
        let latent_out = self.dense(&space.latent_out, heads, latent)?;
        let dims = spec.dims();
        let absorb = ProjectSpec::absorb(&dims, spec.dtype, spec.weight, spec.dtype);
        self.project(&absorb, WeightView::w_uk(&dims, args.kv_b_proj), args.q_nope, ql_nope)?;

        let set = if self.layer.num_parts > 0 { Some(self.sets()?) } else { None };
        let (lse, value) = match set {
            Some(set) => (set.lse, set.out),
            None => (self.dense(&space.lse[1], heads, 1)?, args.out),
        };
        let layer = Layer {
            query: Query::Split { q_nope: ql_nope, q_pe: self.q_pe()? },
            kv: args.kv,
            out: latent_out,
            lse,
            lse_base: LseBase::E,
            softmax_scale: args.softmax_scale,
            k_scale: args.k_scale,
            q_scale: 1.0,
        };
        let num_queries = self.layer.plan.decode.num_queries;
        let binding = self.backend.bind(&self.layer.decode, num_queries, &layer)?;
        self.backend.run(&self.layer.decode, &self.layer.step, &binding)?;

        let v_up = ProjectSpec::v_up(&dims, spec.dtype, spec.weight, spec.dtype);
        self.project(&v_up, WeightView::w_uv(&dims, args.kv_b_proj), latent_out, value)?;
        set.map_or(Ok(()), |set| self.attend_prefixes(set))
    }

    /// Set 0 of what decoded tokens have attended.
    fn sets(&self) -> Result<Attended<&'a B::Buffer>> {
        let (spec, space) = (self.spec(), &self.layer.space);
        let heads = spec.shape.num_heads;
        Ok(Attended {
            out: self.dense(&space.sets, heads, spec.v_head_dim)?,
            lse: self.dense(&space.set_lse, heads, 1)?,
        })
    }

    /// Decoded tokens over the expanded prefixes, in parts of their keys, and all sets into the output.
    fn attend_prefixes(&self, set: Attended<&'a B::Buffer>) -> Result<()> {
        let (spec, args, plan, num_parts) = (self.spec(), self.args, &self.layer.plan, self.layer.num_parts);
        let tokens = plan.decode.num_queries;
        let parts = plan.prefix_parts(num_parts, tokens);
        let expanded = self.expanded()?;
        let prefill = Prefill {
            q_nope: args.q_nope,
            q_pe: if spec.shape.qk_rope_head_dim > 0 { self.q_pe()? } else { args.q_nope },
            k_nope: expanded.k_nope,
            k_pe: expanded.k_pe(spec),
            v: expanded.v,
            out: set.out,
            lse: set.lse,
            softmax_scale: args.softmax_scale,
        };
        self.backend.prefill(&spec.prefill(), &parts, &prefill)?;
        for run in &plan.decoded {
            let sets = StateSets {
                states: set.out.skip_tokens(run.start),
                set_stride: set.out.token_stride.saturating_mul(tokens.into()),
                lse: set.lse.skip_tokens(run.start),
                lse_set_stride: set.lse.token_stride.saturating_mul(tokens.into()),
                output: args.out.skip_tokens(run.start),
                output_lse: None,
                num_sets: num_parts + 1,
                num_tokens: run.end - run.start,
                num_heads: spec.shape.num_heads,
            };
            self.backend.merge_states(&spec.merge(), &sets)?;
        }
        Ok(())
    }

    fn expanded(&self) -> Result<Expanded<&'a B::Buffer>> {
        let detail = "an expanded prefix has keys and values: give LayerArgs::expanded";
        self.args.expanded.ok_or(Error::LayoutMismatch { detail })
    }

    /// See [`MlaLayer::expand_prefix`].
    pub(super) fn expand_prefix(&self, pages: &[i32], tokens: u32, first_row: u32) -> Result<()> {
        let (spec, args, expanded) = (self.spec(), self.args, self.expanded()?);
        if tokens == 0 {
            return Ok(());
        }
        let kv_indptr = [0, i32::try_from(pages.len()).unwrap_or(i32::MAX)];
        let seq_len = i32::try_from(tokens).unwrap_or(i32::MAX);
        self.backend.kv_gather(
            &spec.gather(),
            PageTable::Csr { kv_indptr: &kv_indptr, kv_indices: pages },
            &[seq_len],
            &[GatherRange { sequence: 0, begin: 0, tokens, out_row: first_row }],
            &Gather { kv: args.kv, k_scale: args.k_scale, out: expanded.rows },
        )?;
        self.up(
            View { head_stride: 0, ..expanded.rows.skip_tokens(first_row) },
            expanded.k_nope.skip_tokens(first_row),
            expanded.v.skip_tokens(first_row),
            tokens,
        )
    }

    /// Rows of the cache as the keys and values of each head.
    fn up(
        &self,
        x: View<&'a B::Buffer>,
        k_nope: View<&'a B::Buffer>,
        v: View<&'a B::Buffer>,
        num_tokens: u32,
    ) -> Result<()> {
        let (spec, dims) = (self.spec(), self.spec().dims());
        let k_up = ProjectSpec::k_up(&dims, spec.dtype, spec.weight, spec.dtype);
        let weight = WeightView::w_uk(&dims, self.args.kv_b_proj);
        self.backend.project(&k_up, &Project { x, weight, y: k_nope, num_tokens })?;
        let v_up = ProjectSpec::v_up(&dims, spec.dtype, spec.weight, spec.dtype);
        let weight = WeightView::w_uv(&dims, self.args.kv_b_proj);
        self.backend.project(&v_up, &Project { x, weight, y: v, num_tokens })
    }

    /// For the tokens that are decoded.
    fn project(
        &self,
        spec: &ProjectSpec,
        weight: WeightView<&'a B::Buffer>,
        x: View<&'a B::Buffer>,
        y: View<&'a B::Buffer>,
    ) -> Result<()> {
        self.layer.plan.decoded.iter().try_for_each(|tokens| {
            let num_tokens = tokens.end - tokens.start;
            self.backend.project(
                spec,
                &Project {
                    x: x.skip_tokens(tokens.start),
                    weight,
                    y: y.skip_tokens(tokens.start),
                    num_tokens,
                },
            )
        })
    }

    /// The rows of a chunk, as keys and values.
    pub(super) fn expand(&self, chunk: &Chunk) -> Result<()> {
        let (spec, args, layer) = (self.spec(), self.args, self.layer);
        let (kv_indptr, kv_indices) = &layer.pages;
        let rows = self.dense(&layer.space.rows, 1, spec.shape.row_elems())?;
        self.backend.kv_gather(
            &spec.gather(),
            PageTable::Csr { kv_indptr, kv_indices },
            &layer.seq_lens,
            &chunk.ranges,
            &Gather { kv: args.kv, k_scale: args.k_scale, out: rows },
        )?;
        // All heads read the same row.
        let k_nope = self.dense(&layer.space.k_nope, spec.shape.num_heads, spec.qk_nope_head_dim)?;
        let v = self.dense(&layer.space.v, spec.shape.num_heads, spec.v_head_dim)?;
        self.up(View { head_stride: 0, ..rows }, k_nope, v, chunk.rows)
    }

    pub(super) fn attend(&self, round: &Round) -> Result<()> {
        let state = self.target(round.state)?;
        self.prefill(&round.first, state)?;
        if round.more.is_empty() {
            return Ok(());
        }
        let partial = self.target(Target::Partial)?;
        self.prefill(&round.more, partial)?;
        let spec = self.spec();
        let merged = self.target(round.state.turned())?;
        // The op's LSEs are [heads, tokens] by name only: any strides do.
        let args = MergeStates {
            prefix_output: state.out,
            prefix_lse: state.lse,
            suffix_output: partial.out,
            suffix_lse: partial.lse,
            output: merged.out,
            output_lse: Some(merged.lse),
            num_tokens: self.layer.plan.positions.len() as u32,
            num_heads: spec.shape.num_heads,
        };
        self.backend.merge_attn_states(&spec.merge(), &args)
    }

    fn target(&self, target: Target) -> Result<Attended<&'a B::Buffer>> {
        let (spec, space) = (self.spec(), &self.layer.space);
        let heads = spec.shape.num_heads;
        let (out, lse) = match target {
            Target::Out => (self.args.out, &space.lse[0]),
            Target::Other => (self.dense(&space.other, heads, spec.v_head_dim)?, &space.lse[1]),
            Target::Partial => (self.dense(&space.partial, heads, spec.v_head_dim)?, &space.lse[2]),
        };
        Ok(Attended { out, lse: self.dense(lse, heads, 1)? })
    }

    fn prefill(&self, sequences: &[PrefillSequence], into: Attended<&'a B::Buffer>) -> Result<()> {
        if sequences.is_empty() {
            return Ok(());
        }
        let (spec, space) = (self.spec(), &self.layer.space);
        let (heads, latent) = (spec.shape.num_heads, spec.shape.kv_lora_rank);
        let rope = spec.shape.qk_rope_head_dim;
        let rows = self.dense(&space.rows, 1, spec.shape.row_elems())?;
        let k_pe = View { offset: latent.into(), head_stride: 0, ..rows };
        let args = Prefill {
            q_nope: self.args.q_nope,
            q_pe: if rope > 0 { self.q_pe()? } else { self.args.q_nope },
            k_nope: self.dense(&space.k_nope, heads, spec.qk_nope_head_dim)?,
            k_pe,
            v: self.dense(&space.v, heads, spec.v_head_dim)?,
            out: into.out,
            lse: into.lse,
            softmax_scale: self.args.softmax_scale,
        };
        self.backend.prefill(&spec.prefill(), sequences, &args)
    }
}

/// Where attention is written.
#[derive(Debug, Clone, Copy)]
struct Attended<T> {
    out: View<T>,
    lse: View<T>,
}
