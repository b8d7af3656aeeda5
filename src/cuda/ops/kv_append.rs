//! `kv_append`: new rows into the paged cache, the field's `concat_and_cache_mla`.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, THREADS, block_stride, checked_items, entry_of};
use crate::cuda::driver::Kernel;
use crate::cuda::{Buffer, Cuda};
use crate::layer::View;
use crate::ops::{AppendLayer, AppendSpec};
use crate::{Dtype, Error, Result};

/// `TOKENS_PER_THREAD` of kv_append.cu.
const TOKENS_PER_THREAD: u32 = 4;

/// `E4m3Scale` of round.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Scale {
    k_scale: f32,
    inv_low: f32,
    inv_high: f32,
    max_bits: u32,
}

impl Scale {
    fn new(k_scale: f32) -> Self {
        let scale = f64::from(k_scale);
        let is_power_of_two = k_scale.to_bits().trailing_zeros() >= 23;
        // A product is rounded by at most 2^-24 of itself, and each bound by as much here.
        let margin = if is_power_of_two { 0.0 } else { (-22f64).exp2() };
        // Within these no number is subnormal that a code depends on.
        if !((-100f64).exp2()..100f64.exp2()).contains(&scale) {
            return Self { k_scale, inv_low: 0.0, inv_high: 0.0, max_bits: 0 };
        }
        Self {
            k_scale,
            inv_low: (128.0 * (1.0 - margin) / scale) as f32,
            inv_high: (128.0 * (1.0 + margin) / scale) as f32,
            max_bits: ((456.0 * scale) as f32).to_bits(),
        }
    }
}

/// `AppendArgs` of append.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AppendArgs {
    kv_c: u64,
    k_pe: u64,
    kv: u64,
    table: u64,
    kv_c_stride: u64,
    k_pe_stride: u64,
    block_stride: u64,
    max_tokens: u32,
    num_slots: u32,
    page_size: u32,
    latent_octs: u32,
    row_octs: u32,
    is_wide: u32,
    by_row_octs: Divisor,
    by_page_size: Divisor,
    scale: Scale,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for AppendArgs {}

impl AppendArgs {
    /// One checked layer, for up to `max_tokens` tokens; without a table.
    pub(super) fn new(spec: &AppendSpec, layer: &AppendLayer<&Buffer>, max_tokens: u32) -> Self {
        let (shape, kv, k_pe) = (&spec.shape, &layer.kv, layer.rotary(spec));
        let (input, cache) = (spec.input.bytes() as u64, spec.kv.dtype.bytes() as u64);
        // With one token the stride is unused and may be anything.
        let stride = |view: &View<&Buffer>| if max_tokens > 1 { view.token_stride * input } else { 0 };
        let address = |view: &View<&Buffer>| view.buffer.ptr() + view.offset * input;
        let is_wide =
            [&layer.kv_c, &k_pe].iter().all(|view| (address(view) | stride(view)).is_multiple_of(16));
        let row_octs = shape.row_elems() / 8;
        Self {
            kv_c: address(&layer.kv_c),
            k_pe: address(&k_pe),
            kv: kv.buffer.ptr() + kv.base() * cache,
            table: 0,
            kv_c_stride: stride(&layer.kv_c),
            k_pe_stride: stride(&k_pe),
            block_stride: block_stride(&spec.kv, kv),
            max_tokens,
            num_slots: spec.kv.num_slots() as u32,
            page_size: spec.kv.page_size,
            latent_octs: shape.kv_lora_rank / 8,
            row_octs,
            is_wide: is_wide.into(),
            by_row_octs: Divisor::new(row_octs),
            by_page_size: Divisor::new(spec.kv.page_size),
            scale: Scale::new(layer.k_scale),
        }
    }

    /// For another table, and as many tokens.
    pub(super) fn of_table(self, table: u64, max_tokens: u32) -> Self {
        Self { table, max_tokens, ..self }
    }
}

/// Writes new tokens into the cache, converted to its dtype.
///
/// The bytes are those of the host's conversions: equal dtypes are copied bit for bit; other pairs go through f32 and
/// round to nearest even, NaN, infinities and subnormals included. For e4m3 the exact quotient `x / k_scale` is
/// rounded once.
#[derive(Debug, Clone)]
pub struct KvAppend {
    cuda: Cuda,
    spec: AppendSpec,
    kernel: Kernel,
}

