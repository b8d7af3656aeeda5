//! `kv_gather` on host memory.

use super::raw;
use crate::base::dtype::e4m3_decode;
use crate::base::error::Result;
use crate::cache::Scales;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::{Pages, Rows};
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::{bits_of, widen, widen_token};
use crate::cpu::pool::Pool;
use crate::ops::{GatherBatch, KvGather, KvGatherArgs, Piece};

impl HostOp for KvGather {
    type Prepared = Vec<Piece>;

    fn prepare(&self, batch: GatherBatch<'_>) -> Result<(Vec<Piece>, u32)> {
        let all = self.pieces(batch)?;
        Ok((all.pieces, all.rows))
    }

    fn run(&self, pool: &Pool, pieces: &Vec<Piece>, args: &KvGatherArgs<&Buffer>) -> Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        let locked = lock([(args.kv.buffer, Access::Read), (args.out.buffer, Access::Write)]);
        let (cache, out) = (self.kv.dtype(), self.output);
        let (places, rows) = (Pages::of(&args.kv, &self.kv, &self.shape), Rows::of(&args.out));
        let (dim, layout) = (self.shape.row_elems() as usize, self.kv.token(&self.shape));
        // Each of the 256 codes is converted once.
        let codes: [u32; 256] =
            std::array::from_fn(|code| bits_of(out, dequantised(code as u8, args.k_scale)));
        let from = locked.bytes(0);
        let (first_slot, num_slots) = args.kv.slots(&self.kv);
        pool.for_each(pieces.len(), |_, piece| {
            let piece = pieces[piece];
            // A piece is inside a page, so in one slab.
            let first = piece.slot.wrapping_sub(first_slot);
            if first >= num_slots {
                return;
            }
            for token in 0..piece.tokens as usize {
                let at = places.slot(first as usize + token);
                let row = &from[at..][..layout.bytes as usize];
                let to = rows.at(piece.out_row as usize + token, 0);
                let store = |bits: &dyn Fn(usize) -> u32| {
                    store_elements(locked.words(1), out.bytes(), to, dim, bits);
                };
                if layout.scales != Scales::None && layout.scales != Scales::PerTensor {
                    let mut values = vec![0.0; dim];
                    widen_token(widen, &layout, row, &mut values);
                    store(&|i| bits_of(out, values[i]));
                } else if cache == out {
                    store(&|i| raw(row, cache.bytes(), i));
                } else if self.dequantises() {
                    store(&|i| codes[row[i] as usize]);
                } else {
                    store(&|i| bits_of(out, cache.decode_at(row, i)));
                }
            }
        });
        Ok(())
    }
}

/// The f32 product, or the code's NaN with its sign.
fn dequantised(code: u8, k_scale: f32) -> f32 {
    match e4m3_decode(code) {
        x if x.is_nan() => f32::from_bits(0x7FC0_0000 | u32::from(code & 0x80) << 24),
        x => x * k_scale,
    }
}
