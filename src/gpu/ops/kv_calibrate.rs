//! `kv_calibrate`: what an e4m3 cache would make of new rows, counted on the device.

use std::ops::Range;

use super::args::{Slot, bind_group, distinct_buffers, layout, window_of};
use super::table::Table;
use super::{GROUP, grid, pipeline};
use crate::compose::Source;
use crate::gpu::{Pipelines, window::Window};
use crate::layer::View;
use crate::ops::{Calibrate, CalibrateSpec, CalibrationStats, check_tokens};
use crate::{Error, Result};

/// Tokens of which an invocation looks at a quad each, so that enough loads are in flight.
const TOKENS_PER_LANE: u32 = 8;

/// Looks at new rows before or beside `kv_append`, and adds to the counters of [`CalibrationStats`] on the device. Nothing is read
/// back before the host asks for those 32 bytes.
#[derive(Debug)]
pub struct KvCalibrate {
    spec: CalibrateSpec,
    pipeline: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

/// The tokens of a step. It serves every layer of the model.
#[derive(Debug, Default)]
pub struct CalibrateStep {
    table: Table,
    tokens: Range<u32>,
}

/// One layer's rows and counters, checked and bound for up to a number of tokens.
#[derive(Debug)]
pub struct CalibrateBinding {
    /// `None` where there is room for no token.
    group: Option<wgpu::BindGroup>,
    pipeline: wgpu::ComputePipeline,
    row_quads: u32,
    max_tokens: u32,
}

/// `CalibrateParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    max_tokens: u32,
    limit_bits: u32,
    reserved: [u32; 2],
}

