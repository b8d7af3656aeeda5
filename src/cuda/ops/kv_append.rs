//! `kv_append`: new rows into the paged cache, the field's `concat_and_cache_mla`.

use cudarc::driver::DeviceRepr;

use super::{Divisor, THREADS, block_stride, checked_items, entry_of};
use crate::cuda::{Buffer, Cuda};
use crate::layer::{View, no_aliases};
use crate::ops::{AppendLayer, AppendSpec};
use crate::{Dtype, Error, Result};

pub(super) const PTX: &str = include_str!("../../../shaders/cuda/kv_append.ptx");

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

/// `Args` of kv_append.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AppendArgs {
    kv_c: u64,
    k_pe: u64,
    kv: u64,
    slots: u64,
    kv_c_stride: u64,
    k_pe_stride: u64,
    block_stride: u64,
    num_tokens: u32,
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

/// See [`crate::Backend::kv_append`].
pub(in crate::cuda) fn kv_append(
    cuda: &Cuda,
    spec: &AppendSpec,
    slot_mapping: &[i64],
    layer: &AppendLayer<'_, Buffer>,
) -> Result<()> {
    let num_tokens = u32::try_from(slot_mapping.len()).map_err(|_| Error::Length {
        what: "slot_mapping",
        got: slot_mapping.len() as u64,
        want: u32::MAX.into(),
        cure: "append fewer tokens a call",
    })?;
    layer.check(spec, num_tokens, Buffer::bytes)?;
    let slots = spec.slots(slot_mapping)?;
    let (shape, kv) = (&spec.shape, &layer.kv);
    // Without a rotary part its buffer is unread, whatever it is.
    let k_pe = if shape.qk_rope_head_dim == 0 { layer.kv_c } else { layer.k_pe };
    no_aliases(&[("kv_c", layer.kv_c.buffer), ("k_pe", k_pe.buffer)], &[("kv", kv.buffer)], Buffer::same_as)?;
    let row_octs = shape.row_elems() / 8;
    let blocks = u64::from(num_tokens.div_ceil(TOKENS_PER_THREAD));
    let items = checked_items("items of an append", blocks * u64::from(row_octs), "append in several steps")?;
    if items == 0 {
        return Ok(());
    }

    // Every place is in its buffer: the kernel reads slots and rows of tokens below num_tokens, whose last row's end was just checked,
    // and writes slots below num_slots, of pages whose last one's end was.
    let (input, cache) = (spec.input.bytes() as u64, spec.kv.dtype.bytes() as u64);
    // With one token the stride is unused and may be anything.
    let stride = |view: &View<'_, Buffer>| if num_tokens > 1 { view.token_stride * input } else { 0 };
    let address = |view: &View<'_, Buffer>| view.buffer.ptr() + view.offset * input;
    let is_wide = [&layer.kv_c, &k_pe].iter().all(|view| (address(view) | stride(view)).is_multiple_of(16));
    let table = cuda.scratch(&slots)?;
    let args = AppendArgs {
        kv_c: address(&layer.kv_c),
        k_pe: address(&k_pe),
        kv: kv.buffer.ptr() + kv.base() * cache,
        slots: table.ptr(),
        kv_c_stride: stride(&layer.kv_c),
        k_pe_stride: stride(&k_pe),
        block_stride: block_stride(&spec.kv, kv),
        num_tokens,
        num_slots: spec.kv.num_slots() as u32,
        page_size: spec.kv.page_size,
        latent_octs: shape.kv_lora_rank / 8,
        row_octs,
        is_wide: is_wide.into(),
        by_row_octs: Divisor::new(row_octs),
        by_page_size: Divisor::new(spec.kv.page_size),
        scale: Scale::new(layer.k_scale),
    };
    let kernel = cuda.kernel(PTX, append_entry(spec))?;
    cuda.launch(&kernel, items.div_ceil(THREADS), THREADS, 0, &args)
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
