//! `mla_prefill`: attention over expanded keys and values.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{THREADS, checked_items};
use crate::cuda::args::code;
use crate::cuda::driver::Kernel;
use crate::cuda::ptx::MLA_PREFILL;
use crate::cuda::{Buffer, Cuda};
use crate::layer::View;
use crate::prefill::plan::{PrefillTile, TILE_WORDS, tiles};
use crate::prefill::{Prefill, PrefillExtent, PrefillSequence, PrefillSpec};
use crate::{Dtype, Error, Result};

/// Query rows of a tile of mla_prefill.cu.
const TILE_ROWS: u32 = 64;

/// `Rows` of mla_prefill.cu: an address, and strides in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Rows {
    address: u64,
    token_stride: u64,
    head_stride: u64,
}

impl Rows {
    fn new(view: &View<'_, Buffer>, bytes: usize) -> Self {
        let bytes = bytes as u64;
        Self {
            address: view.buffer.ptr() + view.offset * bytes,
            // The stride of an axis of one is unused, and may be too much for a multiplication.
            token_stride: view.token_stride.saturating_mul(bytes),
            head_stride: view.head_stride.saturating_mul(bytes),
        }
    }
}

/// `Args` of mla_prefill.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefillArgs {
    table: u64,
    q_nope: Rows,
    q_pe: Rows,
    k_nope: Rows,
    k_pe: Rows,
    v: Rows,
    out: Rows,
    lse: Rows,
    logit_scale: f32,
    max_tokens: u32,
    max_keys: u32,
    max_tiles: u32,
    num_heads: u32,
    nope_quads: u32,
    rope_quads: u32,
    value_quads: u32,
    out_dtype: u32,
    reserved: u32,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for PrefillArgs {}

/// Attention of new tokens over keys and values that are there for each head: MLA's expanded form. In f32, without tensor cores.
#[derive(Debug, Clone)]
pub struct MlaPrefill {
    cuda: Cuda,
    spec: PrefillSpec,
    kernel: Kernel,
}

/// A step's work list on the card. It grows as needed and serves every layer of the model.
///
/// A [`MlaPrefill::prepare`] whose tiles fit [`PrefillStep::max_tiles`] rewrites them in place, in the stream's order: a captured graph then
/// replays with the new ones. One that does not fit replaces the buffer; graphs captured before must be captured again.
#[derive(Debug, Default)]
pub struct PrefillStep {
    table: Table,
    extent: PrefillExtent,
}

/// One layer's buffers, checked and held, for up to a number of query tokens and keys.
#[derive(Debug, Clone)]
pub struct PrefillBinding {
    kernel: Kernel,
    args: PrefillArgs,
    max: PrefillExtent,
    _buffers: [Buffer; 7],
}

impl PrefillStep {
    /// Query tokens and keys that the last [`MlaPrefill::prepare`] reaches: a binding needs as many.
    pub fn extent(&self) -> PrefillExtent {
        self.extent
    }

    /// Tiles of up to 64 query tokens of one sequence that fit without a new buffer: a graph's grid is sized by them.
    pub fn max_tiles(&self) -> u32 {
        u32::try_from(self.table.room() / u64::from(TILE_WORDS)).unwrap_or(u32::MAX)
    }
}

