//! `kv_gather`, the field's `gather_and_maybe_dequant_cache`.

use wgpu_mla::{Dtype, GatherRange, e4m3_decode};

/// Arguments of [`kv_gather`]: encoded, little-endian and dense.
#[derive(Debug, Clone, Copy)]
pub struct GatherPages<'a> {
    /// `[num_pages, page_size, row_elems]` of `dtype`.
    pub kv_cache: &'a [u8],
    /// Dtype of the cache.
    pub dtype: Dtype,
    /// Tokens in a page.
    pub page_size: usize,
    /// `L + R`.
    pub row_elems: usize,
    /// `[batch, max_pages]`. Entries that no range reaches may hold anything.
    pub block_table: &'a [i32],
    /// Entries in a row of `block_table`.
    pub max_pages: usize,
    /// Factor of an e4m3 cache's elements where the rows are wider.
    pub k_scale: f32,
}

/// Copies tokens of the cache to rows `[rows, row_elems]` of dtype `output`; other rows stay as they are.
///
/// Bits are copied where the dtypes agree. An e4m3 code becomes the f32 product of its value and `k_scale`, then the nearest
/// element, ties to even both times; its NaN becomes a quiet NaN of the same sign. Other elements become the nearest one.
///
/// # Panics
/// Where the arrays are shorter than the ranges say.
pub fn kv_gather(args: &GatherPages<'_>, ranges: &[GatherRange], output: Dtype, rows: &mut [u8]) {
    let (row_bytes, out_bytes) = (args.row_elems * args.dtype.bytes(), args.row_elems * output.bytes());
    for range in ranges {
        for i in 0..range.tokens as usize {
            let token = range.begin as usize + i;
            let entry = range.sequence as usize * args.max_pages + token / args.page_size;
            let slot = args.block_table[entry] as usize * args.page_size + token % args.page_size;
            let codes = &args.kv_cache[slot * row_bytes..][..row_bytes];
            let mut row = Vec::with_capacity(out_bytes);
            if args.dtype == output {
                row.extend_from_slice(codes);
            } else if args.dtype == Dtype::E4m3 {
                codes.iter().for_each(|&code| output.encode(dequantised(code, args.k_scale), &mut row));
            } else {
                args.dtype.decode_all(codes).into_iter().for_each(|x| output.encode(x, &mut row));
            }
            rows[(range.out_row as usize + i) * out_bytes..][..out_bytes].copy_from_slice(&row);
        }
    }
}

/// NaN is handled apart, since arithmetic may change its bits.
fn dequantised(code: u8, k_scale: f32) -> f32 {
    let value = e4m3_decode(code);
    if value.is_nan() {
        f32::NAN.copysign(if code & 0x80 == 0 { 1.0 } else { -1.0 })
    } else {
        value * k_scale
    }
}
