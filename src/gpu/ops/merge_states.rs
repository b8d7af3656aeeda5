//! `merge_states`: any number of partial attention results into one.

use std::ops::Range;

use super::args::{Slot, bind_group, layout, window_of};
use super::table::Table;
use super::{GROUP, grid, pipeline};
use crate::compose::Source;
use crate::gpu::scope::scoped;
use crate::gpu::{Pipelines, window::Window};
use crate::layer::View;
use crate::ops::{MergeStatesSpec, StateSets};
use crate::{Dtype, Error, Result};

/// Sets that an invocation has loads in flight for: those of a prefix in 8 parts and what is merged with it.
const TURN: u32 = 9;

/// Merges sets of partial attention results: see [`StateSets`].
#[derive(Debug)]
pub struct MergeStateSets {
    spec: MergeStatesSpec,
    pipeline: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    /// Bound where the caller wants no LSE.
    no_lse: wgpu::Buffer,
    max_groups: u32,
}

/// Which tokens a step merges, and how many sets. It serves every layer of the model.
#[derive(Debug, Default)]
pub struct MergeSetsStep {
    table: Table,
    tokens: Range<u32>,
    num_sets: u32,
}

/// One layer's buffers, checked and bound for up to a number of tokens and sets.
#[derive(Debug)]
pub struct MergeSetsBinding {
    /// `None` where there is room for no token or no head.
    group: Option<wgpu::BindGroup>,
    spec: MergeStatesSpec,
    max_tokens: u32,
    max_sets: u32,
    num_heads: u32,
}

/// `SetStrides` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct SetStrides {
    offset: u32,
    set_stride: u32,
    token_stride: u32,
    head_stride: u32,
}

/// `MergeSetsParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    states: SetStrides,
    lse: SetStrides,
    output: SetStrides,
    output_lse: SetStrides,
    max_tokens: u32,
    max_sets: u32,
    num_heads: u32,
    writes_lse: u32,
}

