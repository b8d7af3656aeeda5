//! `kv_calibrate`: what an e4m3 cache would make of new rows, counted on the card.

use std::ops::Range;

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, THREADS, checked_items, entry_of};
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::layer::View;
use crate::ops::{Calibrate, CalibrateSpec, check_tokens};
use crate::{Error, Result};

/// `TOKENS_PER_THREAD` of kv_calibrate.cu.
const TOKENS_PER_THREAD: u32 = 8;

/// `Args` of kv_calibrate.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CalibrateArgs {
    kv_c: u64,
    k_pe: u64,
    table: u64,
    stats: u64,
    kv_c_stride: u64,
    k_pe_stride: u64,
    max_tokens: u32,
    latent_quads: u32,
    row_quads: u32,
    limit_bits: u32,
    by_row_quads: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for CalibrateArgs {}

/// Looks at new rows before or beside `kv_append`, and adds to the counters of [`crate::CalibrationStats`] on the card. Nothing is read
/// back before the host asks for those 32 bytes.
#[derive(Debug, Clone)]
pub struct KvCalibrate {
    cuda: Cuda,
    spec: CalibrateSpec,
    kernel: Kernel,
}

/// The tokens of a step. It serves every layer of the model.
///
/// Every [`KvCalibrate::prepare`] but the first rewrites them in place, in the stream's order: a captured graph then replays with the
/// new ones, be they more or fewer.
#[derive(Debug, Default)]
pub struct CalibrateStep {
    table: Table,
    end: u32,
}

/// One layer's rows and counters, checked and held, for up to a number of tokens.
#[derive(Debug, Clone)]
pub struct CalibrateBinding {
    kernel: Kernel,
    args: CalibrateArgs,
    _buffers: [Buffer; 3],
}

impl KvCalibrate {
    /// Loads the calibration of a spec.
    ///
    /// # Errors
    /// Those of [`CalibrateSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: CalibrateSpec) -> Result<Self> {
        spec.check()?;
        let kernel = cuda.kernel(calibrate_entry(&spec))?;
        Ok(Self { cuda: cuda.clone(), spec, kernel })
    }

    /// What this calibration was made for.
    pub fn spec(&self) -> &CalibrateSpec {
        &self.spec
    }

    /// Uploads which tokens a step looks at: those of a padded batch that are real.
    ///
    /// # Errors
    /// [`Error::Shape`] for a range that ends before it begins, with which the step still holds what it held; [`Error::OutOfMemory`],
    /// [`Error::Cuda`].
    pub fn prepare(&self, step: &mut CalibrateStep, tokens: Range<u32>) -> Result<()> {
        let count = check_tokens(&tokens)?;
        step.table.upload(&self.cuda, count, [tokens.start])?;
        step.end = tokens.end;
        Ok(())
    }

    /// Checks and binds one layer for steps whose tokens end at `max_tokens` at most.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::BufferTooSmall`], [`Error::Aliased`] where the counters are in an input,
    /// [`Error::Limit`].
    pub fn bind(&self, args: &Calibrate<&Buffer>, max_tokens: u32) -> Result<CalibrateBinding> {
        let spec = &self.spec;
        args.check(spec, max_tokens, Buffer::bytes)?;
        args.check_aliases(spec, Buffer::same_as)?;
        items(spec, max_tokens)?;
        let (k_pe, bytes) = (args.rotary(spec), spec.input.bytes() as u64);
        // With one token the stride is unused and may be anything.
        let stride = |view: &View<&Buffer>| if max_tokens > 1 { view.token_stride * bytes } else { 0 };
        let address = |view: &View<&Buffer>| view.buffer.ptr() + view.offset * bytes;
        let row_quads = spec.shape.row_elems() / 4;
        let bound = CalibrateArgs {
            kv_c: address(&args.kv_c),
            k_pe: address(&k_pe),
            table: 0,
            stats: args.stats.ptr(),
            kv_c_stride: stride(&args.kv_c),
            k_pe_stride: stride(&k_pe),
            max_tokens,
            latent_quads: spec.shape.kv_lora_rank / 4,
            row_quads,
            limit_bits: args.limit().to_bits(),
            by_row_quads: Divisor::new(row_quads),
        };
        let buffers = [args.kv_c.buffer, k_pe.buffer, args.stats].map(Buffer::clone);
        Ok(CalibrateBinding { kernel: self.kernel.clone(), args: bound, _buffers: buffers })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &CalibrateStep, binding: &CalibrateBinding) -> Result<()> {
        if step.end > binding.args.max_tokens {
            let detail = "the step's tokens end after the binding's max_tokens";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Launches one layer's calibration on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is
    /// the binding's, and a replay looks at the tokens that the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record(&self, step: &CalibrateStep, binding: &CalibrateBinding) -> Result<()> {
        self.check(step, binding)?;
        let max_tokens = binding.args.max_tokens;
        let Some(table) = step.table.ptr().filter(|_| max_tokens > 0) else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds: the kernel reads rows of tokens below
        // max_tokens, whose last row's end `bind` checked, and adds to 8 words of the counters, which `bind` found there.
        let items = items(&self.spec, max_tokens)?;
        let args = CalibrateArgs { table, ..binding.args };
        self.cuda.launch(&binding.kernel, items.div_ceil(THREADS), THREADS, 0, &args)
    }
}

/// An item is a quad of some tokens' rows.
fn items(spec: &CalibrateSpec, tokens: u32) -> Result<u32> {
    let blocks = u64::from(tokens.div_ceil(TOKENS_PER_THREAD));
    let items = blocks * u64::from(spec.shape.row_elems() / 4);
    checked_items("items of a calibration", items, "calibrate in several steps")
}

pub(super) fn calibrate_entry(spec: &CalibrateSpec) -> &'static str {
    entry_of!("kv_calibrate", spec.input)
}
