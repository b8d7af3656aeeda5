//! `kv_append`: new rows into the paged cache, the field's `concat_and_cache_mla`.

use super::args::{Slot, bind_group, distinct_buffers, layout, window_of};
use super::e4m3_scale::Scale;
use super::table::Table;
use super::{GROUP, grid, pipeline};
use crate::compose::Source;
use crate::gpu::{Pipelines, window::Window};
use crate::layer::View;
use crate::{AppendLayer, AppendSpec, Dtype, Error, Result};

/// Tokens of which an invocation converts a quad each, so that enough loads are in flight: fastest on an H200.
const TOKENS_PER_LANE: u32 = 8;

/// Writes new tokens into the cache, converted to its dtype.
///
/// The bytes are those of the host's conversions: equal dtypes are copied bit for bit; other pairs go through f32 and
/// round to nearest even, NaN, infinities and subnormals included. For e4m3 the exact quotient `x / k_scale` is
/// rounded once.
#[derive(Debug)]
pub struct KvAppend {
    spec: AppendSpec,
    pipeline: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

/// A step's slots on the device. It grows as needed and serves every layer of the model.
#[derive(Debug, Default)]
pub struct AppendStep {
    table: Table,
    tokens: u32,
    num_slots: u64,
}

/// One layer's buffers, checked and bound for up to a number of tokens.
#[derive(Debug)]
pub struct AppendBinding {
    /// `None` where there is room for no token.
    group: Option<wgpu::BindGroup>,
    pipeline: wgpu::ComputePipeline,
    row_quads: u32,
    max_tokens: u32,
    num_slots: u64,
}

/// `AppendParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Params {
    scale: Scale,
    kv_base_quads: u32,
    kv_block_stride_quads: u32,
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    max_tokens: u32,
    reserved: u32,
}

impl AppendStep {
    /// Tokens of the last [`KvAppend::prepare`], skipped ones included.
    pub fn num_tokens(&self) -> u32 {
        self.tokens
    }

    /// Checks a `slot_mapping` and uploads it.
    pub(super) fn prepare(
        &mut self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        layout: &wgpu::BindGroupLayout,
        spec: &AppendSpec,
        slot_mapping: &[i64],
    ) -> Result<()> {
        let slots = spec.slots(slot_mapping)?;
        self.tokens = 0;
        self.num_slots = spec.kv.num_slots();
        let tokens = slots.len() as u32;
        if tokens > 0 {
            self.table.upload(device, queue, layout, tokens, slots)?;
        }
        self.tokens = tokens;
        Ok(())
    }

    /// What was uploaded.
    pub(super) fn table(&self) -> Option<&wgpu::BindGroup> {
        self.table.group()
    }

    /// Whether it may be recorded with a binding of so many tokens and slots.
    pub(super) fn check(&self, max_tokens: u32, num_slots: u64) -> Result<()> {
        if self.tokens > max_tokens {
            return Err(Error::LayoutMismatch {
                detail: "the step appends more tokens than the binding's max_tokens",
            });
        }
        if self.num_slots > num_slots {
            return Err(Error::LayoutMismatch { detail: "the step was prepared for a larger pool of pages" });
        }
        Ok(())
    }
}

/// The layout of a step's table.
pub(super) fn step_layout(device: &wgpu::Device) -> Result<wgpu::BindGroupLayout> {
    layout(device, "mla.kv_append.step", &[Slot::Read])
}

impl AppendStep {
    /// A step whose slots the device writes behind the count of `max_tokens`; until then it skips all.
    ///
    /// # Errors
    /// [`Error::Limit`] and [`Error::OutOfMemory`].
    pub(super) fn for_device(
        append: &KvAppend,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        max_tokens: u32,
    ) -> Result<Self> {
        let tokens = append.checked_tokens(max_tokens.into())?;
        let mut step = Self { num_slots: append.spec.kv.num_slots(), ..Self::default() };
        if tokens > 0 {
            let none = std::iter::repeat_n(u32::MAX, tokens as usize);
            step.table.upload(device, queue, &append.step_layout, tokens, none)?;
        }
        step.tokens = tokens;
        Ok(step)
    }

    /// Its count and slots, if it has any.
    pub(super) fn table_buffer(&self) -> Option<&wgpu::Buffer> {
        self.table.buffer()
    }
}

