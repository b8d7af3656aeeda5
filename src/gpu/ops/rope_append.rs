//! `rope_append`: what comes before a decode, in one dispatch.

use super::args::{Slot, bind_group, layout};
use super::kv_append::{self, AppendStep};
use super::rope::{self, Place};
use super::{grid, pipeline};
use crate::compose::{Const, Source, compose};
use crate::gpu::Pipelines;
use crate::{Result, RopeAppend, RopeAppendSpec};

/// Sections of a token's items begin at multiples of this: the subgroups of most devices.
const LANES: u32 = 32;

/// Rotates queries and new keys, and writes the keys into the cache: see [`RopeAppend`].
#[derive(Debug)]
pub struct RotateAppend {
    spec: RopeAppendSpec,
    apart: wgpu::ComputePipeline,
    in_place: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

/// One layer's buffers, checked and bound for up to a number of tokens.
#[derive(Debug)]
pub struct RotateAppendBinding {
    /// `None` where there is room for no token.
    group: Option<wgpu::BindGroup>,
    pipeline: wgpu::ComputePipeline,
    max_tokens: u32,
    num_slots: u64,
}

/// `RopeAppendParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    append: kv_append::Params,
    query: rope::Params,
}

impl RotateAppend {
    /// Compiles the kernels of a spec.
    ///
    /// # Errors
    /// Those of [`RopeAppendSpec::check`], [`crate::Error::OutOfMemory`] and [`crate::Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: RopeAppendSpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        let step_layout = kv_append::step_layout(device)?;
        // With the step's table they are all of WebGPU's eight storage buffers.
        let slots = [
            Slot::Uniform,
            Slot::Read,
            Slot::Read,
            Slot::Write,
            Slot::Read,
            Slot::Read,
            Slot::Read,
            Slot::Write,
        ];
        let layer_layout = layout(device, "mla.rope_append.layer", &slots)?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table holds its count and as many slots (`Table`, which nobody else writes); the shader reads a slot below the count, or
        //   slot 0, which a table has that was recorded, and takes it for an item below the count only;
        // - token < max_tokens, by a `min` in the shader. `bind` refuses rows and positions that end past their buffers for max_tokens
        //   tokens (`RopeAppend::check`), and the windows reach at least up to there;
        // - inside a row: part < HEAD_UNITS, part - QUERY_ITEMS < UNITS, and the rest is below LATENT_QUADS by TOKEN_ITEMS;
        // - 0 <= position < max_position, by `max` and `min` in the shader, and cos_sin has as many rows (`RopeAppend::check`);
        // - slot < NUM_SLOTS is asked in the shader, so the page is one of the pool's, whose last `bind` found inside the buffer.
        // There are no loops.
        let compile = |place| pipeline(pipelines, &source(&spec, place), &[&step_layout, &layer_layout]);
        let (apart, in_place) = (compile(Place::Apart)?, compile(Place::InPlace)?);
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, apart, in_place, step_layout, layer_layout, max_groups })
    }

    /// What this is compiled for.
    pub fn spec(&self) -> &RopeAppendSpec {
        &self.spec
    }

    /// As [`super::KvAppend::prepare`]: the step serves both ops.
    ///
    /// # Errors
    /// [`crate::Error::SlotOutOfRange`], [`crate::Error::SlotOverlap`], [`crate::Error::Limit`], [`crate::Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut AppendStep,
        slot_mapping: &[i64],
    ) -> Result<()> {
        rope::checked_items(slot_mapping.len() as u64, Items::of(&self.spec).token())?;
        step.prepare(device, queue, &self.step_layout, &self.spec.append, slot_mapping)
    }

    /// Checks and binds one layer for steps of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// Those of [`super::KvAppend::bind`] and [`super::Rotate::bind`].
    pub fn bind(
        &self,
        device: &wgpu::Device,
        args: &RopeAppend<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<RotateAppendBinding> {
        let spec = &self.spec;
        args.check(spec, max_tokens, wgpu::Buffer::size)?;
        let in_place = args.is_in_place(spec, max_tokens, |a, b| a == b)?;
        rope::checked_items(max_tokens.into(), Items::of(spec).token())?;
        let group =
            if max_tokens == 0 { None } else { Some(self.group(device, args, max_tokens, in_place)?) };
        let pipeline = if in_place { &self.in_place } else { &self.apart };
        let num_slots = spec.append.kv.num_slots();
        Ok(RotateAppendBinding { group, pipeline: pipeline.clone(), max_tokens, num_slots })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`crate::Error::LayoutMismatch`].
    pub fn check(&self, step: &AppendStep, binding: &RotateAppendBinding) -> Result<()> {
        step.check(binding.max_tokens, binding.num_slots)
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`RotateAppend::check`] refuses records nothing and
    /// logs an error.
    pub fn record_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &AppendStep,
        binding: &RotateAppendBinding,
    ) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(table), Some(layer)) = (step.table(), &binding.group) else { return };
        if step.num_tokens() == 0 {
            return;
        }
        let items = u64::from(step.num_tokens()) * Items::of(&self.spec).token();
        let (x, y) = grid(items, self.max_groups);
        pass.set_pipeline(&binding.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// [`RotateAppend::record_in`] in a pass of its own.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &AppendStep,
        binding: &RotateAppendBinding,
    ) {
        self.record_in(&mut super::pass(encoder, "mla.rope_append"), step, binding);
    }

    fn group(
        &self,
        device: &wgpu::Device,
        args: &RopeAppend<&wgpu::Buffer>,
        max_tokens: u32,
        in_place: bool,
    ) -> Result<wgpu::BindGroup> {
        let (spec, limits) = (&self.spec, device.limits());
        let (append, rows) = kv_append::Params::new(&limits, &spec.append, &args.layer, max_tokens)?;
        let queries = args.rope(max_tokens);
        let names = ["q_pe", "q_pe_out"];
        let (query, windows) = rope::Params::new(&limits, &spec.rope(), &queries, in_place, names)?;
        let resources = windows.resources().into_iter().chain(rows.iter().map(|row| row.resource()));
        let params = Params { append, query };
        let params = bytemuck::bytes_of(&params);
        bind_group(device, "mla.rope_append.layer", &self.layer_layout, params, resources)
    }
}

