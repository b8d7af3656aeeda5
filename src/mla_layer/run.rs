//! The layer on any backend, verb by verb.

use super::plan::{Chunk, LayerBatch, LayerPlan, Round, Target};
use super::{Expanded, LayerArgs, MlaLayerSpec};
use crate::layer::{Query, View};
use crate::ops::{
    AppendLayer, Gather, GatherRange, MergeStates, Project, ProjectSpec, RopeAppend, StateSets, WeightView,
};
use crate::prefill::{Prefill, PrefillSequence};
use crate::tables::{Capacity, PageTable};
use crate::{Backend, Error, Layer, LseBase, Policy, Result};

/// The attention layer of a model, made for one [`MlaLayerSpec`]: prepared once a step, run once a layer.
///
/// It owns its workspace, which all layers share and which grows with the batch; the part that grows with the context stays within
/// [`MlaLayerSpec::workspace_bytes`].
#[derive(Debug)]
pub struct MlaLayer<B: Backend> {
    spec: MlaLayerSpec,
    decode: B::Decode,
    step: B::Step,
    plan: LayerPlan,
    slot_mapping: Vec<i64>,
    seq_lens: Vec<i32>,
    /// The page table of the step, in CSR form.
    pages: (Vec<i32>, Vec<i32>),
    space: Workspace<B::Buffer>,
    /// Parts that the keys of expanded prefixes are split into; 0 without any.
    num_parts: u32,
}

/// What lies between the ops. `T` query tokens, `S` rows of the workspace.
#[derive(Debug)]
struct Workspace<T> {
    /// i32 `[T]`
    positions: Room<T>,
    /// `[T, H, R]`, rotated
    q_pe: Room<T>,
    /// `[T, H, L]`
    ql_nope: Room<T>,
    /// `[T, H, L]`
    latent_out: Room<T>,
    /// `[S, L + R]`, `[S, H, P]` and `[S, H, V]`: one buffer, within the budget
    rows: Room<T>,
    k_nope: Room<T>,
    v: Room<T>,
    /// `[T, H, V]`
    other: Room<T>,
    partial: Room<T>,
    /// f32 `[T, H]`, of out, other and partial
    lse: [Room<T>; 3],
    /// `[sets, T, H, V]` and f32 `[sets, T, H]` of the tokens up to the last that is decoded, with expanded prefixes
    sets: Room<T>,
    set_lse: Room<T>,
}

/// A buffer that is made, or made anew, where it is too small.
#[derive(Debug)]
struct Room<T>(Option<(T, u64)>);

