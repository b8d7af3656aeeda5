//! Ops of one kernel: the trait in which they differ, and how all of them are compiled, bound and recorded.

use std::fmt::Debug;

use super::table::Table;
use crate::base::error::Result;
use crate::gpu::Gpu;
use crate::gpu::buffer::Window;
use crate::gpu::kernels::compose::Source;
use crate::gpu::pipelines::{Access, Layout, Pipeline, dispatch, group_with_params, layout, storage};
use crate::ops::step_table::TableOp;
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, OpOptions};

/// An op of one kernel. Group 0 of its shaders is a step's [`Table`]; group 1 is a uniform of [`SingleOp::Params`] and a layer's buffers.
///
/// docs/bounds.md has a proof for each op that every index is in bounds, for every pair of table and binding, and that every loop ends: a
/// comment `bounds: NAME` in the op's file names it.
pub trait SingleOp: TableOp {
    /// The uniform of a layer.
    type Params: Uniform + bytemuck::NoUninit + Debug + Send + Sync;
    /// Labels of a step's and of a layer's bind group.
    const LABELS: [&'static str; 2];
    /// A layer's buffers, behind the uniform.
    const BUFFERS: &'static [Access];
    /// Whether the last of them is an optional output.
    const LAST_IS_OPTIONAL: bool = false;
    /// See [`Kernel::SERVES_RECORDS`].
    const SERVES_RECORDS: bool = false;

    /// Whether counters of what rounding loses are bound behind the other buffers.
    fn guards(&self) -> bool {
        false
    }

    /// The shader; several where a binding chooses, which all bind the same.
    fn sources(&self) -> Vec<Source>;

    /// Checks limits on a step's count, other than that of the grid.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    fn check_count(&self, _: u64) -> Result<()> {
        Ok(())
    }

    /// Invocations for a table with a count of `count`: for the `layer` that it is recorded with, or an upper bound before that is known.
    fn items(&self, count: u32, layer: Option<&Self::Params>) -> u64;

    /// Uploads a step's input, checked, and says how far it reaches.
    ///
    /// # Errors
    /// The errors of [`Kernel::kernel_prepare`].
    fn upload(
        &self,
        gpu: &Gpu,
        layout: &wgpu::BindGroupLayout,
        table: &mut Table,
        input: Self::Input<'_>,
    ) -> Result<Self::Extent> {
        let step = self.table(input, |count| self.check_table(gpu, count))?;
        table.upload(gpu, layout, step.count, step.words)?;
        Ok(step.extent)
    }

    /// Checks that the kernel can number so many entries.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    fn check_table(&self, gpu: &Gpu, count: u64) -> Result<()> {
        self.check_count(count)?;
        // More entries than a `u32` counts were refused by `check_count`, or have more items than any grid.
        gpu.grid(self.items(u32::try_from(count).unwrap_or(u32::MAX), None)).map(drop)
    }

    /// A layer by [`Kernels::layer`]; `None` where there is room for nothing.
    ///
    /// # Errors
    /// The errors of [`Kernel::kernel_bind`].
    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &Self::Args<&wgpu::Buffer>,
        room: Self::Extent,
    ) -> Result<Option<Layer<Self::Params>>>;
}

/// What a [`SingleOp`] is compiled to.
#[derive(Debug)]
pub struct Kernels {
    /// In the order of [`SingleOp::sources`].
    pipelines: Vec<Pipeline>,
    step: Layout,
    layer: Layout,
    label: &'static str,
    /// A buffer that is bound in place of an optional output.
    unwanted: Option<wgpu::Buffer>,
}

/// One layer's buffers, bound.
#[derive(Debug)]
pub struct Layer<P> {
    group: wgpu::BindGroup,
    pipeline: Pipeline,
    params: P,
}