impl MergeStateSets {
    /// Compiles the merge of a spec.
    ///
    /// # Errors
    /// Those of [`MergeStatesSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: MergeStatesSpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        use Slot::{Read, Uniform, Write};
        let step_layout = layout(device, "mla.merge_states.step", &[Read])?;
        let layer_layout = layout(device, "mla.merge_states.layer", &[Uniform, Read, Read, Write, Write])?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table holds three words (`prepare`, and nobody else writes it); tokens are below max_tokens and sets below max_sets by `min`
        //   in the shader, each at least 1 where there is a group, and what is written is so by comparison too; heads are the rest of a
        //   division by num_heads, which is at least 1 where there is a group. `bind` refuses views and sets that end past their buffers
        //   for so many (`StateSets::check`), and `window_of` binds up to there;
        // - a quad is below HEAD_QUADS, the rest of a division by it;
        // - `at` cannot wrap: a window has less than 2^32 bytes, and a stride that is used is less than that.
        // Loops count up by TURN to the number of sets, at most 2^16.
        let pipeline = pipeline(pipelines, &source(&spec), &[&step_layout, &layer_layout])?;
        let no_lse = scoped(device, "a buffer of 16 bytes", || {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("mla.merge_states.no_lse"),
                size: 16,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        })?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, pipeline, step_layout, layer_layout, no_lse, max_groups })
    }

    /// What this merge is compiled for.
    pub fn spec(&self) -> &MergeStatesSpec {
        &self.spec
    }

    /// Uploads which tokens a step merges, and how many of the sets.
    ///
    /// The upload takes effect before the next submit: give each step that shares a submit a [`MergeSetsStep`] of its own.
    ///
    /// # Errors
    /// [`Error::Shape`] for a range that ends before it begins, [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut MergeSetsStep,
        tokens: Range<u32>,
        num_sets: u32,
    ) -> Result<()> {
        crate::ops::check_tokens(&tokens)?;
        step.tokens = 0..0;
        let count = tokens.end - tokens.start;
        step.table.upload(device, queue, &self.step_layout, count, [tokens.start, num_sets])?;
        (step.tokens, step.num_sets) = (tokens, num_sets);
        Ok(())
    }

    /// Checks and binds one layer, for steps of tokens below `args.num_tokens` and of up to `args.num_sets` sets.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Alignment`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer without `STORAGE`,
    /// [`Error::Aliased`] where an output is an input too or both outputs are one, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn bind(&self, device: &wgpu::Device, args: &StateSets<&wgpu::Buffer>) -> Result<MergeSetsBinding> {
        args.check(&self.spec, wgpu::Buffer::size)?;
        args.check_aliases(|a, b| a == b)?;
        let is_empty = args.num_tokens == 0 || args.num_heads == 0;
        Ok(MergeSetsBinding {
            group: if is_empty { None } else { Some(self.group(device, args)?) },
            spec: self.spec,
            max_tokens: args.num_tokens,
            max_sets: args.num_sets,
            num_heads: args.num_heads,
        })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &MergeSetsStep, binding: &MergeSetsBinding) -> Result<()> {
        if step.tokens.end > binding.max_tokens || step.num_sets > binding.max_sets {
            let detail = "the step merges more tokens or sets than the binding has";
            return Err(Error::LayoutMismatch { detail });
        }
        if binding.spec != self.spec {
            return Err(Error::LayoutMismatch { detail: "the binding is of a merge of another spec" });
        }
        Ok(())
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`MergeStateSets::check`] refuses records nothing
    /// and logs an error.
    pub fn record_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &MergeSetsStep,
        binding: &MergeSetsBinding,
    ) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(table), Some(layer)) = (step.table.group(), &binding.group) else { return };
        // Output rows do not overlap and are in a window of at most 4 GiB, of quads of 8 bytes or more: this fits.
        let rows = u64::from(step.tokens.end - step.tokens.start) * u64::from(binding.num_heads);
        if rows == 0 {
            return;
        }
        let (x, y) = grid(rows * u64::from(self.spec.head_size / 4), self.max_groups);
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// [`MergeStateSets::record_in`] in a pass of its own.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &MergeSetsStep,
        binding: &MergeSetsBinding,
    ) {
        self.record_in(&mut super::pass(encoder, "mla.merge_states"), step, binding);
    }

    fn group(&self, device: &wgpu::Device, args: &StateSets<&wgpu::Buffer>) -> Result<wgpu::BindGroup> {
        let limits = device.limits();
        let (dim, bytes) = (self.spec.head_size, self.spec.dtype.bytes());
        let (tokens, heads) = (args.num_tokens, args.num_heads);
        // From the first set to the end of the last.
        let (last, last_lse) = args.last();
        let sets = |what, first: View<&_>, last: View<&_>, dim: u32, bytes: usize| {
            let end = last.end(tokens.into(), heads.into(), dim.into());
            let bytes = bytes as u64;
            (what, first.offset.saturating_mul(bytes)..end.saturating_mul(bytes))
        };
        let (what, range) = sets("states", args.states, last, dim, bytes);
        let states = Window::new(&limits, what, args.states.buffer, range)?;
        let (what, range) = sets("lse", args.lse, last_lse, 1, 4);
        let lse = Window::new(&limits, what, args.lse.buffer, range)?;
        let output = window_of(&limits, "output", &args.output, [tokens, heads, dim], bytes)?;
        let output_lse = match &args.output_lse {
            Some(view) => window_of(&limits, "output_lse", view, [tokens, heads, 1], 4)?,
            None => Window::new(&limits, "output_lse", &self.no_lse, 0..16)?,
        };
        let strides = |view: &View<&_>, window: &Window<'_>, set_stride: u64, bytes: usize, unit: u64| {
            // The stride of an axis of one is unused, and may be anything.
            let used = |count: u32, stride: u64| if count > 1 { (stride / unit) as u32 } else { 0 };
            SetStrides {
                offset: ((view.offset - window.skipped(bytes)) / unit) as u32,
                set_stride: used(args.num_sets, set_stride),
                token_stride: used(tokens, view.token_stride),
                head_stride: used(heads, view.head_stride),
            }
        };
        let params = Params {
            states: strides(&args.states, &states, args.set_stride, bytes, 4),
            lse: strides(&args.lse, &lse, args.lse_set_stride, 4, 1),
            output: strides(&args.output, &output, 0, bytes, 4),
            output_lse: args.output_lse.map(|view| strides(&view, &output_lse, 0, 4, 1)).unwrap_or_default(),
            max_tokens: tokens,
            max_sets: args.num_sets,
            num_heads: heads,
            writes_lse: args.output_lse.is_some().into(),
        };
        let resources = [states, lse, output, output_lse];
        let resources = resources.iter().map(Window::resource);
        bind_group(
            device,
            "mla.merge_states.layer",
            &self.layer_layout,
            bytemuck::bytes_of(&params),
            resources,
        )
    }
}

fn source(spec: &MergeStatesSpec) -> Source {
    let consts = [("GROUP", GROUP), ("HEAD_QUADS", spec.head_size / 4), ("TURN", TURN)];
    // The spec refuses e4m3.
    let quads = match spec.dtype {
        Dtype::F32 => include_str!("../../../shaders/lib/quad_f32.wgsl"),
        Dtype::F16 => include_str!("../../../shaders/lib/quad_f16.wgsl"),
        Dtype::Bf16 => include_str!("../../../shaders/lib/quad_bf16.wgsl"),
        Dtype::E4m3 => "",
    };
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        quads,
        super::lib_out(spec.dtype),
        include_str!("../../../shaders/merge_states.wgsl"),
    ];
    super::unrolled("merge_states", &spec.dtype.to_string(), &consts, &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    let spec = |dtype| MergeStatesSpec { dtype, head_size: 96 };
    [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|dtype| source(&spec(dtype))).into()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let fields = vec![
        ("states", offset_of!(Params, states)),
        ("lse", offset_of!(Params, lse)),
        ("output", offset_of!(Params, output)),
        ("output_lse", offset_of!(Params, output_lse)),
        ("max_tokens", offset_of!(Params, max_tokens)),
        ("max_sets", offset_of!(Params, max_sets)),
        ("num_heads", offset_of!(Params, num_heads)),
        ("writes_lse", offset_of!(Params, writes_lse)),
    ];
    ("MergeSetsParams", fields, size_of::<Params>())
}