impl<T> Default for Room<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> Room<T> {
    /// What was in it is gone if it grows.
    fn grow(&mut self, backend: &impl Backend<Buffer = T>, bytes: u64) -> Result<()> {
        if self.0.as_ref().is_none_or(|(_, have)| *have < bytes) {
            self.0 = None;
            self.0 = Some((backend.buffer(bytes)?, bytes));
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::LayoutMismatch`] before the first step is prepared.
    fn buffer(&self) -> Result<&T> {
        let detail = "a layer needs a step: call `MlaLayer::prepare` first";
        self.0.as_ref().map(|(buffer, _)| buffer).ok_or(Error::LayoutMismatch { detail })
    }

    fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |(_, bytes)| *bytes)
    }
}

impl<B: Backend> MlaLayer<B> {
    /// Compiles the decode of a spec; the other ops are compiled when they are first run.
    ///
    /// # Errors
    /// Those of [`MlaLayerSpec::check`] and [`Backend::decode`].
    pub fn new(backend: &B, spec: &MlaLayerSpec) -> Result<Self> {
        Self::with_variant(backend, spec, None)
    }

    /// As [`MlaLayer::new`]; `variant` forces one of [`Backend::variants`] for the decode, such as one that rounds no softmax weights.
    ///
    /// # Errors
    /// Those of [`MlaLayer::new`], and [`Error::VariantUnavailable`].
    pub fn with_variant(backend: &B, spec: &MlaLayerSpec, variant: Option<&str>) -> Result<Self> {
        spec.check()?;
        let decode = backend.decode_for(&spec.mla(), variant, spec.decode_threshold)?;
        let step = backend.step(&decode, Capacity::default())?;
        Ok(Self {
            spec: *spec,
            decode,
            step,
            plan: LayerPlan::default(),
            slot_mapping: Vec::new(),
            seq_lens: Vec::new(),
            pages: Default::default(),
            space: Workspace::default(),
            num_parts: 0,
        })
    }

    /// What it was made for.
    pub fn spec(&self) -> &MlaLayerSpec {
        &self.spec
    }

    /// The compiled decode.
    pub fn decode(&self) -> &B::Decode {
        &self.decode
    }

    /// How the step is worked off.
    pub fn plan(&self) -> &LayerPlan {
        &self.plan
    }

    /// Bytes that the keys and values of prefills take now: never more than [`MlaLayerSpec::workspace_bytes`].
    pub fn workspace_bytes(&self) -> u64 {
        [&self.space.rows, &self.space.k_nope, &self.space.v].map(Room::bytes).iter().sum()
    }

    /// Plans a step for all layers, and makes room for it.
    ///
    /// # Errors
    /// Those of [`LayerPlan::new`] and [`Backend::prepare`]; the step before is then gone.
    pub fn prepare(&mut self, backend: &B, batch: &LayerBatch<'_>, policy: Policy) -> Result<()> {
        self.plan = LayerPlan::default();
        let plan = LayerPlan::new(&self.spec, &backend.tiling(&self.decode), batch, policy)?;
        if !plan.decoded.is_empty() {
            let (kv_indptr, kv_indices) = &plan.decode_pages;
            let pages = PageTable::Csr { kv_indptr, kv_indices };
            backend.prepare(&self.decode, &mut self.step, &plan.decode, pages)?;
        }
        self.num_parts = prefix_parts(&self.spec, &plan, backend.tiling(&self.decode).target_items);
        self.space.grow(backend, &self.spec, &plan, self.num_parts)?;
        if let Some((positions, _)) = &self.space.positions.0 {
            backend.upload(positions, 0, bytemuck::cast_slice(&plan.positions))?;
        }
        self.slot_mapping.clear();
        self.slot_mapping.extend_from_slice(batch.slot_mapping);
        self.seq_lens.clear();
        self.seq_lens.extend_from_slice(batch.seq_lens);
        self.pages = super::plan::csr(&self.spec, batch)?;
        self.plan = plan;
        Ok(())
    }

    /// Fills one layer's [`super::Expanded`] arrays with a prefix, rows `first_row` to `first_row + tokens`, from its pages in the
    /// layer's cache, which hold it by now. Its keys and values serve every step until the pages change; other layers have arrays of
    /// their own.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] without [`LayerArgs::expanded`], and those of `kv_gather` and the projections: pages, sizes, aliases.
    pub fn expand_prefix(
        &self,
        backend: &B,
        pages: &[i32],
        tokens: u32,
        first_row: u32,
        args: &LayerArgs<'_, B::Buffer>,
    ) -> Result<()> {
        let ops = Ops { layer: self, backend, args };
        ops.expand_prefix(pages, tokens, first_row)
    }

    /// Runs one layer of the step.
    ///
    /// # Errors
    /// Those of the ops: scales, strides, sizes, aliases, limits.
    pub fn run(&self, backend: &B, args: &LayerArgs<'_, B::Buffer>) -> Result<()> {
        if self.plan.positions.is_empty() {
            return Ok(());
        }
        let ops = Ops { layer: self, backend, args };
        ops.append()?;
        for chunk in &self.plan.chunks {
            ops.expand(chunk)?;
            for round in &chunk.rounds {
                ops.attend(round)?;
            }
        }
        ops.decode()
    }
}

/// One layer's ops in a step.
struct Ops<'a, B: Backend> {
    layer: &'a MlaLayer<B>,
    backend: &'a B,
    args: &'a LayerArgs<'a, B::Buffer>,
}

impl<'a, B: Backend> Ops<'a, B> {
    fn spec(&self) -> &'a MlaLayerSpec {
        &self.layer.spec
    }

    /// A dense array of the workspace, `[rows, heads, dim]`.
    fn dense(&self, room: &'a Room<B::Buffer>, heads: u32, dim: u32) -> Result<View<'a, B::Buffer>> {
        Ok(View::dense(room.buffer()?, heads, dim))
    }

    /// Rotates, and writes the new rows to the cache: what follows reads them there.
    fn append(&self) -> Result<()> {
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
    fn q_pe(&self) -> Result<View<'a, B::Buffer>> {
        let shape = self.spec().shape;
        self.dense(&self.layer.space.q_pe, shape.num_heads, shape.qk_rope_head_dim)
    }

    /// Tokens that are decoded, run by run: into the latent space, over the cache, and back.
    fn decode(&self) -> Result<()> {
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
    fn sets(&self) -> Result<Attended<'a, B::Buffer>> {
        let (spec, space) = (self.spec(), &self.layer.space);
        let heads = spec.shape.num_heads;
        Ok(Attended {
            out: self.dense(&space.sets, heads, spec.v_head_dim)?,
            lse: self.dense(&space.set_lse, heads, 1)?,
        })
    }

    /// Decoded tokens over the expanded prefixes, in parts of their keys, and all sets into the output.
    fn attend_prefixes(&self, set: Attended<'a, B::Buffer>) -> Result<()> {
        let (spec, args, plan, num_parts) = (self.spec(), self.args, &self.layer.plan, self.layer.num_parts);
        let tokens = plan.decode.num_queries;
        let split = |sequence: &PrefillSequence| {
            // Set 0 is that of the decodes.
            let first = PrefillSequence { out_begin: sequence.out_begin.saturating_add(tokens), ..*sequence };
            first.split_keys(num_parts, tokens)
        };
        let parts: Vec<_> = plan.over_prefixes.iter().flat_map(split).collect();
        let expanded = self.expanded()?;
        let k_pe = View {
            offset: expanded.rows.offset.saturating_add(spec.shape.kv_lora_rank.into()),
            head_stride: 0,
            ..expanded.rows
        };
        let prefill = Prefill {
            q_nope: args.q_nope,
            q_pe: if spec.shape.qk_rope_head_dim > 0 { self.q_pe()? } else { args.q_nope },
            k_nope: expanded.k_nope,
            k_pe,
            v: expanded.v,
            out: set.out,
            lse: set.lse,
            softmax_scale: args.softmax_scale,
        };
        self.backend.prefill(&spec.prefill(), &parts, &prefill)?;
        for run in &plan.decoded {
            let from = |view: View<'a, B::Buffer>| View {
                offset: view.offset.saturating_add(view.token_stride.saturating_mul(run.start.into())),
                ..view
            };
            let sets = StateSets {
                states: from(set.out),
                set_stride: set.out.token_stride.saturating_mul(tokens.into()),
                lse: from(set.lse),
                lse_set_stride: set.lse.token_stride.saturating_mul(tokens.into()),
                output: from(args.out),
                output_lse: None,
                num_sets: num_parts + 1,
                num_tokens: run.end - run.start,
                num_heads: spec.shape.num_heads,
            };
            self.backend.merge_states(&spec.merge(), &sets)?;
        }
        Ok(())
    }

    fn expanded(&self) -> Result<Expanded<'a, B::Buffer>> {
        let detail = "an expanded prefix has keys and values: give LayerArgs::expanded";
        self.args.expanded.ok_or(Error::LayoutMismatch { detail })
    }

    /// See [`MlaLayer::expand_prefix`].
    fn expand_prefix(&self, pages: &[i32], tokens: u32, first_row: u32) -> Result<()> {
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
        let from = |view: View<'a, B::Buffer>| View {
            offset: view.offset.saturating_add(view.token_stride.saturating_mul(first_row.into())),
            ..view
        };
        self.up(
            View { head_stride: 0, ..from(expanded.rows) },
            from(expanded.k_nope),
            from(expanded.v),
            tokens,
        )
    }

    /// Rows of the cache as the keys and values of each head.
    fn up(
        &self,
        x: View<'a, B::Buffer>,
        k_nope: View<'a, B::Buffer>,
        v: View<'a, B::Buffer>,
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
        weight: WeightView<'a, B::Buffer>,
        x: View<'a, B::Buffer>,
        y: View<'a, B::Buffer>,
    ) -> Result<()> {
        self.layer.plan.decoded.iter().try_for_each(|tokens| {
            let from = |view: View<'a, B::Buffer>| View {
                offset: view.offset.saturating_add(view.token_stride.saturating_mul(tokens.start.into())),
                ..view
            };
            let num_tokens = tokens.end - tokens.start;
            self.backend.project(spec, &Project { x: from(x), weight, y: from(y), num_tokens })
        })
    }

    /// The rows of a chunk, as keys and values.
    fn expand(&self, chunk: &Chunk) -> Result<()> {
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

    fn attend(&self, round: &Round) -> Result<()> {
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

    fn target(&self, target: Target) -> Result<Attended<'a, B::Buffer>> {
        let (spec, space) = (self.spec(), &self.layer.space);
        let heads = spec.shape.num_heads;
        let (out, lse) = match target {
            Target::Out => (self.args.out, &space.lse[0]),
            Target::Other => (self.dense(&space.other, heads, spec.v_head_dim)?, &space.lse[1]),
            Target::Partial => (self.dense(&space.partial, heads, spec.v_head_dim)?, &space.lse[2]),
        };
        Ok(Attended { out, lse: self.dense(lse, heads, 1)? })
    }

    fn prefill(&self, sequences: &[PrefillSequence], into: Attended<'a, B::Buffer>) -> Result<()> {
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

/// Parts for the keys of expanded prefixes, so that a device of so many workers has something for each; 0 where the plan has no prefix.
fn prefix_parts(spec: &MlaLayerSpec, plan: &LayerPlan, workers: u32) -> u32 {
    let longest = plan.over_prefixes.iter().map(|sequence| sequence.kv_len).max().unwrap_or(0);
    // A part of fewer keys costs more than it brings.
    let most = longest.div_ceil(256);
    most.min(workers.div_ceil(spec.shape.num_heads).max(1))
}

/// Where attention is written.
struct Attended<'a, T> {
    out: View<'a, T>,
    lse: View<'a, T>,
}

impl<T> Clone for Attended<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Attended<'_, T> {}

impl<T> Default for Workspace<T> {
    fn default() -> Self {
        Self {
            positions: Room::default(),
            q_pe: Room::default(),
            ql_nope: Room::default(),
            latent_out: Room::default(),
            rows: Room::default(),
            k_nope: Room::default(),
            v: Room::default(),
            other: Room::default(),
            partial: Room::default(),
            lse: Default::default(),
            sets: Room::default(),
            set_lse: Room::default(),
        }
    }
}

impl<T> Workspace<T> {
    /// Makes room for a step, and only for what it does.
    fn grow(
        &mut self,
        backend: &impl Backend<Buffer = T>,
        spec: &MlaLayerSpec,
        plan: &LayerPlan,
        num_parts: u32,
    ) -> Result<()> {
        let (heads, bytes) = (u64::from(spec.shape.num_heads), spec.dtype.bytes() as u64);
        let (latent, rope) = (u64::from(spec.shape.kv_lora_rank), u64::from(spec.shape.qk_rope_head_dim));
        let (nope, value) = (u64::from(spec.qk_nope_head_dim), u64::from(spec.v_head_dim));
        let tokens = plan.positions.len() as u64;
        let rows = plan.chunks.iter().map(|chunk| chunk.rows).max().unwrap_or(0).into();
        let decodes = u64::from(plan.decode.num_queries);
        let merges = if plan.num_merges > 0 { tokens } else { 0 };
        let sets = if num_parts > 0 { decodes * (u64::from(num_parts) + 1) } else { 0 };
        let [lse_out, lse_other, lse_partial] = &mut self.lse;
        for (room, count, row_bytes) in [
            (&mut self.positions, tokens, 4),
            (&mut self.q_pe, tokens, heads * rope * bytes),
            (&mut self.ql_nope, decodes, heads * latent * bytes),
            (&mut self.latent_out, decodes, heads * latent * bytes),
            (&mut self.rows, rows, (latent + rope) * bytes),
            (&mut self.k_nope, rows, heads * nope * bytes),
            (&mut self.v, rows, heads * value * bytes),
            (&mut self.other, merges, heads * value * bytes),
            (&mut self.partial, merges, heads * value * bytes),
            (lse_out, tokens, heads * 4),
            (lse_other, tokens, heads * 4),
            (lse_partial, merges, heads * 4),
            (&mut self.sets, sets, heads * value * bytes),
            (&mut self.set_lse, sets, heads * 4),
        ] {
            room.grow(backend, count * row_bytes)?;
        }
        Ok(())
    }
}