impl KvAppend {
    /// Compiles the append of a spec.
    ///
    /// # Errors
    /// Those of [`AppendSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: AppendSpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        let step_layout = step_layout(device)?;
        let slots = [Slot::Uniform, Slot::Read, Slot::Read, Slot::Write];
        let layer_layout = layout(device, "mla.kv_append.layer", &slots)?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table holds its count and as many slots (`Table`; besides it only `batch_slots` writes slots, and leaves the
        //   count), and the shader reads slots below that count only;
        // - token < max_tokens, by a `min` in the shader: `prepare` may have been called again since `record`. `bind` refuses
        //   rows that end past the buffer for max_tokens tokens (`AppendLayer::check`), and `window_of` binds up to there;
        // - quad < ROW_QUADS, split at LATENT_QUADS: without a rotary part `k_pe` is never read;
        // - slot < NUM_SLOTS is asked in the shader, so the page is one of the pool's, whose last `bind` found inside the
        //   buffer (`KvView::check`).
        // All loops are unrolled.
        let pipeline = pipeline(pipelines, &source(&spec), &[&step_layout, &layer_layout])?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, pipeline, step_layout, layer_layout, max_groups })
    }

    /// What this append is compiled for.
    pub fn spec(&self) -> &AppendSpec {
        &self.spec
    }

    /// Checks a step's `slot_mapping` (`page * page_size + offset` a token, negative: skip it) and uploads it.
    ///
    /// The upload takes effect before the next submit: give each step that shares a submit an [`AppendStep`] of its
    /// own.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`], [`Error::SlotOverlap`], [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut AppendStep,
        slot_mapping: &[i64],
    ) -> Result<()> {
        self.checked_tokens(slot_mapping.len() as u64)?;
        step.prepare(device, queue, &self.step_layout, &self.spec, slot_mapping)
    }

    /// Checks and binds one layer for steps of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for
    /// a buffer without `STORAGE`, [`Error::Aliased`] where the cache is an input too, [`Error::Limit`],
    /// [`Error::OutOfMemory`].
    pub fn bind(
        &self,
        device: &wgpu::Device,
        layer: &AppendLayer<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<AppendBinding> {
        let spec = &self.spec;
        layer.check(spec, max_tokens, wgpu::Buffer::size)?;
        self.checked_tokens(max_tokens.into())?;
        let group = if max_tokens == 0 { None } else { Some(self.group(device, layer, max_tokens)?) };
        Ok(AppendBinding {
            group,
            pipeline: self.pipeline.clone(),
            row_quads: spec.shape.row_elems() / 4,
            max_tokens,
            num_slots: spec.kv.num_slots(),
        })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &AppendStep, binding: &AppendBinding) -> Result<()> {
        step.check(binding.max_tokens, binding.num_slots)
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`KvAppend::check`] refuses records
    /// nothing and logs an error.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, step: &AppendStep, binding: &AppendBinding) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(table), Some(layer)) = (step.table(), &binding.group) else { return };
        if step.tokens == 0 {
            return;
        }
        let blocks = step.tokens.div_ceil(TOKENS_PER_LANE);
        let (x, y) = grid(u64::from(blocks) * u64::from(binding.row_quads), self.max_groups);
        pass.set_pipeline(&binding.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// [`KvAppend::record_in`] in a pass of its own.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &AppendStep, binding: &AppendBinding) {
        self.record_in(&mut super::pass(encoder, "mla.kv_append"), step, binding);
    }

    /// The shader numbers its items in a `u32`.
    fn checked_tokens(&self, tokens: u64) -> Result<u32> {
        let limit = u64::from(u32::MAX / self.spec.shape.row_elems());
        if tokens > limit {
            let cure = "append in several steps";
            return Err(Error::Limit { what: "tokens of an append", need: tokens, limit, cure });
        }
        Ok(tokens as u32)
    }

    fn group(
        &self,
        device: &wgpu::Device,
        layer: &AppendLayer<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<wgpu::BindGroup> {
        let (params, windows) = Params::new(&device.limits(), &self.spec, layer, max_tokens)?;
        let resources = windows.map(|window| window.resource());
        let params = bytemuck::bytes_of(&params);
        bind_group(device, "mla.kv_append.layer", &self.layer_layout, params, resources)
    }
}

impl Params {
    /// One layer for up to `max_tokens` tokens, at least 1, and what is bound of `kv_c`, `k_pe` and the cache.
    pub(super) fn new<'a>(
        limits: &wgpu::Limits,
        spec: &AppendSpec,
        layer: &AppendLayer<&'a wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<(Self, [Window<'a>; 3])> {
        let (shape, input, cache) = (&spec.shape, spec.input.bytes(), spec.kv.dtype.bytes());
        let k_pe_view = layer.rotary(spec);
        let has_rope = shape.qk_rope_head_dim > 0;
        let k_pe_dim = if has_rope { shape.qk_rope_head_dim } else { shape.kv_lora_rank };

        let latent = [max_tokens, 1, shape.kv_lora_rank];
        let kv_c = window_of(limits, "kv_c", &layer.kv_c, latent, input)?;
        let k_pe = window_of(limits, "k_pe", &k_pe_view, [max_tokens, 1, k_pe_dim], input)?;
        let (start, end) = (layer.kv.base() * cache as u64, layer.kv.end(&spec.mla()) * cache as u64);
        let kv = Window::new(limits, "kv", layer.kv.buffer, start..end)?;
        let inputs = [("kv_c", layer.kv_c.buffer), ("k_pe", k_pe_view.buffer)];
        distinct_buffers(("kv", layer.kv.buffer), &inputs)?;

        let base = |view: &View<&wgpu::Buffer>, window: &Window<'_>| {
            ((view.offset - window.skipped(input)) / 4) as u32
        };
        // With one token the stride is unused and may be anything.
        let stride = |stride: u64| if max_tokens > 1 { (stride / 4) as u32 } else { 0 };
        let params = Self {
            scale: Scale::new(if spec.kv.dtype == Dtype::E4m3 { layer.k_scale } else { 1.0 }),
            kv_base_quads: ((layer.kv.base() - kv.skipped(cache)) / 4) as u32,
            kv_block_stride_quads: if spec.kv.num_pages > 1 { (layer.kv.block_stride / 4) as u32 } else { 0 },
            kv_c_base_quads: base(&layer.kv_c, &kv_c),
            kv_c_stride_quads: stride(layer.kv_c.token_stride),
            k_pe_base_quads: base(&k_pe_view, &k_pe),
            k_pe_stride_quads: stride(k_pe_view.token_stride),
            max_tokens,
            reserved: 0,
        };
        Ok((params, [kv_c, k_pe, kv]))
    }
}