impl Kernels {
    /// Binds a layer's uniform and its buffers, in the order of [`SingleOp::BUFFERS`] and then counters; `None` stands for an output
    /// that is not wanted. `source` is the place of its shader in [`SingleOp::sources`].
    ///
    /// # Errors
    /// The errors of [`group_with_params`].
    pub(super) fn layer<'a, P: bytemuck::NoUninit>(
        &'a self,
        gpu: &Gpu,
        params: P,
        windows: impl IntoIterator<Item = Option<Window<'a>>>,
        source: usize,
    ) -> Result<Option<Layer<P>>> {
        let unwanted = || self.unwanted.as_ref().map(|buffer| buffer.as_entire_binding().into());
        let resources =
            windows.into_iter().filter_map(|window| window.map_or_else(unwanted, |w| Some(w.resource())));
        let group = group_with_params(gpu, self.label, &self.layer, &params, resources)?;
        Ok(Some(Layer { group, pipeline: self.pipelines[source].clone(), params }))
    }
}

impl<O: SingleOp> Kernel<O> for Gpu {
    const SERVES_RECORDS: bool = O::SERVES_RECORDS;
    type Kernels = Kernels;
    type Step = Table;
    /// `None` where there is room for nothing.
    type Binding = Option<Layer<O::Params>>;

    fn kernel_compile(&self, op: &O, options: &OpOptions) -> Result<(Kernels, (), Choice)> {
        let choice = only(options)?;
        let [step, label] = O::LABELS;
        let unwanted = if O::LAST_IS_OPTIONAL { Some(storage(self, label, 16)?) } else { None };
        let step = layout(self, step, &[Access::Read])?;
        let counters: &[Access] = if op.guards() { &[Access::Write] } else { &[] };
        let layer = layout(self, label, &[&[Access::Uniform], O::BUFFERS, counters].concat())?;
        let compile = |source: &Source| self.pipeline(source, &[&step, &layer]);
        let pipelines = op.sources().iter().map(compile).collect::<Result<_>>()?;
        Ok((Kernels { pipelines, step, layer, label, unwanted }, (), choice))
    }

    fn kernel_step(&self, _: &O, _: &Kernels, _: O::Capacity) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        op: &O,
        kernels: &Kernels,
        step: &mut Table,
        input: O::Input<'_>,
    ) -> Result<O::Extent> {
        op.upload(self, &kernels.step, step, input)
    }

    fn kernel_bind(
        &self,
        op: &O,
        kernels: &Kernels,
        args: &O::Args<&wgpu::Buffer>,
        room: O::Extent,
    ) -> Result<Self::Binding> {
        op.bind(self, kernels, args, room)
    }

    fn kernel_record(
        &self,
        op: &O,
        _: &Kernels,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        binding: &Self::Binding,
    ) -> Result<()> {
        if let (Some(table), Some(layer), count @ 1..) = (step.group(), binding, step.count()) {
            let grid = self.grid(op.items(count, Some(&layer.params)))?;
            dispatch(pass, &layer.pipeline, &[table, &layer.group], grid);
        }
        Ok(())
    }
}

/// A struct's name in WGSL, where its fields are, and its bytes.
#[cfg(test)]
pub(super) type HostLayout = (&'static str, Vec<(&'static str, usize)>, usize);

/// A field of a uniform: a number, or a struct that [`uniform`] makes, which a test compares with the shader's.
pub trait Uniform {
    /// Adds the layout of the struct, and of those in it.
    #[cfg(test)]
    fn layouts(_: &mut Vec<HostLayout>) {}
}

impl Uniform for u32 {}
impl Uniform for i32 {}
impl Uniform for f32 {}

/// A struct as a shader has it, by its name there.
macro_rules! uniform {
    ($wgsl:literal: $(#[$doc:meta])* $vis:vis struct $host:ident { $($seen:vis $field:ident: $type:ty),* $(,)? }) => {
        #[doc = concat!("`", $wgsl, "` of the shader.")]
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
        $vis struct $host {
            $($seen $field: $type),*
        }

        impl $crate::gpu::ops::single::Uniform for $host {
            #[cfg(test)]
            fn layouts(all: &mut Vec<$crate::gpu::ops::single::HostLayout>) {
                $(<$type as $crate::gpu::ops::single::Uniform>::layouts(all);)*
                let fields = vec![$((stringify!($field), std::mem::offset_of!($host, $field))),*];
                all.push(($wgsl, fields, size_of::<$host>()));
            }
        }
    };
}
pub(super) use uniform;
