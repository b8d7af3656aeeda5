//! `kv_gather`: tokens of the paged cache to rows of a contiguous workspace, the field's `gather_and_maybe_dequant_cache`.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, MAX_ITEMS, THREADS, block_stride, entry_of};
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{Gather, GatherRange, GatherSpec};
use crate::tables::PageTable;
use crate::{Dtype, Error, Result};

/// `PLACES_PER_THREAD` of kv_gather.cu.
const PLACES_PER_THREAD: u32 = 8;

/// `Args` of kv_gather.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct GatherArgs {
    kv: u64,
    out: u64,
    table: u64,
    block_stride: u64,
    out_stride: u64,
    max_rows: u32,
    max_pieces: u32,
    num_slots: u32,
    page_size: u32,
    row_quads: u32,
    k_scale: f32,
    by_row_quads: Divisor,
    by_page_size: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for GatherArgs {}

/// Copies ranges of sequences out of the paged cache, converted to another dtype where that is asked for.
///
/// The bytes are those of the host's conversions: see [`crate::Backend::kv_gather`].
#[derive(Debug, Clone)]
pub struct KvGather {
    cuda: Cuda,
    spec: GatherSpec,
    kernel: Kernel,
}

/// A step's ranges and their pages on the card. It grows as needed and serves every layer of the model.
///
/// A [`KvGather::prepare`] that fits [`GatherStep::max_pages`] rewrites them in place, in the stream's order: a captured graph then
/// replays with the new ones. One that does not fit replaces the buffer; graphs captured before must be captured again.
#[derive(Debug, Default)]
pub struct GatherStep {
    table: Table,
    rows: u32,
    num_slots: u64,
}

/// One layer's cache and workspace, checked and held, for up to a number of rows.
#[derive(Debug, Clone)]
pub struct GatherBinding {
    kernel: Kernel,
    args: GatherArgs,
    num_slots: u64,
    _buffers: [Buffer; 2],
}

impl GatherStep {
    /// Rows that the output of the last [`KvGather::prepare`] must have: the end of the last range's.
    pub fn num_rows(&self) -> u32 {
        self.rows
    }

    /// Pages, those in part included, that fit without a new buffer: a graph's grid is sized by them.
    pub fn max_pages(&self) -> u32 {
        u32::try_from(self.table.room() / 3).unwrap_or(u32::MAX)
    }
}