/// A token's items: `QUERY_ITEMS`, `KEY_ITEMS` and `LATENT_QUADS` of the shader.
struct Items {
    query: u32,
    key: u32,
    latent: u32,
}

impl Items {
    fn of(spec: &RopeAppendSpec) -> Self {
        let query = (rope::token_units(&spec.rope()) as u32).next_multiple_of(LANES);
        let key = (spec.append.shape.qk_rope_head_dim / 8).next_multiple_of(LANES);
        Self { query, key, latent: spec.append.shape.kv_lora_rank / 4 }
    }

    fn token(&self) -> u64 {
        (self.query + self.key + self.latent).into()
    }
}

fn source(spec: &RopeAppendSpec, place: Place) -> Source {
    let (append, query) = (&spec.append, spec.rope());
    let items = Items::of(spec);
    let mut consts = rope::prelude(&query);
    consts.extend(
        [
            ("QUERY_ITEMS", items.query),
            ("KEY_ITEMS", items.key),
            ("TOKEN_ITEMS", items.token() as u32),
            ("PAGE_SIZE", append.kv.page_size),
            ("NUM_SLOTS", append.kv.num_slots() as u32),
            ("LATENT_QUADS", items.latent),
            ("ROW_QUADS", append.shape.row_elems() / 4),
        ]
        .map(|(name, value)| (name, Const::U32(value))),
    );
    let roles =
        rope::role("query", "QueryQuad", spec.query) + "\n" + &rope::role("input", "InQuad", append.input);
    let mut files = vec![roles.as_str(), rope::quad(spec.query).1];
    if append.input != spec.query {
        files.push(rope::quad(append.input).1);
    }
    files.extend(kv_append::convert_libs(append));
    files.extend(rope::libs(place));
    files.push(include_str!("../../../shaders/rope_append.wgsl"));
    let variant = format!("{}.from_{}.{}", rope::name(&query, place), append.input, append.kv.dtype);
    compose("rope_append", &variant, &consts, &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::{AppendSpec, Dtype, KvSpec, MlaShape};
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let mut all = Vec::new();
    for query in rope::every_spec() {
        for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for dtype in Dtype::ALL {
                let append = AppendSpec { shape, kv: KvSpec { dtype, page_size: 48, num_pages: 7 }, input };
                let (query, layout) = (query.dtype, query.layout);
                let spec = RopeAppendSpec { append, query, num_heads: 6, layout };
                all.extend(Place::ALL.map(|place| source(&spec, place)));
            }
        }
    }
    all
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let fields = vec![("append", offset_of!(Params, append)), ("query", offset_of!(Params, query))];
    ("RopeAppendParams", fields, size_of::<Params>())
}
