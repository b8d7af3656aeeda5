//! Compares the cache that an append wrote with what is expected.

use wgpu_mla::{Dtype, KvAppend, MlaShape, SUPPORTED_DIMS};

use super::case::AppendCase;

/// The dims of a cache with rows of so many elements, for an op to which heads do not matter.
pub fn shape_of_row(elems: usize) -> MlaShape {
    let dims = SUPPORTED_DIMS.iter().find(|&&(latent, rope, _)| (latent + rope) as usize == elems);
    let &(kv_lora_rank, qk_rope_head_dim, _) = dims.expect("rows that are served");
    MlaShape { num_heads: 1, kv_lora_rank, qk_rope_head_dim }
}

/// Byte for byte, but for what the spec leaves open: the kind of a NaN that was converted, and, with a `k_scale`
/// that is no power of two, the neighbouring code of one element in 1000 next to a tie. Counts those.
pub fn same_cache(case: &AppendCase, got: &[u8]) -> Result<usize, String> {
    if got.len() != case.kv_cache.len() {
        return Err(format!("{} bytes, expected {}", got.len(), case.kv_cache.len()));
    }
    let KvAppend { shape, kv, input, .. } = case.spec;
    if !kv.layout.is_plain() {
        return match got.iter().zip(&case.kv_cache).position(|(a, b)| a != b) {
            Some(at) => Err(format!("byte {at}: {:#04x}, expected {:#04x}", got[at], case.kv_cache[at])),
            None => Ok(0),
        };
    }
    let (row, elem, latent) = (shape.row_elems() as usize, kv.dtype().bytes(), shape.kv_lora_rank as usize);
    let mut token_of = vec![None; kv.num_slots() as usize];
    for (token, &slot) in case.slot_mapping.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        token_of[slot as usize] = Some(token);
    }
    let mut neighbours = 0;
    for (index, (a, b)) in got.chunks(elem).zip(case.kv_cache.chunks(elem)).enumerate() {
        if a == b {
            continue;
        }
        let (slot, column) = (index / row, index % row);
        let wrong = || Err(format!("slot {slot} column {column}: bytes {a:02x?}, expected {b:02x?}"));
        let Some(token) = token_of[slot] else { return wrong() };
        let (got, want) = (kv.dtype().decode_at(a, 0), kv.dtype().decode_at(b, 0));
        if input != kv.dtype() && got.is_nan() && want.is_nan() {
            continue;
        }
        let x = if column < latent {
            input.decode_at(&case.kv_c, token * latent + column)
        } else {
            input.decode_at(&case.k_pe, token * (row - latent) + column - latent)
        };
        let exact = f64::from(x) / f64::from(case.k_scale);
        let tie = f64::midpoint(got.into(), want.into());
        let ulp = f64::from((exact as f32).abs().next_up() - (exact as f32).abs());
        let adjacent = kv.dtype() == Dtype::E4m3 && a[0].abs_diff(b[0]) == 1;
        let power_of_two = case.k_scale.to_bits() << 9 == 0;
        // NaN, where a NaN code or an infinity is involved, is next to no tie.
        let at_tie = (exact - tie).abs() <= 2.5 * ulp;
        if power_of_two || !adjacent || !at_tie {
            return wrong();
        }
        neighbours += 1;
    }
    let written = token_of.iter().flatten().count() * row;
    if neighbours > (written / 1000).max(1) {
        return Err(format!("{neighbours} of {written} elements differ by a code: one in 1000 may"));
    }
    Ok(neighbours)
}
