//! What the CPU needs from a dtype: how its elements become f32, without branches, so that the compiler vectorises the loops, and how f32
//! is rounded to it. No other file of this backend matches on all dtypes.

use crate::base::dtype::Dtype;
use crate::cache::{Scales, TokenLayout};
use crate::ops::WeightFormat;

/// Every element of `bytes`, little-endian, into `out`, which has one float an element.
#[inline(always)]
pub(in crate::cpu) fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (to, from) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *to = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
            }
        }
        Dtype::F16 => {
            for (to, from) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *to = f16_value(u16::from_le_bytes([from[0], from[1]]));
            }
        }
        Dtype::Bf16 => {
            for (to, from) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *to = f32::from_bits(u32::from(u16::from_le_bytes([from[0], from[1]])) << 16);
            }
        }
        Dtype::E4m3 => {
            for (to, from) in out.iter_mut().zip(bytes) {
                *to = e4m3_value(*from);
            }
        }
    }
}

/// Elements of a row of weights that begins `bytes`, from element `first` on, as many as `out` has. A scale of a head is left to the
/// caller.
#[inline]
pub(in crate::cpu) fn widen_weights(format: WeightFormat, bytes: &[u8], first: usize, out: &mut [f32]) {
    match format {
        WeightFormat::Elements(dtype) => {
            widen(dtype, &bytes[first * dtype.bytes()..][..out.len() * dtype.bytes()], out);
        }
        WeightFormat::Q8_0 => widen_q8_0(bytes, first, out),
    }
}

/// The same of `Q8_0`: an f16 scale and 32 `i8` a block.
fn widen_q8_0(bytes: &[u8], first: usize, out: &mut [f32]) {
    let block_len = WeightFormat::Q8_0_BLOCK as usize;
    let (mut at, mut rest) = (first, out);
    while !rest.is_empty() {
        let block = &bytes[at / block_len * WeightFormat::Q8_0_BYTES as usize..];
        let scale = f16_value(u16::from_le_bytes([block[0], block[1]]));
        let codes = &block[2 + at % block_len..2 + block_len];
        let (here, further) = rest.split_at_mut(codes.len().min(rest.len()));
        for (to, &code) in here.iter_mut().zip(codes) {
            *to = scale * f32::from(code as i8);
        }
        (at, rest) = (at + here.len(), further);
    }
}

/// A token of a cache as f32, by a form of [`widen`]: its latent, each group of codes times its own scale, then its rotary part.
/// A scale of the whole cache is left to the caller.
#[inline]
pub(in crate::cpu) fn widen_token(
    widen: impl Fn(Dtype, &[u8], &mut [f32]),
    token: &TokenLayout,
    bytes: &[u8],
    out: &mut [f32],
) {
    let Scales::Groups { of, at } = token.scales else {
        return widen(token.latent.dtype, bytes, out);
    };
    let rope = &bytes[token.rope.at as usize..];
    let (latent, rotary) = out.split_at_mut(out.len() - rope.len() / token.rope.dtype.bytes());
    let groups = latent.chunks_exact_mut(of as usize).zip(bytes.chunks_exact(of as usize));
    for ((to, codes), scale) in groups.zip(bytes[at as usize..].chunks_exact(4)) {
        widen(token.latent.dtype, codes, to);
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        to.iter_mut().for_each(|x| *x *= scale);
    }
    widen(token.rope.dtype, rope, rotary);
}

/// The scale of a group of latent elements as FlashMLA's quantiser has it: the power of two from `max(amax / 448, 1e-4)` on. Infinities and
/// NaNs are above all numbers, and their scale is 2^120.
pub(in crate::cpu) fn group_scale(group: impl Iterator<Item = f32>) -> f32 {
    // The bits of numbers from 0 up are in their order.
    let amax = group.map(|x| x.abs().to_bits()).max().unwrap_or(0).min(f32::INFINITY.to_bits());
    // 448 is 1.75 * 2^8: the exponent of amax is 8 more, or 7 where its mantissa is past 1.75. 1e-4 is between 2^-14 and 2^-13.
    let past_448 = 0x7F_FFFF - 0x60_0000;
    let exponent = ((amax + past_448) >> 23).max(127 - 13 + 8) - 8;
    f32::from_bits(exponent << 23)
}

/// Rounds `value` to the dtype: its bits, in the low end of a word.
#[inline]
pub(in crate::cpu) fn bits_of(dtype: Dtype, value: f32) -> u32 {
    match dtype {
        Dtype::F32 => value.to_bits(),
        Dtype::F16 => half::f16::from_f32(value).to_bits().into(),
        Dtype::Bf16 => half::bf16::from_f32(value).to_bits().into(),
        Dtype::E4m3 => crate::base::dtype::e4m3_encode(value).into(),
    }
}

