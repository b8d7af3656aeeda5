//! `kv_gather` on host memory.

use super::raw;
use crate::cpu::bind::{Pages, Rows};
use crate::cpu::buffer::{Access, Buffer, bits_of, lock, store_elements};
use crate::cpu::pool::Pool;
use crate::ops::{Gather, GatherRange, GatherSpec};
use crate::tables::PageTable;
use crate::{Result, e4m3_decode};

/// See [`crate::Backend::kv_gather`].
pub(in crate::cpu) fn kv_gather(
    pool: &Pool,
    spec: &GatherSpec,
    pages: PageTable<'_>,
    seq_lens: &[i32],
    ranges: &[GatherRange],
    args: &Gather<&Buffer>,
) -> Result<()> {
    spec.check()?;
    let all = spec.pieces(pages, seq_lens, ranges)?;
    args.check(spec, all.rows, Buffer::bytes)?;
    args.check_aliases(Buffer::same_as)?;
    if all.pieces.is_empty() {
        return Ok(());
    }

    let locked = lock([(args.kv.buffer, Access::Read), (args.out.buffer, Access::Write)]);
    let (cache, out) = (spec.kv.dtype, spec.output);
    let (places, rows) =
        (Pages::of(&args.kv, spec.kv.page_size, spec.shape.row_elems()), Rows::of(&args.out));
    let dim = spec.shape.row_elems() as usize;
    // A byte has few values.
    let codes: Vec<u32> = (0..=255).map(|code| bits_of(out, dequantised(code, args.k_scale))).collect();
    let from = locked.bytes(0);
    pool.for_each(all.pieces.len(), |_, piece| {
        let piece = all.pieces[piece];
        for token in 0..piece.tokens as usize {
            let at = places.slot(piece.slot as usize + token);
            let to = rows.at(piece.out_row as usize + token, 0);
            let store = |bits: &dyn Fn(usize) -> u32| {
                store_elements(locked.words(1), out.bytes(), to, dim, bits);
            };
            if cache == out {
                store(&|i| raw(from, cache.bytes(), at + i));
            } else if spec.dequantises() {
                store(&|i| codes[from[at + i] as usize]);
            } else {
                store(&|i| bits_of(out, cache.decode_at(from, at + i)));
            }
        }
    });
    Ok(())
}

/// The f32 product, or the code's NaN with its sign.
fn dequantised(code: u8, k_scale: f32) -> f32 {
    match e4m3_decode(code) {
        x if x.is_nan() => f32::from_bits(0x7FC0_0000 | u32::from(code & 0x80) << 24),
        x => x * k_scale,
    }
}