impl KvCalibrate {
    /// Compiles the calibration of a spec.
    ///
    /// # Errors
    /// Those of [`CalibrateSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: CalibrateSpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        let step_layout = layout(device, "mla.kv_calibrate.step", &[Slot::Read])?;
        let slots = [Slot::Uniform, Slot::Read, Slot::Read, Slot::Write];
        let layer_layout = layout(device, "mla.kv_calibrate.layer", &slots)?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table has two words (`Table`, which nobody else writes);
        // - token < max_tokens, by both `min`s in the shader: `prepare` may have been called again since `record`. `bind`
        //   refuses rows that end past the buffer for max_tokens tokens (`Calibrate::check`), and `window_of` binds up to there;
        // - quad < ROW_QUADS, split at LATENT_QUADS: without a rotary part `k_pe` is never read;
        // - `stats` has 8 words (`Calibrate::check`), and places in it are constants below 8.
        // All loops are unrolled; every workgroup variable is stored to before it is read.
        let pipeline = pipeline(pipelines, &source(&spec), &[&step_layout, &layer_layout])?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, pipeline, step_layout, layer_layout, max_groups })
    }

    /// What this calibration is compiled for.
    pub fn spec(&self) -> &CalibrateSpec {
        &self.spec
    }

    /// Uploads which tokens a step looks at: those of a padded batch that are real.
    ///
    /// The upload takes effect before the next submit: give each step that shares a submit a [`CalibrateStep`] of its own.
    ///
    /// # Errors
    /// [`Error::Shape`] for a range that ends before it begins, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut CalibrateStep,
        tokens: Range<u32>,
    ) -> Result<()> {
        let count = self.checked_tokens(check_tokens(&tokens)?)?;
        step.tokens = 0..0;
        if count > 0 {
            step.table.upload(device, queue, &self.step_layout, count, [tokens.start])?;
        }
        step.tokens = tokens;
        Ok(())
    }

    /// Checks and binds one layer for steps whose tokens end at `max_tokens` at most.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer
    /// without `STORAGE`, [`Error::Aliased`] where the counters are in an input, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn bind(
        &self,
        device: &wgpu::Device,
        args: &Calibrate<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<CalibrateBinding> {
        args.check(&self.spec, max_tokens, wgpu::Buffer::size)?;
        self.checked_tokens(max_tokens)?;
        let group = if max_tokens == 0 { None } else { Some(self.group(device, args, max_tokens)?) };
        let (pipeline, row_quads) = (self.pipeline.clone(), self.spec.shape.row_elems() / 4);
        Ok(CalibrateBinding { group, pipeline, row_quads, max_tokens })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &CalibrateStep, binding: &CalibrateBinding) -> Result<()> {
        if step.tokens.end > binding.max_tokens {
            let detail = "the step's tokens end after the binding's max_tokens";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`KvCalibrate::check`] refuses records nothing
    /// and logs an error.
    pub fn record_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &CalibrateStep,
        binding: &CalibrateBinding,
    ) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(table), Some(layer)) = (step.table.group(), &binding.group) else { return };
        if step.tokens.is_empty() {
            return;
        }
        let blocks = (step.tokens.end - step.tokens.start).div_ceil(TOKENS_PER_LANE);
        let (x, y) = grid(u64::from(blocks) * u64::from(binding.row_quads), self.max_groups);
        pass.set_pipeline(&binding.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// [`KvCalibrate::record_in`] in a pass of its own.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &CalibrateStep,
        binding: &CalibrateBinding,
    ) {
        self.record_in(&mut super::pass(encoder, "mla.kv_calibrate"), step, binding);
    }

    /// The shader numbers its items in a `u32`.
    fn checked_tokens(&self, tokens: u32) -> Result<u32> {
        let (need, limit) = (u64::from(tokens), u64::from(u32::MAX / self.spec.shape.row_elems()));
        if need > limit {
            let cure = "calibrate in several steps";
            return Err(Error::Limit { what: "tokens of a calibration", need, limit, cure });
        }
        Ok(tokens)
    }

    fn group(
        &self,
        device: &wgpu::Device,
        args: &Calibrate<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<wgpu::BindGroup> {
        let (shape, input, limits) = (&self.spec.shape, self.spec.input.bytes(), device.limits());
        let k_pe_view = args.rotary(&self.spec);
        let k_pe_dim = if shape.qk_rope_head_dim > 0 { shape.qk_rope_head_dim } else { shape.kv_lora_rank };
        let kv_c = window_of(&limits, "kv_c", &args.kv_c, [max_tokens, 1, shape.kv_lora_rank], input)?;
        let k_pe = window_of(&limits, "k_pe", &k_pe_view, [max_tokens, 1, k_pe_dim], input)?;
        let stats = Window::new(&limits, "stats", args.stats, 0..CalibrationStats::BYTES)?;
        let inputs = [("kv_c", args.kv_c.buffer), ("k_pe", k_pe_view.buffer)];
        distinct_buffers(("stats", args.stats), &inputs)?;

        let base = |view: &View<&wgpu::Buffer>, window: &Window<'_>| {
            ((view.offset - window.skipped(input)) / 4) as u32
        };
        // With one token the stride is unused and may be anything.
        let stride = |stride: u64| if max_tokens > 1 { (stride / 4) as u32 } else { 0 };
        let params = Params {
            kv_c_base_quads: base(&args.kv_c, &kv_c),
            kv_c_stride_quads: stride(args.kv_c.token_stride),
            k_pe_base_quads: base(&k_pe_view, &k_pe),
            k_pe_stride_quads: stride(k_pe_view.token_stride),
            max_tokens,
            limit_bits: args.limit().to_bits(),
            reserved: [0; 2],
        };
        let params = bytemuck::bytes_of(&params);
        let resources = [kv_c.resource(), k_pe.resource(), stats.resource()];
        bind_group(device, "mla.kv_calibrate.layer", &self.layer_layout, params, resources)
    }
}

fn source(spec: &CalibrateSpec) -> Source {
    let consts = [
        ("GROUP", GROUP),
        ("LATENT_QUADS", spec.shape.kv_lora_rank / 4),
        ("ROW_QUADS", spec.shape.row_elems() / 4),
        ("TOKENS_PER_LANE", TOKENS_PER_LANE),
    ];
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        super::lib_in(spec.input),
        include_str!("../../../shaders/kv_calibrate.wgsl"),
    ];
    super::unrolled("kv_calibrate", spec.input.name(), &consts, &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::Dtype;
    let shape = crate::MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|input| source(&CalibrateSpec { shape, input })).into()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let reserved = offset_of!(Params, reserved);
    let fields = vec![
        ("kv_c_base_quads", offset_of!(Params, kv_c_base_quads)),
        ("kv_c_stride_quads", offset_of!(Params, kv_c_stride_quads)),
        ("k_pe_base_quads", offset_of!(Params, k_pe_base_quads)),
        ("k_pe_stride_quads", offset_of!(Params, k_pe_stride_quads)),
        ("max_tokens", offset_of!(Params, max_tokens)),
        ("limit_bits", offset_of!(Params, limit_bits)),
        ("reserved_0", reserved),
        ("reserved_1", reserved + 4),
    ];
    ("CalibrateParams", fields, size_of::<Params>())
}
