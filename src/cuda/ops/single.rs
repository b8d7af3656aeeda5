//! Ops of one kernel: the trait in which they differ, and how all of them are compiled, bound and launched.

use std::fmt::Debug;

use cudarc::driver::DeviceRepr;

use super::table::Table;
use crate::base::error::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::step_table::TableOp;
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, OpOptions};

/// An op of one kernel, whose argument has the address of a step's [`Table`].
///
/// docs/bounds.md has a proof for each op that every address is in its buffer, for every pair of step and binding and whatever the table
/// holds: a comment `bounds: NAME` in the op's file names it.
pub trait SingleOp: TableOp {
    /// The kernel's argument, `Args` of its `.cu`.
    type Params: DeviceRepr + Copy + Debug + Send + Sync;
    /// Threads of a block.
    const THREADS: u32 = super::THREADS;
    /// See [`Kernel::SERVES_RECORDS`].
    const SERVES_RECORDS: bool = false;

    /// The kernel's name; several where a binding chooses.
    fn entries(&self) -> Vec<String>;

    /// A table with room for `capacity`.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    fn new_table(cuda: &Cuda, capacity: Self::Capacity) -> Result<Table>;

    /// See [`Kernel::kernel_capacity`].
    fn capacity(table: &Table) -> Self::Capacity;

    /// See [`Kernel::recording_key`].
    fn form(_: &Table) -> u64 {
        0
    }

    /// Checks that the kernel can number so many entries.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    fn check_count(&self, _: u64) -> Result<()> {
        Ok(())
    }

    /// Uploads a step's input, checked, and says how far it reaches.
    ///
    /// # Errors
    /// The errors of [`Kernel::kernel_prepare`].
    fn upload(&self, cuda: &Cuda, table: &mut Table, input: Self::Input<'_>) -> Result<Self::Extent> {
        let step = self.table(input, |count| self.check_count(count))?;
        table.upload(cuda, step.count, step.words)?;
        Ok(step.extent)
    }

    /// The argument for a layer, without a table.
    ///
    /// # Errors
    /// The errors of [`Kernel::kernel_bind`].
    fn params(&self, args: &Self::Args<&Buffer>, room: Self::Extent) -> Result<Self::Params>;

    /// The place of a layer's kernel in [`SingleOp::entries`].
    fn entry_of(&self, _: &Self::Params) -> usize {
        0
    }

    /// The argument with a table, and the items or threads of the launch: they cover the capacity of step or binding, so that a captured
    /// launch does what the step's table holds at the replay.
    ///
    /// # Errors
    /// [`crate::Error::Limit`].
    fn launch(&self, params: Self::Params, table: &Table) -> Result<(Self::Params, u64)>;
}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer<P> {
    kernel: Function,
    params: P,
    buffers: Vec<Buffer>,
}

impl<O: SingleOp> Kernel<O> for Cuda {
    const SERVES_RECORDS: bool = O::SERVES_RECORDS;
    type Kernels = Vec<Function>;
    type Step = Table;
    type Binding = Layer<O::Params>;

    fn kernel_compile(&self, op: &O, options: &OpOptions) -> Result<(Vec<Function>, (), Choice)> {
        let kernels = op.entries().iter().map(|entry| self.kernel(entry)).collect::<Result<_>>()?;
        Ok((kernels, (), only(options)?))
    }

    fn kernel_step(&self, _: &O, _: &Vec<Function>, capacity: O::Capacity) -> Result<Table> {
        O::new_table(self, capacity)
    }

    fn kernel_capacity(step: &Table) -> O::Capacity {
        O::capacity(step)
    }

    fn recording_key(step: &Table) -> u64 {
        O::form(step)
    }

    fn kernel_prepare(
        &self,
        op: &O,
        _: &Vec<Function>,
        step: &mut Table,
        input: O::Input<'_>,
    ) -> Result<O::Extent> {
        op.upload(self, step, input)
    }

    fn kernel_bind(
        &self,
        op: &O,
        kernels: &Vec<Function>,
        args: &O::Args<&Buffer>,
        room: O::Extent,
    ) -> Result<Layer<O::Params>> {
        let params = op.params(args, room)?;
        let mut buffers = Vec::new();
        op.map(args, |_, buffer| {
            buffers.push(Buffer::clone(buffer));
            Ok(())
        })?;
        Ok(Layer { kernel: kernels[op.entry_of(&params)].clone(), params, buffers })
    }

    fn kernel_record(
        &self,
        op: &O,
        _: &Vec<Function>,
        (): &mut (),
        step: &Table,
        layer: &Layer<O::Params>,
    ) -> Result<()> {
        if step.buffer().is_none() {
            return Ok(());
        }
        let (params, items) = op.launch(layer.params, step)?;
        let blocks = items.div_ceil(O::THREADS.into()) as u32;
        self.launch(&layer.kernel, blocks, O::THREADS, 0, &params, layer.buffers.iter().chain(step.held()))
    }
}

/// An argument of kernels, or a part of one, as the `.cu` has it: a test compares it with the manifest, field by field.
macro_rules! kernel_args {
    ($(#[$about:meta])* $vis:vis struct $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default)]
        $vis struct $name {
            $($field: $type),*
        }

        // SAFETY: plain data without padding, as the kernels have it.
        unsafe impl cudarc::driver::DeviceRepr for $name {}
    };
}
pub(super) use kernel_args;