/// Rounds what is stored: `value` itself, or the exact quotient by the scale of codes.
#[inline]
pub(in crate::cpu) fn scaled_bits(dtype: Dtype, value: f32, scale: f32) -> u32 {
    bits_of(dtype, if dtype.is_fp8() { quotient(value, scale) } else { value })
}

/// `x / by`, rounded to odd: to an f32 whose last bit is set unless it is exact. Rounding that to an e4m3 code gives the code that is
/// nearest to the exact quotient, as the quotient in f64 is on the same side of every tie.
fn quotient(x: f32, by: f32) -> f32 {
    let exact = f64::from(x) / f64::from(by);
    let near = exact as f32;
    if f64::from(near) == exact || !near.is_finite() {
        return near;
    }
    let toward_zero = near.to_bits() - u32::from(f64::from(near).abs() > exact.abs());
    f32::from_bits(toward_zero | 1)
}

/// A small float's magnitude, its exponent moved to f32's place, as an f32: `bias` is the difference of the two
/// exponent biases, `hidden` the first bit above the mantissa.
#[inline(always)]
fn rebias(magnitude: u32, bias: u32, hidden: u32) -> f32 {
    // A subnormal gets the exponent of the smallest normal and its hidden bit, which a subtraction removes. f32 subnormals
    // are avoided because some processors are slow at them.
    let subnormal = magnitude < hidden;
    let bits = magnitude + (bias << 23) + if subnormal { 1 << 23 } else { 0 };
    let hidden_value = if subnormal { f32::from_bits((bias + 1) << 23) } else { 0.0 };
    f32::from_bits(bits) - hidden_value
}

#[inline(always)]
fn f16_value(code: u16) -> f32 {
    // Sign-extended and shifted at once: masks on the narrow code would make the compiler load it byte by byte.
    let shifted = (i32::from(code as i16) << 13) as u32;
    let (sign, magnitude) = (shifted & 0x8000_0000, shifted & 0x0FFF_FFFF);
    let finite = rebias(magnitude, 112, 1 << 23).to_bits();
    let special = 0x7F80_0000 | magnitude;
    f32::from_bits(sign | if magnitude >= 0x7C00 << 13 { special } else { finite })
}

#[inline(always)]
fn e4m3_value(code: u8) -> f32 {
    let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7F));
    let finite = rebias(magnitude << 20, 120, 1 << 23).to_bits();
    f32::from_bits(sign | if magnitude == 0x7F { 0x7FC0_0000 } else { finite })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::base::dtype::e4m3_decode;

    /// Checks one form of [`widen`] on every code of the small dtypes.
    pub(in crate::cpu) fn check_widen(widen: impl Fn(Dtype, &[u8], &mut [f32])) {
        let codes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::F32] {
            let mut got = vec![0.0; codes.len() / dtype.bytes()];
            widen(dtype, &codes, &mut got);
            for (i, got) in got.iter().enumerate() {
                let want = dtype.decode_at(&codes, i);
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{dtype} element {i}: {got} instead of {want}");
            }
        }
        let mut ten = [0.0; 10];
        widen(Dtype::E4m3, &(0..10).collect::<Vec<u8>>(), &mut ten);
        assert_eq!(ten, std::array::from_fn(|i| e4m3_decode(i as u8)));
    }

    #[test]
    fn blocks_are_scaled_codes() {
        let block = |scale: f32, first: i8| {
            let codes = (0..32).map(|i| first.wrapping_add(i) as u8);
            half::f16::from_f32(scale).to_le_bytes().into_iter().chain(codes).collect::<Vec<u8>>()
        };
        let bytes = [block(0.5, -128), block(-2.0, 100)].concat();
        for (first, len) in [(0, 64), (16, 16), (24, 40), (33, 1)] {
            let mut got = vec![0.0; len];
            widen_weights(WeightFormat::Q8_0, &bytes, first, &mut got);
            for (i, got) in (first..).zip(got) {
                let code =
                    if i < 32 { (i as i8).wrapping_add(-128) } else { 100i8.wrapping_add(i as i8 - 32) };
                assert_eq!(got, f32::from(code) * if i < 32 { 0.5 } else { -2.0 }, "element {i}");
            }
        }
    }

    #[test]
    fn plain_widen_is_exact() {
        check_widen(widen);
    }
}
