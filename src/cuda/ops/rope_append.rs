//! `rope_append`: what comes before a decode, in one launch.

use cudarc::driver::DeviceRepr;

use super::kv_append::{AppendArgs, AppendStep};
use super::rope::{CURE, Rows, THREADS};
use super::{Divisor, checked_items, entry_of};
use crate::cuda::args::code;
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::ops::{RopeAppend, RopeAppendSpec};
use crate::{Dtype, Result};

/// Lanes of a warp, of which a token's items begin at multiples.
const LANES: u32 = 32;

/// `Args` of rope_append.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeAppendArgs {
    query: Rows,
    append: AppendArgs,
    query_dtype: u32,
    query_items: u32,
    key_items: u32,
    token_items: u32,
    by_token_items: Divisor,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for RopeAppendArgs {}

/// Rotates queries and new keys, and writes the keys into the cache: see [`RopeAppend`].
#[derive(Debug, Clone)]
pub struct RotateAppend {
    cuda: Cuda,
    spec: RopeAppendSpec,
    kernel: Kernel,
}

/// One layer's buffers, checked and held, for up to a number of tokens.
#[derive(Debug, Clone)]
pub struct RotateAppendBinding {
    kernel: Kernel,
    args: RopeAppendArgs,
    max_tokens: u32,
    num_slots: u64,
    _buffers: [Buffer; 7],
}

impl RotateAppend {
    /// Loads the kernel of a spec.
    ///
    /// # Errors
    /// Those of [`RopeAppendSpec::check`], and [`crate::Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: RopeAppendSpec) -> Result<Self> {
        spec.check()?;
        let kernel = cuda.kernel(rope_append_entry(&spec))?;
        Ok(Self { cuda: cuda.clone(), spec, kernel })
    }

    /// What this was made for.
    pub fn spec(&self) -> &RopeAppendSpec {
        &self.spec
    }

    /// As [`super::KvAppend::step`]: the step serves both ops.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] and [`crate::Error::Cuda`].
    pub fn step(&self, max_tokens: u32) -> Result<AppendStep> {
        AppendStep::new(&self.cuda, &self.spec.append, max_tokens)
    }

    /// As [`super::KvAppend::prepare`].
    ///
    /// # Errors
    /// Those of [`super::KvAppend::prepare`].
    pub fn prepare(&self, step: &mut AppendStep, slot_mapping: &[i64]) -> Result<()> {
        step.prepare(&self.cuda, &self.spec.append, slot_mapping)
    }

    /// Checks and binds one layer for steps of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// Those of [`super::KvAppend::bind`] and [`super::Rotate::bind`].
    pub fn bind(&self, args: &RopeAppend<&Buffer>, max_tokens: u32) -> Result<RotateAppendBinding> {
        let (spec, layer) = (&self.spec, &args.layer);
        args.check(spec, max_tokens, Buffer::bytes)?;
        args.is_in_place(spec, max_tokens, Buffer::same_as)?;
        self.items(max_tokens)?;
        let rope = spec.rope();
        let token_items = Items::of(spec);
        let kernel_args = RopeAppendArgs {
            query: Rows::new(&rope, &args.rope(max_tokens)),
            append: AppendArgs::new(&spec.append, layer, max_tokens),
            query_dtype: code(spec.query),
            query_items: token_items.query,
            key_items: token_items.key,
            token_items: token_items.all(),
            by_token_items: Divisor::new(token_items.all()),
        };
        let buffers = [
            args.q_pe.buffer,
            args.q_pe_out.buffer,
            args.positions,
            args.cos_sin,
            layer.kv_c.buffer,
            layer.k_pe.buffer,
            layer.kv.buffer,
        ];
        Ok(RotateAppendBinding {
            kernel: self.kernel.clone(),
            args: kernel_args,
            max_tokens,
            num_slots: spec.append.kv.num_slots(),
            _buffers: buffers.map(Buffer::clone),
        })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`crate::Error::LayoutMismatch`].
    pub fn check(&self, step: &AppendStep, binding: &RotateAppendBinding) -> Result<()> {
        step.check(binding.max_tokens, binding.num_slots)
    }

    /// Launches one layer on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is what fits both
    /// the step and the binding, and a replay rotates and appends what the step then holds.
    ///
    /// # Errors
    /// [`crate::Error::LayoutMismatch`] and [`crate::Error::Cuda`].
    pub fn record(&self, step: &AppendStep, binding: &RotateAppendBinding) -> Result<()> {
        self.check(step, binding)?;
        let max_tokens = step.max_tokens().min(binding.max_tokens);
        let Some(table) = step.ptr().filter(|_| max_tokens > 0) else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds:
        // - the kernel reads slots, positions and rows of tokens below max_tokens, for which the table has room and up to whose last
        //   `bind` checked rows and positions, and takes those below the table's count;
        // - inside a row: part < head_units, units or latent_octs, by their shares of token_items;
        // - 0 <= position < max_position, by `max` and `min` in the kernel, and cos_sin has as many rows (`RopeAppend::check`);
        // - it writes slots below num_slots only, of pages whose last one's end `bind` checked.
        let items = self.items(max_tokens)?;
        let append = binding.args.append.of_table(table, max_tokens);
        let args = RopeAppendArgs { append, ..binding.args };
        self.cuda.launch(&binding.kernel, items.div_ceil(THREADS), THREADS, 0, &args)
    }

    fn items(&self, tokens: u32) -> Result<u32> {
        let items = u64::from(tokens) * u64::from(Items::of(&self.spec).all());
        checked_items("items of a rotation", items, CURE)
    }
}

/// A token's items: `query_items`, `key_items` and octs of the latent.
struct Items {
    query: u32,
    key: u32,
    latent: u32,
}

impl Items {
    fn of(spec: &RopeAppendSpec) -> Self {
        let units = spec.append.shape.qk_rope_head_dim / 8;
        Self {
            query: (units * spec.num_heads).next_multiple_of(LANES),
            key: units.next_multiple_of(LANES),
            latent: spec.append.shape.kv_lora_rank / 8,
        }
    }

    fn all(&self) -> u32 {
        self.query + self.key + self.latent
    }
}

pub(super) fn rope_append_entry(spec: &RopeAppendSpec) -> &'static str {
    match spec.append.input {
        Dtype::F32 => entry_of!("rope_append_f32", spec.append.kv.dtype),
        Dtype::F16 => entry_of!("rope_append_f16", spec.append.kv.dtype),
        Dtype::Bf16 => entry_of!("rope_append_bf16", spec.append.kv.dtype),
        Dtype::E4m3 => entry_of!("rope_append_e4m3", spec.append.kv.dtype),
    }
}