/// A step's slots on the card. It grows as needed and serves every layer of the model.
///
/// A [`KvAppend::prepare`] that fits [`AppendStep::max_tokens`] rewrites them in place, in the stream's order: a captured graph then
/// replays with the new ones, be they more or fewer. One that does not fit replaces the buffer; graphs captured before must be
/// captured again.
#[derive(Debug, Default)]
pub struct AppendStep {
    table: Table,
    tokens: u32,
    num_slots: u64,
}

/// One layer's buffers, checked and held, for up to a number of tokens.
#[derive(Debug, Clone)]
pub struct AppendBinding {
    kernel: Kernel,
    args: AppendArgs,
    num_slots: u64,
    _buffers: [Buffer; 3],
}

impl AppendStep {
    /// Tokens of the last [`KvAppend::prepare`], skipped ones included.
    pub fn num_tokens(&self) -> u32 {
        self.tokens
    }

    /// Tokens that fit without a new buffer: a graph's grid is sized by them.
    pub fn max_tokens(&self) -> u32 {
        u32::try_from(self.table.room()).unwrap_or(u32::MAX)
    }

    /// With room for `max_tokens`, and no token yet.
    pub(super) fn new(cuda: &Cuda, spec: &AppendSpec, max_tokens: u32) -> Result<Self> {
        let table = Table::new(cuda, max_tokens.into())?;
        Ok(Self { table, tokens: 0, num_slots: spec.kv.num_slots() })
    }

    /// Checks a `slot_mapping` and uploads it.
    pub(super) fn prepare(&mut self, cuda: &Cuda, spec: &AppendSpec, slot_mapping: &[i64]) -> Result<()> {
        let slots = spec.slots(slot_mapping)?;
        let tokens = slots.len() as u32;
        self.table.upload(cuda, tokens, slots)?;
        self.tokens = tokens;
        self.num_slots = spec.kv.num_slots();
        Ok(())
    }

    /// A table that a kernel on the card fills: `max_tokens` tokens, without a slot until then.
    pub(super) fn for_device(append: &KvAppend, max_tokens: u32) -> Result<Self> {
        items(&append.spec, max_tokens)?;
        let mut step = append.step(max_tokens)?;
        let none = std::iter::repeat_n(u32::MAX, max_tokens as usize);
        step.table.upload(&append.cuda, max_tokens, none)?;
        step.tokens = max_tokens;
        Ok(step)
    }

    /// Where the table is, if it has room for anything.
    pub(super) fn ptr(&self) -> Option<u64> {
        self.table.ptr()
    }

    /// Whether it may be recorded with a binding of so many tokens and slots.
    pub(super) fn check(&self, max_tokens: u32, num_slots: u64) -> Result<()> {
        if self.tokens > max_tokens {
            let detail = "the step appends more tokens than the binding's max_tokens";
            return Err(Error::LayoutMismatch { detail });
        }
        if self.num_slots > num_slots {
            return Err(Error::LayoutMismatch { detail: "the step was prepared for a larger pool of pages" });
        }
        Ok(())
    }
}

impl KvAppend {
    /// Loads the append of a spec.
    ///
    /// # Errors
    /// Those of [`AppendSpec::check`], and [`Error::Cuda`].
    pub fn new(cuda: &Cuda, spec: AppendSpec) -> Result<Self> {
        spec.check()?;
        let kernel = cuda.kernel(append_entry(&spec))?;
        Ok(Self { cuda: cuda.clone(), spec, kernel })
    }

    /// What this append was made for.
    pub fn spec(&self) -> &AppendSpec {
        &self.spec
    }

    /// A step with room for `max_tokens`, and no token yet; [`AppendStep::default`] leaves it to the first `prepare`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] and [`Error::Cuda`].
    pub fn step(&self, max_tokens: u32) -> Result<AppendStep> {
        AppendStep::new(&self.cuda, &self.spec, max_tokens)
    }

    /// Checks a step's `slot_mapping` (`page * page_size + offset` a token, negative: skip it) and uploads it.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`], [`Error::SlotOverlap`], [`Error::Length`], [`Error::OutOfMemory`], [`Error::Cuda`]. With the first three
    /// the step still holds what it held.
    pub fn prepare(&self, step: &mut AppendStep, slot_mapping: &[i64]) -> Result<()> {
        step.prepare(&self.cuda, &self.spec, slot_mapping)
    }

