//! `kv_append`: new tokens into the paged cache, vLLM's `concat_and_cache_mla`.

use cudarc::driver::DeviceRepr;

use super::table::Table;
use super::{Divisor, THREADS, address, checked_items, stride};
use crate::Result;
use crate::cuda::{Buffer, Cuda, Function};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, KvAppend, KvAppendArgs, OpOptions};

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
        // Within these limits no code depends on a subnormal number.
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

/// `AppendParams` of append.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AppendParams {
    kv_c: u64,
    k_pe: u64,
    kv: u64,
    table: u64,
    kv_c_stride: u64,
    k_pe_stride: u64,
    block_stride: u64,
    max_tokens: u32,
    num_slots: u32,
    first_slot: u32,
    reserved_0: u32,
    page_size: u32,
    latent_octs: u32,
    row_octs: u32,
    is_wide: u32,
    by_row_octs: Divisor,
    by_page_size: Divisor,
    scale: Scale,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for AppendParams {}

/// One layer's buffers, held.
#[derive(Debug)]
pub struct Layer {
    args: AppendParams,
    buffers: [Buffer; 3],
}

impl AppendParams {
    /// One checked layer, for up to `max_tokens` tokens; without a table.
    pub(super) fn new(spec: &KvAppend, args: &KvAppendArgs<&Buffer>, max_tokens: u32) -> Self {
        let (shape, kv, k_pe) = (&spec.shape, &args.kv, args.rotary(spec));
        let (input, row_octs) = (spec.input.bytes(), shape.row_elems() / 8);
        let rows = [&args.kv_c, &k_pe].map(|view| {
            let first = address(view.buffer, view.offset, input);
            (first, stride(max_tokens, view.token_stride, input))
        });
        let (first_slot, num_slots) = kv.slots(&spec.kv);
        let is_wide = rows.iter().all(|(first, stride)| (first | stride).is_multiple_of(16));
        Self {
            kv_c: rows[0].0,
            k_pe: rows[1].0,
            kv: address(kv.buffer, kv.base(), 1),
            table: 0,
            kv_c_stride: rows[0].1,
            k_pe_stride: rows[1].1,
            block_stride: stride(spec.kv.num_pages, kv.block_stride, 1),
            max_tokens,
            num_slots,
            first_slot,
            reserved_0: 0,
            page_size: spec.kv.page_size,
            latent_octs: shape.kv_lora_rank / 8,
            row_octs,
            is_wide: is_wide.into(),
            by_row_octs: Divisor::new(row_octs),
            by_page_size: Divisor::new(spec.kv.page_size),
            scale: Scale::new(args.k_scale),
        }
    }

    /// For a table, and as many tokens as it and the layer have room for; `None` for none.
    pub(super) fn for_table(self, table: &Table) -> Option<Self> {
        let max_tokens = table.room(1).min(self.max_tokens);
        table.ptr().filter(|_| max_tokens > 0).map(|table| Self { table, max_tokens, ..self })
    }

    pub(super) fn max_tokens(&self) -> u32 {
        self.max_tokens
    }
}

impl Kernel<KvAppend> for Cuda {
    type Kernels = Function;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &KvAppend, options: &OpOptions) -> Result<(Function, (), Choice)> {
        let kernel = self.kernel(&append_entry(spec))?;
        Ok((kernel, (), only(options)?))
    }

    fn kernel_step(&self, _: &KvAppend, _: &Function, max_tokens: u32) -> Result<Table> {
        Table::new(self, max_tokens.into())
    }

    fn kernel_capacity(step: &Table) -> u32 {
        step.room(1)
    }

    fn kernel_prepare(
        &self,
        spec: &KvAppend,
        _: &Function,
        step: &mut Table,
        slot_mapping: &[i64],
    ) -> Result<u32> {
        let slots = spec.slots(slot_mapping)?;
        let tokens = slots.len() as u32;
        step.upload(self, tokens, slots)?;
        Ok(tokens)
    }

    fn kernel_bind(
        &self,
        spec: &KvAppend,
        _: &Function,
        args: &KvAppendArgs<&Buffer>,
        max_tokens: u32,
    ) -> Result<Layer> {
        items(spec, max_tokens)?;
        let buffers = [args.kv_c.buffer, args.rotary(spec).buffer, args.kv.buffer].map(Buffer::clone);
        Ok(Layer { args: AppendParams::new(spec, args, max_tokens), buffers })
    }

    /// The grid covers the smaller capacity of step and binding: a captured launch appends what the step's table holds at the replay.
    fn kernel_record(
        &self,
        spec: &KvAppend,
        kernel: &Function,
        (): &mut (),
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        let Some(args) = layer.args.for_table(step) else { return Ok(()) };
        // Every address is in its buffer, for every pair of step and binding and whatever the table holds:
        // - the kernel reads slots and rows of tokens below max_tokens, for which the table has room and whose last row's end
        //   `check_args` found inside, and takes those below the table's count;
        // - it writes slots below num_slots only, of pages whose last one's end `check_args` found inside.
        let items = items(spec, args.max_tokens)?;
        self.launch(
            kernel,
            items.div_ceil(THREADS),
            THREADS,
            0,
            &args,
            layer.buffers.iter().chain(step.buffer()),
        )
    }
}

/// An item is an oct (8 consecutive elements) of TOKENS_PER_THREAD tokens.
fn items(spec: &KvAppend, tokens: u32) -> Result<u32> {
    let blocks = u64::from(tokens.div_ceil(TOKENS_PER_THREAD));
    let items = blocks * u64::from(spec.shape.row_elems() / 8);
    checked_items("items of an append", items, "append in several steps")
}

pub(super) fn append_entry(spec: &KvAppend) -> String {
    format!("kv_append_{}_{}", spec.input, spec.kv.dtype())
}

#[cfg(test)]
mod tests {
    use super::Scale;

    #[test]
    fn the_inverses_stay_on_their_sides_of_a_rounded_product() {
        let rounding = (-24f64).exp2();
        for i in 1..1u32 << 16 {
            // mantissas of all kinds, exponents of the fast path
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
