//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{THREADS, block_stride, checked_items};
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::layer::KvView;
use crate::ops::{CopySpec, check_copies};
use crate::{Error, Result};

/// `UNITS_PER_THREAD` of kv_copy_pages.cu.
const UNITS_PER_THREAD: u32 = 4;

/// `Args` of kv_copy_pages.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CopyArgs {
    kv: u64,
    table: u64,
    block_stride: u64,
    num_pages: u32,
    page_units: u32,
    blocks_per_page: u32,
    max_copies: u32,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for CopyArgs {}

/// Copies pages of the pool bit for bit.
#[derive(Debug, Clone)]
pub struct KvCopyPages {
    cuda: Cuda,
    spec: CopySpec,
    /// 16 bytes at a time, where all places are multiples of that.
    wide: Kernel,
    words: Kernel,
}

/// A list of copies on the card. It grows as needed and serves every layer of the model.
///
/// A [`KvCopyPages::prepare`] that fits [`CopyStep::max_copies`] rewrites it in place, in the stream's order: a captured graph then
/// replays with the new one. One that does not fit replaces the buffer; graphs captured before must be captured again.
#[derive(Debug, Default)]
pub struct CopyStep {
    table: Table,
    copies: u32,
    num_pages: u32,
}

/// One layer's cache, checked and held.
#[derive(Debug, Clone)]
pub struct CopyBinding {
    kernel: Kernel,
    args: CopyArgs,
    _buffer: Buffer,
}

impl CopyStep {
    /// Copies of the last [`KvCopyPages::prepare`].
    pub fn num_copies(&self) -> u32 {
        self.copies
    }

    /// Copies that fit without a new buffer: a graph's grid is sized by them.
    pub fn max_copies(&self) -> u32 {
        u32::try_from(self.table.room() / 2).unwrap_or(u32::MAX)
    }
}

impl KvCopyPages {
    /// Loads the copy of a spec.
    ///
    /// # Errors
    /// Those of [`CopySpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: CopySpec) -> Result<Self> {
        spec.check()?;
        let wide = cuda.kernel("kv_copy_pages_wide")?;
        let words = cuda.kernel("kv_copy_pages_words")?;
        Ok(Self { cuda: cuda.clone(), spec, wide, words })
    }

    /// What this copy was made for.
    pub fn spec(&self) -> &CopySpec {
        &self.spec
    }

    /// A step with room for `max_copies`, and none yet; [`CopyStep::default`] leaves it to the first `prepare`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] and [`Error::Cuda`].
    pub fn step(&self, max_copies: u32) -> Result<CopyStep> {
        let table = Table::new(&self.cuda, u64::from(max_copies) * 2)?;
        Ok(CopyStep { table, copies: 0, num_pages: self.spec.kv.num_pages })
    }

    /// Checks copies `(from, to)` of pages and uploads them.
    ///
    /// # Errors
    /// [`Error::CopyConflict`], with which the step still holds what it held; [`Error::OutOfMemory`], [`Error::Cuda`].
    pub fn prepare(&self, step: &mut CopyStep, copies: &[(u32, u32)]) -> Result<()> {
        check_copies(&self.spec.kv, copies)?;
        // Each copy writes a page of its own, so there are fewer than pages.
        let count = copies.len() as u32;
        step.table.upload(&self.cuda, count, copies.iter().flat_map(|&(from, to)| [from, to]))?;
        step.copies = count;
        step.num_pages = self.spec.kv.num_pages;
        Ok(())
    }

    /// Checks and binds one layer's cache.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`].
    pub fn bind(&self, view: &KvView<&Buffer>) -> Result<CopyBinding> {
        let spec = &self.spec;
        spec.check_view(view, view.buffer.bytes())?;
        let first = view.buffer.ptr() + view.base() * spec.kv.dtype.bytes() as u64;
        let (stride, page_bytes) = (block_stride(&spec.kv, view), spec.page_bytes());
        let is_wide = (first | stride | page_bytes).is_multiple_of(16);
        let (kernel, unit) = if is_wide { (&self.wide, 16) } else { (&self.words, 4) };
        let page_units = (page_bytes / unit) as u32;
        let args = CopyArgs {
            kv: first,
            table: 0,
            block_stride: stride,
            num_pages: spec.kv.num_pages,
            page_units,
            blocks_per_page: page_units.div_ceil(THREADS * UNITS_PER_THREAD),
            max_copies: 0,
        };
        Ok(CopyBinding { kernel: kernel.clone(), args, _buffer: view.buffer.clone() })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &CopyStep, binding: &CopyBinding) -> Result<()> {
        if step.num_pages > binding.args.num_pages {
            return Err(Error::LayoutMismatch { detail: "the step was prepared for a larger pool of pages" });
        }
        Ok(())
    }

    /// Launches one layer's copies on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is
    /// what fits the step, and a replay copies what the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], [`Error::Limit`] and [`Error::Cuda`].
    pub fn record(&self, step: &CopyStep, binding: &CopyBinding) -> Result<()> {
        self.check(step, binding)?;
        let Some(table) = step.table.ptr() else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds: the kernel reads pairs below
        // max_copies, for which the table has room, and moves units below page_units of pages below num_pages, whose last one's end
        // `bind` checked.
        let args = CopyArgs { table, max_copies: step.max_copies(), ..binding.args };
        let grid = u64::from(args.max_copies) * u64::from(args.blocks_per_page);
        let grid = checked_items("blocks of a copy", grid, "split the list over several steps")?;
        self.cuda.launch(&binding.kernel, grid, THREADS, 0, &args)
    }
}
