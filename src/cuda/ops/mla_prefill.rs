//! `mla_prefill`: attention of new tokens over keys and values that are there for each head.

use cudarc::driver::DeviceRepr;

use super::place::Place;
use super::table::Table;
use super::{Divisor, THREADS, checked_items};
use crate::cuda::args::code;
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::prefill::plan::{PrefillTile, TILE_WORDS, tiles};
use crate::prefill::{Prefill, PrefillExtent, PrefillSequence, PrefillSpec, PrefillVariant};
use crate::{Dtype, Error, Result};

/// The only row of the ladder.
pub(crate) const VARIANT: PrefillVariant = PrefillVariant { name: "simple", rounds_weights: false };

/// An entry of mla_prefill.cu, and the query rows of its blocks.
type Entry = (&'static str, u32);
/// Of values of up to 128 columns, and of up to 256.
const NARROW: Entry = ("mla_prefill_128", 64);
const WIDE: Entry = ("mla_prefill_256", 32);
/// Of f32.
const EXACT: Entry = ("mla_prefill_exact", 32);

/// `Args` of mla_prefill.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefillArgs {
    q_nope: Place,
    q_pe: Place,
    k_nope: Place,
    k_pe: Place,
    v: Place,
    out: Place,
    lse: Place,
    table: u64,
    logit_scale: f32,
    max_tokens: u32,
    max_keys: u32,
    max_rows: u32,
    max_tiles: u32,
    num_heads: u32,
    nope_quads: u32,
    quads: u32,
    value_quads: u32,
    dtype: u32,
    out_dtype: u32,
    reserved: u32,
    by_num_heads: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for PrefillArgs {}

/// Attention of new tokens over keys and values that are there for each head: MLA's expanded form, in f32. See [`Prefill`].
#[derive(Debug, Clone)]
pub struct MlaPrefill {
    cuda: Cuda,
    spec: PrefillSpec,
    kernel: Kernel,
    rows: u32,
}

/// A step's work list on the card. It grows as needed and serves every layer of the model.
///
/// A [`MlaPrefill::prepare`] that fits [`PrefillStep::max_tiles`] rewrites it in place, in the stream's order: a captured graph then
/// replays with the new one. One that does not fit replaces the buffer; graphs captured before must be captured again.
#[derive(Debug, Default)]
pub struct PrefillStep {
    table: Table,
    num_tiles: u32,
    rows: u32,
    extent: PrefillExtent,
}

/// One layer's buffers, checked and held, for up to a number of query tokens and keys.
#[derive(Debug, Clone)]
pub struct PrefillBinding {
    kernel: Kernel,
    rows: u32,
    args: PrefillArgs,
    max: PrefillExtent,
    _buffers: [Buffer; 7],
}

impl PrefillStep {
    /// Query tokens, keys and rows that the last [`MlaPrefill::prepare`] reaches: a binding needs as many.
    pub fn extent(&self) -> PrefillExtent {
        self.extent
    }

    /// Tiles of query rows that fit without a new buffer: a graph's grid is sized by them.
    pub fn max_tiles(&self) -> u32 {
        u32::try_from(self.table.room() / u64::from(TILE_WORDS)).unwrap_or(u32::MAX)
    }
}

impl MlaPrefill {
    /// Loads the attention of a spec.
    ///
    /// # Errors
    /// Those of [`PrefillSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: PrefillSpec) -> Result<Self> {
        spec.check()?;
        let (entry, rows) = entry_of(&spec);
        Ok(Self { cuda: cuda.clone(), spec, kernel: cuda.kernel(entry)?, rows })
    }

    /// What this was made for.
    pub fn spec(&self) -> &PrefillSpec {
        &self.spec
    }

    /// Query rows of a tile: a sequence has a tile for each so many of its query tokens, and one for the rest.
    pub fn tile_rows(&self) -> u32 {
        self.rows
    }

    /// A step with room for `max_tiles`, and no query yet; [`PrefillStep::default`] makes room as needed.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::Cuda`].
    pub fn step(&self, max_tiles: u32) -> Result<PrefillStep> {
        self.blocks(max_tiles.into())?;
        let table = Table::new(&self.cuda, u64::from(max_tiles) * u64::from(TILE_WORDS))?;
        Ok(PrefillStep { table, rows: self.rows, ..PrefillStep::default() })
    }

    /// Checks a step's sequences, cuts them into tiles and uploads those.
    ///
    /// # Errors
    /// [`Error::Shape`] where two sequences share a row of the output, [`Error::Limit`]: with these the step still holds what it held.
    /// [`Error::OutOfMemory`], [`Error::Cuda`].
    pub fn prepare(&self, step: &mut PrefillStep, sequences: &[PrefillSequence]) -> Result<()> {
        let extent = PrefillExtent::of(sequences)?;
        let tiles = tiles(sequences, self.rows);
        self.blocks(tiles.len() as u64)?;
        let num_tiles = tiles.len() as u32;
        step.table.upload(&self.cuda, num_tiles, tiles.iter().flat_map(PrefillTile::words))?;
        (step.num_tiles, step.rows, step.extent) = (num_tiles, self.rows, extent);
        Ok(())
    }

    /// Checks and binds one layer for steps that reach up to `max`: see [`PrefillStep::extent`].
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::Aliased`] where an output is an
    /// input too, or both are one.
    pub fn bind(&self, args: &Prefill<&Buffer>, max: PrefillExtent) -> Result<PrefillBinding> {
        let spec = &self.spec;
        args.check(spec, max, Buffer::bytes)?;
        args.check_aliases(spec, Buffer::same_as)?;
        let read = args.read_views(spec).map(|(_, view, _)| view);
        let (queries, keys) = ([max.tokens, spec.num_heads], [max.keys, spec.num_heads]);
        let rows = [max.rows, spec.num_heads];
        let place = |view, rows| Place::new(view, spec.dtype.bytes(), rows);
        let bound = PrefillArgs {
            q_nope: place(&read[0], queries),
            q_pe: place(&read[1], queries),
            k_nope: place(&read[2], keys),
            k_pe: place(&read[3], keys),
            v: place(&read[4], keys),
            out: Place::new(&args.out, spec.out.bytes(), rows),
            lse: Place::new(&args.lse, 4, rows),
            table: 0,
            logit_scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
            max_tokens: max.tokens,
            max_keys: max.keys,
            max_rows: max.rows,
            max_tiles: 0,
            num_heads: spec.num_heads,
            nope_quads: spec.qk_nope_head_dim / 4,
            quads: (spec.qk_nope_head_dim + spec.qk_rope_head_dim) / 4,
            value_quads: spec.v_head_dim / 4,
            dtype: code(spec.dtype),
            out_dtype: code(spec.out),
            reserved: 0,
            by_num_heads: Divisor::new(spec.num_heads),
        };
        let [a, b, c, d, e] = read.map(|view| view.buffer.clone());
        let buffers = [a, b, c, d, e, args.out.buffer.clone(), args.lse.buffer.clone()];
        Ok(PrefillBinding {
            kernel: self.kernel.clone(),
            rows: self.rows,
            args: bound,
            max,
            _buffers: buffers,
        })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &PrefillStep, binding: &PrefillBinding) -> Result<()> {
        step.extent.check_within(&binding.max)?;
        if step.num_tiles > 0 && step.rows != binding.rows {
            return Err(Error::LayoutMismatch {
                detail: "the step was prepared for a kernel with other tiles",
            });
        }
        Ok(())
    }

    /// Launches one layer's attention on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is
    /// what fits the step, and a replay attends what the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], [`Error::Limit`] and [`Error::Cuda`].
    pub fn record(&self, step: &PrefillStep, binding: &PrefillBinding) -> Result<()> {
        self.check(step, binding)?;
        let heads = binding.args.num_heads;
        // A table may have room for more than a grid can have; `prepare` lets no more pass.
        let max_tiles = step.max_tiles().min(super::MAX_ITEMS / heads);
        let Some(table) =
            step.table.ptr().filter(|_| max_tiles > 0 && binding.max.tokens > 0 && binding.max.rows > 0)
        else {
            return Ok(());
        };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds:
        // - the kernels read tiles below max_tiles, for which the table has room, and take those below the table's count; heads are the
        //   rest of a division by num_heads;
        // - query tokens that are read are below max_tokens and keys below max_keys by `min`, and where that is 0 no key is read; rows
        //   that are written are below max_rows by comparison. `bind` checked where views end for so many;
        // - quads are below P, R and V by `min`, and those that are stored by comparison;
        // - places in shared memory are sums of thread numbers and loop counters below what the arrays have.
        // A tile's `num_keys` is below 2^30, which bounds the only loop that the table bounds.
        let args = PrefillArgs { table, max_tiles, ..binding.args };
        self.cuda.launch(&binding.kernel, max_tiles * heads, THREADS, 0, &args)
    }

    fn blocks(&self, tiles: u64) -> Result<u32> {
        let blocks = tiles.saturating_mul(self.spec.num_heads.into());
        checked_items("blocks of a prefill", blocks, "attend fewer query tokens a step")
    }
}

fn entry_of(spec: &PrefillSpec) -> Entry {
    match (spec.dtype, spec.v_head_dim) {
        (Dtype::F32, _) => EXACT,
        (_, ..=128) => NARROW,
        _ => WIDE,
    }
}

#[cfg(test)]
pub(super) const ENTRIES: [&str; 3] = [NARROW.0, WIDE.0, EXACT.0];