/// How new rows are read, converted and placed.
pub(super) fn convert_libs(spec: &AppendSpec) -> [&'static str; 5] {
    let convert = if spec.input == spec.kv.dtype {
        include_str!("../../../shaders/lib/convert_copy.wgsl")
    } else {
        include_str!("../../../shaders/lib/convert_round.wgsl")
    };
    [
        include_str!("../../../shaders/lib/round.wgsl"),
        super::lib_in(spec.input),
        super::lib_out(spec.kv.dtype),
        convert,
        include_str!("../../../shaders/lib/append.wgsl"),
    ]
}

fn source(spec: &AppendSpec) -> Source {
    let consts = [
        ("GROUP", GROUP),
        ("PAGE_SIZE", spec.kv.page_size),
        ("NUM_SLOTS", spec.kv.num_slots() as u32),
        ("LATENT_QUADS", spec.shape.kv_lora_rank / 4),
        ("ROW_QUADS", spec.shape.row_elems() / 4),
        ("TOKENS_PER_LANE", TOKENS_PER_LANE),
    ];
    let mut files = vec![include_str!("../../../shaders/lib/grid.wgsl")];
    files.extend(convert_libs(spec));
    files.push(include_str!("../../../shaders/kv_append.wgsl"));
    super::unrolled("kv_append", &format!("from_{}.{}", spec.input, spec.kv.dtype), &consts, &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    let shape = crate::MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    let kv = |dtype| crate::KvSpec { dtype, page_size: 48, num_pages: 7 };
    let inputs = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let spec = |input| Dtype::ALL.map(|dtype| AppendSpec { shape, kv: kv(dtype), input });
    inputs.into_iter().flat_map(spec).map(|spec| source(&spec)).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let fields = vec![
        ("scale", offset_of!(Params, scale)),
        ("kv_base_quads", offset_of!(Params, kv_base_quads)),
        ("kv_block_stride_quads", offset_of!(Params, kv_block_stride_quads)),
        ("kv_c_base_quads", offset_of!(Params, kv_c_base_quads)),
        ("kv_c_stride_quads", offset_of!(Params, kv_c_stride_quads)),
        ("k_pe_base_quads", offset_of!(Params, k_pe_base_quads)),
        ("k_pe_stride_quads", offset_of!(Params, k_pe_stride_quads)),
        ("max_tokens", offset_of!(Params, max_tokens)),
        ("reserved", offset_of!(Params, reserved)),
    ];
    ("AppendParams", fields, size_of::<Params>())
}
