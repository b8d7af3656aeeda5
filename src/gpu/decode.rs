//! The decode: split, then merge.

mod binding;
mod lists;
mod step;

#[cfg(test)]
pub(crate) use binding::LayerUniform;
#[cfg(test)]
pub(crate) use step::SliceUniform;
pub use step::{MAX_SLICES, SliceBudget};

use step::Tables;

use super::Gpu;
use super::caps::Caps;
use super::kernels::compose::Source;
use super::kernels::decode::{Kernel as Chosen, Merging, VARIANTS, has_lengths_apart, split};
use super::pipelines::{Access, Layout, Pipeline, layout};
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::ops::variants::{candidates, choose};
use crate::ops::{
    Binding, Candidate, Choice, Compiled, DecodeInputs, DecodeOptions, DecodeRequest, Device, Kernel,
    MlaDecodeArgs, Step,
};
use crate::plan::tables::{Capacity, PageTable};
use crate::plan::{Plan, Slabbed, Tiling, check_plan};

/// A layer's buffers, bound.
#[derive(Debug)]
pub struct Layer {
    /// A bind group for each slab of the cache; none where there is room for no query token.
    slabs: Vec<wgpu::BindGroup>,
    slab_pages: u32,
}

/// The kernels of a decode, and what they are bound with: group 0 a layer, group 1 a step.
#[derive(Debug)]
pub struct Pipes {
    layer: Layout,
    step: Layout,
    split: Pipeline,
    /// In the order of [`Merging::ALL`].
    merges: [Pipeline; 2],
    /// Query rows in the kernel's tile; a plan's tiles may be smaller.
    rows_per_tile: u32,
    device_page_list: bool,
    inputs: DecodeInputs,
}

impl Kernel<MlaDecode> for Gpu {
    const SERVES_RECORDS: bool = true;
    type Kernels = Pipes;
    type Step = Slabbed<Tables>;
    type Binding = Layer;

    fn kernel_variants(&self, spec: &MlaDecode) -> Vec<Candidate> {
        candidates(&VARIANTS, self.caps(), &DecodeRequest::one_token(spec))
    }

    fn kernel_compile(&self, spec: &MlaDecode, options: &DecodeOptions) -> Result<(Pipes, Tiling, Choice)> {
        let inputs = DecodeInputs::new(options)?;
        let request = DecodeRequest::new(spec, options);
        let (kernel, choice) = choose(&VARIANTS, self.caps(), &request, options.variant.as_deref())?;
        let (read, write) =
            (if kernel.body.pins_loads() { Access::ReadPinned } else { Access::Read }, Access::Write);
        let where_some = |access, is_some: bool| if is_some { access } else { Access::Absent };
        let is_listed = inputs.topk > 0;
        let layer_entries = [
            Access::Read,
            Access::Read,
            read,
            write,
            write,
            Access::Uniform,
            where_some(Access::Read, is_listed),
            where_some(Access::Read, is_listed && has_lengths_apart(self.caps())),
            where_some(Access::Uniform, inputs.attn_sink),
        ];
        let layer = layout(self, "mla.layer", &layer_entries)?;
        let slice = Access::UniformAt(size_of::<step::SliceUniform>() as u64);
        let pages = where_some(read, !is_listed);
        let step = layout(self, "mla.step", &[read, write, slice, pages])?;
        let [split, few, many] = sources_of(&kernel, self.caps(), &request)?;
        // bounds: mla_decode
        let compile = |source: &Source| self.pipeline(source, &[&layer, &step]);
        let (split, merges) = (compile(&split)?, [compile(&few)?, compile(&many)?]);
        let rows_per_tile = kernel.tiling.rows_per_tile;
        let device_page_list = options.device_page_list;
        let pipes = Pipes { layer, step, split, merges, rows_per_tile, device_page_list, inputs };
        Ok((pipes, options.tiling.unwrap_or(kernel.tiling), choice))
    }

    fn kernel_step(&self, spec: &MlaDecode, pipes: &Pipes, capacity: Capacity) -> Result<Slabbed<Tables>> {
        Tables::new(self, pipes, spec, capacity).map(Slabbed::new)
    }

    fn kernel_capacity(step: &Slabbed<Tables>) -> Capacity {
        step.own.capacity()
    }