impl MlaPrefill {
    /// Loads the prefill of a spec.
    ///
    /// # Errors
    /// Those of [`PrefillSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: PrefillSpec) -> Result<Self> {
        spec.check()?;
        let kernel = cuda.kernel(&MLA_PREFILL, entry(&spec))?;
        Ok(Self { cuda: cuda.clone(), spec, kernel })
    }

    /// What this was made for.
    pub fn spec(&self) -> &PrefillSpec {
        &self.spec
    }

    /// Checks a step's sequences, cuts them into tiles and uploads those.
    ///
    /// # Errors
    /// [`Error::Shape`] where two sequences share a query token, [`Error::Limit`], [`Error::OutOfMemory`], [`Error::Cuda`]. With the first
    /// two the step still holds what it held.
    pub fn prepare(&self, step: &mut PrefillStep, sequences: &[PrefillSequence]) -> Result<()> {
        let extent = PrefillExtent::of(sequences)?;
        let tiles = tiles(sequences, TILE_ROWS);
        checked_blocks(tiles.len() as u64, &self.spec)?;
        let words = tiles.iter().flat_map(PrefillTile::words);
        step.table.upload(&self.cuda, tiles.len() as u32, words)?;
        step.extent = extent;
        Ok(())
    }

    /// Checks and binds one layer for steps that reach up to `max`: see [`PrefillStep::extent`].
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::Aliased`] where an output is an
    /// input too, or both are one.
    pub fn bind(&self, args: &Prefill<'_, Buffer>, max: PrefillExtent) -> Result<PrefillBinding> {
        let spec = &self.spec;
        args.check(spec, max, Buffer::bytes)?;
        args.check_aliases(spec, Buffer::same_as)?;
        let views = args.read_views(spec).map(|(_, view, _)| view);
        let [q_nope, q_pe, k_nope, k_pe, v] = views.map(|view| Rows::new(&view, spec.dtype.bytes()));
        let [a, b, c, d, e] = views.map(|view| view.buffer.clone());
        let kernel_args = PrefillArgs {
            table: 0,
            q_nope,
            q_pe,
            k_nope,
            k_pe,
            v,
            out: Rows::new(&args.out, spec.out.bytes()),
            lse: Rows::new(&args.lse, 4),
            logit_scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
            max_tokens: max.tokens,
            max_keys: max.keys,
            max_tiles: 0,
            num_heads: spec.num_heads,
            nope_quads: spec.qk_nope_head_dim / 4,
            rope_quads: spec.qk_rope_head_dim / 4,
            value_quads: spec.v_head_dim / 4,
            out_dtype: code(spec.out),
            reserved: 0,
        };
        let buffers = [a, b, c, d, e, args.out.buffer.clone(), args.lse.buffer.clone()];
        Ok(PrefillBinding { kernel: self.kernel.clone(), args: kernel_args, max, _buffers: buffers })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &PrefillStep, binding: &PrefillBinding) -> Result<()> {
        if step.extent.tokens > binding.max.tokens || step.extent.keys > binding.max.keys {
            let detail = "the step reaches further than the binding's query tokens or keys";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Launches one layer's prefill on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is what
    /// fits the step, and a replay attends what the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], [`Error::Limit`] and [`Error::Cuda`].
    pub fn record(&self, step: &PrefillStep, binding: &PrefillBinding) -> Result<()> {
        self.check(step, binding)?;
        let max_tiles = step.max_tiles();
        let Some(table) = step.table.ptr().filter(|_| binding.max.tokens > 0) else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds:
        // - blocks read tiles below max_tiles, for which the table has room, and below its count;
        // - query tokens and keys are made smaller than max_tokens and max_keys, whose last rows' ends `bind` checked; where there is no
        //   key, no tile has one and none is read.
        let blocks = checked_blocks(max_tiles.into(), &self.spec)?;
        let args = PrefillArgs { table, max_tiles, ..binding.args };
        self.cuda.launch(&binding.kernel, blocks, THREADS, 0, &args)
    }
}

/// A block for each tile and head.
fn checked_blocks(tiles: u64, spec: &PrefillSpec) -> Result<u32> {
    let blocks = tiles * u64::from(spec.num_heads);
    checked_items("blocks of a prefill", blocks, "attend fewer query tokens a step")
}

pub(super) fn entry(spec: &PrefillSpec) -> &'static str {
    match (spec.dtype, spec.v_head_dim <= 128) {
        (Dtype::F16, true) => "mla_prefill_f16_128",
        (Dtype::F16, false) => "mla_prefill_f16_256",
        (Dtype::Bf16, true) => "mla_prefill_bf16_128",
        (Dtype::Bf16, false) => "mla_prefill_bf16_256",
        // `check` refuses e4m3.
        (Dtype::F32 | Dtype::E4m3, true) => "mla_prefill_f32_128",
        (Dtype::F32 | Dtype::E4m3, false) => "mla_prefill_f32_256",
    }
}