impl KvGather {
    /// Loads the gather of a spec.
    ///
    /// # Errors
    /// Those of [`GatherSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: GatherSpec) -> Result<Self> {
        spec.check()?;
        let kernel = cuda.kernel(gather_entry(&spec))?;
        Ok(Self { cuda: cuda.clone(), spec, kernel })
    }

    /// What this gather was made for.
    pub fn spec(&self) -> &GatherSpec {
        &self.spec
    }

    /// A step with room for `max_pages` pages, those in part included, and none yet; [`GatherStep::default`] leaves it to the first
    /// `prepare`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] and [`Error::Cuda`].
    pub fn step(&self, max_pages: u32) -> Result<GatherStep> {
        let table = Table::new(&self.cuda, u64::from(max_pages) * 3)?;
        Ok(GatherStep { table, rows: 0, num_slots: self.spec.kv.num_slots() })
    }

    /// Checks a step's ranges and the page ids that they need, and uploads them.
    ///
    /// # Errors
    /// [`Error::GatherRange`] for a range outside of its sequence, [`Error::GatherOverlap`], [`Error::PageOutOfRange`],
    /// [`Error::SeqLen`], [`Error::Length`], [`Error::LayoutMismatch`] for [`PageTable::Device`], [`Error::Limit`]: with these the step
    /// still holds what it held. [`Error::OutOfMemory`], [`Error::Cuda`].
    pub fn prepare(
        &self,
        step: &mut GatherStep,
        pages: PageTable<'_>,
        seq_lens: &[i32],
        ranges: &[GatherRange],
    ) -> Result<()> {
        let all = self.spec.pieces(pages, seq_lens, ranges)?;
        let (need, limit) = (all.pieces.len() as u64, self.max_pieces().into());
        if need > limit {
            let cure = "gather in several steps";
            return Err(Error::Limit { what: "pages of a gather", need, limit, cure });
        }
        let words: &[u32] = bytemuck::cast_slice(&all.pieces);
        step.table.upload(&self.cuda, need as u32, words.iter().copied())?;
        (step.rows, step.num_slots) = (all.rows, self.spec.kv.num_slots());
        Ok(())
    }

    /// Checks and binds one layer for steps of at most `max_rows` rows of output ([`GatherStep::num_rows`]).
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::Aliased`] where the output is the
    /// cache's buffer.
    pub fn bind(&self, args: &Gather<&Buffer>, max_rows: u32) -> Result<GatherBinding> {
        let spec = &self.spec;
        args.check(spec, max_rows, Buffer::bytes)?;
        args.check_aliases(Buffer::same_as)?;
        let (cache, output) = (spec.kv.dtype.bytes() as u64, spec.output.bytes() as u64);
        let row_quads = spec.shape.row_elems() / 4;
        let num_slots = spec.kv.num_slots();
        let bound = GatherArgs {
            kv: args.kv.buffer.ptr() + args.kv.base() * cache,
            out: args.out.buffer.ptr() + args.out.offset * output,
            table: 0,
            block_stride: block_stride(&spec.kv, &args.kv),
            // With one row the stride is unused and may be anything.
            out_stride: if max_rows > 1 { args.out.token_stride * output } else { 0 },
            max_rows,
            max_pieces: 0,
            num_slots: num_slots as u32,
            page_size: spec.kv.page_size,
            row_quads,
            k_scale: args.k_scale,
            by_row_quads: Divisor::new(row_quads),
            by_page_size: Divisor::new(spec.kv.page_size),
        };
        let buffers = [args.kv.buffer.clone(), args.out.buffer.clone()];
        Ok(GatherBinding { kernel: self.kernel.clone(), args: bound, num_slots, _buffers: buffers })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &GatherStep, binding: &GatherBinding) -> Result<()> {
        if step.rows > binding.args.max_rows {
            let detail = "the step gathers to rows past the binding's max_rows";
            return Err(Error::LayoutMismatch { detail });
        }
        if step.num_slots > binding.num_slots {
            return Err(Error::LayoutMismatch { detail: "the step was prepared for a larger pool of pages" });
        }
        Ok(())
    }

    /// Launches one layer's gather on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is what
    /// fits the step, and a replay gathers what the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record(&self, step: &GatherStep, binding: &GatherBinding) -> Result<()> {
        self.check(step, binding)?;
        // A table may have room for more than a grid has items for; `prepare` lets no more pass.
        let max_pieces = step.max_pages().min(self.max_pieces());
        let Some(table) = step.table.ptr().filter(|_| max_pieces > 0) else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds:
        // - the kernel reads triples below max_pieces, for which the table has room, and takes those below the table's count;
        // - it reads slots below num_slots only, of pages whose last one's end `bind` checked;
        // - it writes rows below max_rows only, whose last one's end `bind` checked.
        let blocks = (max_pieces * self.spec.kv.page_size).div_ceil(PLACES_PER_THREAD);
        let items = blocks * (self.spec.shape.row_elems() / 4);
        let args = GatherArgs { table, max_pieces, ..binding.args };
        self.cuda.launch(&binding.kernel, items.div_ceil(THREADS), THREADS, 0, &args)
    }

    /// An item is a quad of PLACES_PER_THREAD tokens' rows. The kernel divides items and places.
    fn max_pieces(&self) -> u32 {
        let blocks = MAX_ITEMS / (self.spec.shape.row_elems() / 4);
        let places = blocks.saturating_mul(PLACES_PER_THREAD).min(MAX_ITEMS);
        places / self.spec.kv.page_size
    }
}

pub(super) fn gather_entry(spec: &GatherSpec) -> &'static str {
    match spec.kv.dtype {
        Dtype::F32 => entry_of!("kv_gather_f32", spec.output),
        Dtype::F16 => entry_of!("kv_gather_f16", spec.output),
        Dtype::Bf16 => entry_of!("kv_gather_bf16", spec.output),
        Dtype::E4m3 => entry_of!("kv_gather_e4m3", spec.output),
    }
}