    fn kernel_prepare(
        &self,
        spec: &MlaDecode,
        pipes: &Pipes,
        step: &mut Slabbed<Tables>,
        (plan, pages): (&Plan, PageTable<'_>),
    ) -> Result<u32> {
        pipes.inputs.check_plan(plan, pages)?;
        pages.check_device(pipes.device_page_list, plan)?;
        check_plan(plan, spec, pages, pipes.rows_per_tile)?;
        step::prepare(step, self, pipes, spec, (plan, pages))?;
        Ok(plan.num_queries)
    }

    fn kernel_bind(
        &self,
        spec: &MlaDecode,
        pipes: &Pipes,
        args: &MlaDecodeArgs<&wgpu::Buffer>,
        max_queries: u32,
    ) -> Result<Layer> {
        pipes.inputs.check_args(spec, args, max_queries, Self::size)?;
        let slabs = args.each_slab().filter(|_| max_queries > 0);
        let room = (pipes.inputs.topk, max_queries);
        let bind = |args| binding::bind(self, &pipes.layer, spec, room, &args);
        Ok(Layer { slabs: slabs.map(bind).collect::<Result<_>>()?, slab_pages: args.kv.slabs.slab_pages() })
    }

    fn kernel_record(
        &self,
        spec: &MlaDecode,
        pipes: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Slabbed<Tables>,
        layer: &Layer,
    ) -> Result<()> {
        step.check(layer.slab_pages)?;
        for (group, tables) in layer.slabs.iter().zip(step.each()) {
            pass.set_bind_group(0, group, &[]);
            self.dispatch_split(pipes, pass, tables, None);
        }
        self.dispatch_merge(spec, pipes, pass, &step.own, layer);
        Ok(())
    }
}

impl Compiled<MlaDecode, Gpu> {
    /// Records slice `index` of [`Step::num_slices`], the merge with the last. The slices of one step and layer are
    /// submitted in order, in as many frames as the host likes, before the step is prepared again.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], before anything is recorded.
    pub fn record_slice(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &Step<MlaDecode, Gpu>,
        binding: &Binding<MlaDecode, Gpu>,
        index: usize,
    ) -> Result<()> {
        self.check(step, binding)?;
        let descriptor = wgpu::ComputePassDescriptor { label: Some("mla_decode"), timestamp_writes: None };
        self.record_slice_on(&mut encoder.begin_compute_pass(&descriptor), step, binding, index)
    }

    /// Like [`Compiled::record_slice`], in the host's pass: with timestamps around it, a host learns what its [`SliceBudget`] should
    /// be.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], before anything is recorded.
    pub fn record_slice_on(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Step<MlaDecode, Gpu>,
        binding: &Binding<MlaDecode, Gpu>,
        index: usize,
    ) -> Result<()> {
        self.check(step, binding)?;
        let slices = step.num_slices();
        let detail = "the step has fewer slices: see `Step::num_slices`";
        if index >= slices {
            return Err(Error::LayoutMismatch { detail });
        }
        step.raw.check(binding.raw.slab_pages)?;
        let Some((slab, tables, slice)) = step::slice(&step.raw, index) else { return Ok(()) };
        if let Some(group) = binding.raw.slabs.get(slab) {
            pass.set_bind_group(0, group, &[]);
            self.device.dispatch_split(&self.kernels, pass, tables, Some(slice));
        }
        if index + 1 == slices {
            self.device.dispatch_merge(&self.op, &self.kernels, pass, &step.raw.own, &binding.raw);
        }
        Ok(())
    }
}

impl Gpu {
    /// Whether a variant on cooperative matrices is selected for a spec.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn has_tensor_cores_for(&self, spec: &MlaDecode) -> bool {
        let choice = choose(&VARIANTS, self.caps(), &DecodeRequest::one_token(spec), None);
        spec.check().is_ok() && choice.is_ok_and(|(_, choice)| choice.tensor_cores)
    }

    fn dispatch_split(
        &self,
        pipes: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Tables,
        slice: Option<usize>,
    ) {
        let items = step.bind(pass, slice);
        if items > 0 {
            pass.set_pipeline(&pipes.split);
            self.dispatch_groups(pass, items);
        }
    }

    /// Follows the split in the same pass.
    fn dispatch_merge(
        &self,
        spec: &MlaDecode,
        pipes: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Tables,
        layer: &Layer,
    ) {
        let rows = step.capacity().merges * spec.shape.num_heads;
        if let (Some(group), 1..) = (layer.slabs.first(), rows) {
            // After slabs, which have tables of their own.
            if layer.slabs.len() > 1 {
                pass.set_bind_group(0, group, &[]);
                step.bind(pass, None);
            }
            let merging = Merging::of(rows.into());
            pass.set_pipeline(&pipes.merges[merging as usize]);
            self.dispatch_groups(pass, rows * merging.parts(&spec.shape));
        }
    }

    fn dispatch_groups(&self, pass: &mut wgpu::ComputePass<'_>, groups: u32) {
        let width = self.caps().max_workgroups;
        pass.dispatch_workgroups(groups.min(width), groups.div_ceil(width), 1);
    }
}

/// The shaders that a decode compiles on a device of these capabilities, the split and the two shapes of the merge: for tools that
/// compile them elsewhere.
///
/// # Errors
/// The errors of [`MlaDecode::check`], [`Error::VariantUnavailable`].
pub fn decode_sources(caps: &Caps, spec: &MlaDecode, options: &DecodeOptions) -> Result<[Source; 3]> {
    spec.check()?;
    let request = DecodeRequest::new(spec, options);
    let (kernel, _) = choose(&VARIANTS, caps, &request, options.variant.as_deref())?;
    sources_of(&kernel, caps, &request)
}

fn sources_of(kernel: &Chosen, caps: &Caps, request: &DecodeRequest) -> Result<[Source; 3]> {
    let fits_no_tile =
        || Error::VariantUnavailable { name: "that was chosen".into(), why: "it fits no tile here".into() };
    let split = split(kernel.body, caps, request).ok_or_else(fits_no_tile)?;
    let merge = |merging: Merging| merging.source(&request.spec, request.features, kernel.body.pins_loads());
    let [few, many] = Merging::ALL.map(merge);
    Ok([split, few, many])
}