    /// Checks and binds one layer for steps of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::Aliased`] where the cache is an
    /// input too, [`Error::Limit`].
    pub fn bind(&self, layer: &AppendLayer<&Buffer>, max_tokens: u32) -> Result<AppendBinding> {
        let spec = &self.spec;
        layer.check(spec, max_tokens, Buffer::bytes)?;
        layer.check_aliases(spec, Buffer::same_as)?;
        items(spec, max_tokens)?;
        let args = AppendArgs::new(spec, layer, max_tokens);
        let buffers = [layer.kv_c.buffer, layer.rotary(spec).buffer, layer.kv.buffer].map(Buffer::clone);
        let num_slots = spec.kv.num_slots();
        Ok(AppendBinding { kernel: self.kernel.clone(), args, num_slots, _buffers: buffers })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &AppendStep, binding: &AppendBinding) -> Result<()> {
        step.check(binding.args.max_tokens, binding.num_slots)
    }

    /// Launches one layer's append on the stream. Allocates nothing, waits for nothing, and may be captured in a graph: its grid is
    /// what fits both the step and the binding, and a replay appends what the step then holds.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::Cuda`].
    pub fn record(&self, step: &AppendStep, binding: &AppendBinding) -> Result<()> {
        self.check(step, binding)?;
        let max_tokens = step.max_tokens().min(binding.args.max_tokens);
        let Some(table) = step.ptr().filter(|_| max_tokens > 0) else { return Ok(()) };
        // Every place is in its buffer, whichever pair is recorded and whatever the table holds:
        // - the kernel reads slots and rows of tokens below max_tokens, for which the table has room and whose last row's end `bind`
        //   checked, and takes those below the table's count;
        // - it writes slots below num_slots only, of pages whose last one's end `bind` checked.
        let items = items(&self.spec, max_tokens)?;
        let args = binding.args.of_table(table, max_tokens);
        self.cuda.launch(&binding.kernel, items.div_ceil(THREADS), THREADS, 0, &args)
    }
}

/// An item is an oct of some tokens' rows.
fn items(spec: &AppendSpec, tokens: u32) -> Result<u32> {
    let blocks = u64::from(tokens.div_ceil(TOKENS_PER_THREAD));
    let items = blocks * u64::from(spec.shape.row_elems() / 8);
    checked_items("items of an append", items, "append in several steps")
}

pub(super) fn append_entry(spec: &AppendSpec) -> &'static str {
    match spec.input {
        Dtype::F32 => entry_of!("kv_append_f32", spec.kv.dtype),
        Dtype::F16 => entry_of!("kv_append_f16", spec.kv.dtype),
        Dtype::Bf16 => entry_of!("kv_append_bf16", spec.kv.dtype),
        Dtype::E4m3 => entry_of!("kv_append_e4m3", spec.kv.dtype),
    }
}

#[cfg(test)]
mod tests {
    use super::Scale;

    #[test]
    fn the_inverses_stay_on_their_sides_of_a_rounded_product() {
        let rounding = (-24f64).exp2();
        for i in 1..1u32 << 16 {
            // mantissas all over, the exponents of the fast way
            let bits = i.wrapping_mul(0x9E37_79B1);
            let k_scale = f32::from_bits((bits & 0x7F_FFFF) | ((27 + i % 200) << 23));
            let (scale, k_scale) = (Scale::new(k_scale), f64::from(k_scale));
            assert!(scale.max_bits != 0);
            if bits & 0x7F_FFFF != 0 {
                assert!(f64::from(scale.inv_low) * k_scale * (1.0 + rounding) < 128.0, "{k_scale}");
                assert!(f64::from(scale.inv_high) * k_scale * (1.0 - rounding) > 128.0, "{k_scale}");
            }
        }
        for e in -126..=127 {
            let scale = Scale::new(f64::from(e).exp2() as f32);
            assert_eq!(scale.max_bits != 0, (-100..100).contains(&e));
            if scale.max_bits != 0 {
                let inverse = f64::from(7 - e).exp2() as f32;
                assert_eq!((scale.inv_low, scale.inv_high), (inverse, inverse));
            }
        }
    }
}
