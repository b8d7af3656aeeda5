//! `rope`: rows rotated by their positions.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, checked_items, entry_of};
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{Rope, RopeLayout, RopeSpec};
use crate::{Error, Result};

/// `THREADS` of rope.cu and rope_append.cu: with fewer, a batch of a decode step is on more multiprocessors.
pub(super) const THREADS: u32 = 128;
pub(super) const CURE: &str = "rotate in several steps, and bind a part of the tokens for each";

/// `RopeArgs` of rope.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    x: u64,
    y: u64,
    x_token_stride: u64,
    x_head_stride: u64,
    y_token_stride: u64,
    y_head_stride: u64,
    positions: u64,
    cos_sin: u64,
    max_position: u32,
    units: u32,
    head_units: u32,
    is_interleaved: u32,
    by_units: Divisor,
}

/// `Args` of rope.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeArgs {
    rope: Rows,
    table: u64,
    by_head_units: Divisor,
    max_tokens: u32,
    reserved: u32,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for RopeArgs {}

impl Rows {
    /// Checked rows.
    pub(super) fn new(spec: &RopeSpec, args: &Rope<&Buffer>) -> Self {
        let bytes = spec.dtype.bytes() as u64;
        let units = spec.rope_dim / 8;
        // The stride of a dimension of one is unused and may be anything.
        let used = |count: u32, stride: u64| if count > 1 { stride * bytes } else { 0 };
        Self {
            x: args.x.buffer.ptr() + args.x.offset * bytes,
            y: args.y.buffer.ptr() + args.y.offset * bytes,
            x_token_stride: used(args.num_tokens, args.x.token_stride),
            x_head_stride: used(spec.num_heads, args.x.head_stride),
            y_token_stride: used(args.num_tokens, args.y.token_stride),
            y_head_stride: used(spec.num_heads, args.y.head_stride),
            positions: args.positions.ptr(),
            cos_sin: args.cos_sin.ptr(),
            max_position: args.max_position,
            units,
            head_units: units * spec.num_heads,
            is_interleaved: (spec.layout == RopeLayout::Interleaved).into(),
            by_units: Divisor::new(units),
        }
    }
}

/// Rotates rows by their tokens' positions: see [`Rope`].
#[derive(Debug, Clone)]
pub struct Rotate {
    cuda: Cuda,
    spec: RopeSpec,
    kernel: Kernel,
}

/// A step's tokens on the card. It serves every layer of the model, queries and keys alike.
///
/// A [`Rotate::prepare`] rewrites them in place, in the stream's order: a captured graph then replays with the new ones, up to the
/// [`RotateStep::max_tokens`] that the step had when it was captured.
#[derive(Debug, Default)]
pub struct RotateStep {
    table: Table,
    first: u32,
    tokens: u32,
    max_tokens: u32,
}

/// One layer's buffers, checked and held.
#[derive(Debug, Clone)]
pub struct RotateBinding {
    kernel: Kernel,
    args: RopeArgs,
    _buffers: [Buffer; 4],
}

impl RotateStep {
    /// Tokens of the last [`Rotate::prepare`].
    pub fn num_tokens(&self) -> u32 {
        self.tokens
    }

    /// Tokens that a launch's grid is for.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }
}

impl Rotate {
    /// Loads the rotation of a spec.
    ///
    /// # Errors
    /// Those of [`RopeSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: RopeSpec) -> Result<Self> {
        spec.check()?;
        let kernel = cuda.kernel(rope_entry(&spec))?;
        Ok(Self { cuda: cuda.clone(), spec, kernel })
    }

    /// What this rotation was made for.
    pub fn spec(&self) -> &RopeSpec {
        &self.spec
    }

    /// A step whose grids are for `max_tokens`, and no token yet; [`RotateStep::default`] leaves it to the first `prepare`.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::Cuda`].
    pub fn step(&self, max_tokens: u32) -> Result<RotateStep> {
        self.items(max_tokens.into())?;
        Ok(RotateStep { table: Table::new(&self.cuda, 1)?, first: 0, tokens: 0, max_tokens })
    }

    /// Says which tokens a step rotates: `num_tokens` from `first_token` on, in `x`, `y` and `positions` alike.
    ///
    /// # Errors
    /// [`Error::Limit`], with which the step still holds what it held; [`Error::OutOfMemory`], [`Error::Cuda`].
    pub fn prepare(&self, step: &mut RotateStep, first_token: u32, num_tokens: u32) -> Result<()> {
        self.items(u64::from(first_token) + u64::from(num_tokens))?;
        step.table.upload(&self.cuda, num_tokens, [first_token])?;
        (step.first, step.tokens) = (first_token, num_tokens);
        step.max_tokens = step.max_tokens.max(num_tokens);
        Ok(())
    }

    /// Checks and binds one layer; `num_tokens` is the most that a step may reach.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::Aliased`], [`Error::Limit`].
    pub fn bind(&self, args: &Rope<&Buffer>) -> Result<RotateBinding> {
        args.check(&self.spec, Buffer::bytes)?;
        args.is_in_place(&self.spec, Buffer::same_as)?;
        self.items(args.num_tokens.into())?;
        let rope = Rows::new(&self.spec, args);
        let by_head_units = Divisor::new(rope.head_units);
        let buffers = [args.x.buffer, args.y.buffer, args.positions, args.cos_sin].map(Buffer::clone);
        let args = RopeArgs { rope, table: 0, by_head_units, max_tokens: args.num_tokens, reserved: 0 };
        Ok(RotateBinding { kernel: self.kernel.clone(), args, _buffers: buffers })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &RotateStep, binding: &RotateBinding) -> Result<()> {
        let end = u64::from(step.first) + u64::from(step.tokens);
        if step.tokens > 0 && end > binding.args.max_tokens.into() {
            let detail = "the step rotates tokens past the binding's num_tokens";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Launches one layer's rotation on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is for
    /// what both the step and the binding have, and a replay rotates what the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record(&self, step: &RotateStep, binding: &RotateBinding) -> Result<()> {
        self.check(step, binding)?;
        let max_tokens = step.max_tokens.min(binding.args.max_tokens);
        let Some(table) = step.table.ptr().filter(|_| max_tokens > 0) else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds:
        // - the kernel takes tokens below the binding's max_tokens only, up to where `bind` checked rows and positions; `first + index`
        //   cannot wrap into them, as `items` bounds both;
        // - 0 <= position < max_position, by `max` and `min` in the kernel, and cos_sin has as many rows (`Rope::check`).
        let items = self.items(max_tokens.into())?;
        self.cuda.launch(
            &binding.kernel,
            items.div_ceil(THREADS),
            THREADS,
            0,
            &RopeArgs { table, ..binding.args },
        )
    }

    /// Units of so many tokens.
    fn items(&self, tokens: u64) -> Result<u32> {
        let units = u64::from(self.spec.rope_dim / 8) * u64::from(self.spec.num_heads);
        checked_items("items of a rotation", tokens.saturating_mul(units), CURE)
    }
}

pub(super) fn rope_entry(spec: &RopeSpec) -> &'static str {
    entry_of!("rope", spec.dtype)
}
