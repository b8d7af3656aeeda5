//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{THREADS, address, checked_items, stride};
use crate::Result;
use crate::cache::KvView;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, KvCopyPages, OpOptions, check_copies};

/// `UNITS_PER_THREAD` of kv_copy_pages.cu.
const UNITS_PER_THREAD: u32 = 4;

/// `Args` of kv_copy_pages.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CopyParams {
    source: u64,
    target: u64,
    table: u64,
    block_stride: u64,
    from_first_page: u32,
    from_num_pages: u32,
    to_first_page: u32,
    to_num_pages: u32,
    page_units: u32,
    blocks_per_page: u32,
    max_copies: u32,
    reserved_0: u32,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for CopyParams {}

/// The copy by units of 16 bytes, or by words; the alignment tells which.
#[derive(Debug)]
pub struct Functions {
    /// 16 bytes at a time, where all addresses are multiples of that.
    wide: Function,
    words: Function,
}

/// One layer's cache, held.
#[derive(Debug)]
pub struct Layer {
    kernel: Function,
    args: CopyParams,
    /// Of the slab that is read, and of the one that is written.
    buffers: [Buffer; 2],
}

impl Kernel<KvCopyPages> for Cuda {
    type Kernels = Functions;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, _: &KvCopyPages, options: &OpOptions) -> Result<(Functions, (), Choice)> {
        let wide = self.kernel("kv_copy_pages_wide")?;
        let words = self.kernel("kv_copy_pages_words")?;
        Ok((Functions { wide, words }, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvCopyPages, _: &Functions, max_copies: u32) -> Result<Table> {
        Table::new(self, u64::from(max_copies) * 2)
    }

    fn kernel_capacity(step: &Table) -> u32 {
        step.room(2)
    }

    fn kernel_prepare(
        &self,
        spec: &KvCopyPages,
        _: &Functions,
        step: &mut Table,
        copies: &[(u32, u32)],
    ) -> Result<()> {
        check_copies(&spec.kv, copies)?;
        // Copies write different pages, none of which is read, so there are fewer copies than pages.
        step.upload(self, copies.len() as u32, copies.iter().flat_map(|&(from, to)| [from, to]))
    }

    fn kernel_bind(
        &self,
        spec: &KvCopyPages,
        kernels: &Functions,
        kv: &KvView<&Buffer>,
        (): (),
    ) -> Result<Layer> {
        let page_bytes = spec.page_bytes();
        // From the first slab to the second, if there are two.
        let slabs: Vec<_> = kv.each_slab().collect();
        let pair = [&slabs[0], &slabs[slabs.len() - 1]];
        let [source, target] = pair.map(|slab| address(slab.buffer, slab.base(), 1));
        let [from, to] = pair.map(|slab| slab.pages(&spec.kv));
        let block_stride = stride(spec.kv.num_pages, kv.block_stride, 1);
        let is_wide = (source | target | block_stride | page_bytes).is_multiple_of(16);
        let (kernel, unit) = if is_wide { (&kernels.wide, 16) } else { (&kernels.words, 4) };
        let page_units = (page_bytes / unit) as u32;
        let args = CopyParams {
            source,
            target,
            table: 0,
            block_stride,
            from_first_page: from.start,
            from_num_pages: from.len() as u32,
            to_first_page: to.start,
            to_num_pages: to.len() as u32,
            page_units,
            blocks_per_page: page_units.div_ceil(THREADS * UNITS_PER_THREAD),
            max_copies: 0,
            reserved_0: 0,
        };
        Ok(Layer { kernel: kernel.clone(), args, buffers: pair.map(|slab| slab.buffer.clone()) })
    }

    /// The grid covers the step's capacity: a captured launch copies what the step's table holds at the replay.
    fn kernel_record(
        &self,
        _: &KvCopyPages,
        _: &Functions,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let Some(table) = step.ptr() else { return Ok(()) };
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds: the kernel reads pairs below
        // max_copies, for which the table has room, and moves units below page_units of pages below their slab's num_pages, whose last one's end
        // `check_args` found inside.
        let args = CopyParams { table, max_copies: step.room(2), ..layer.args };
        let grid = u64::from(args.max_copies) * u64::from(args.blocks_per_page);
        let grid = checked_items("blocks of a copy", grid, "split the list over several steps")?;
        self.launch(&layer.kernel, grid, THREADS, 0, &args, step.buffer().into_iter().chain(&layer.buffers))
    }
}
