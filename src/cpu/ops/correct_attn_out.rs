//! `correct_attn_out` on host memory.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::raw;
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::bits_of;
use crate::cpu::pool::Pool;
use crate::ops::{CorrectAttnOut, CorrectAttnOutArgs};

impl HostOp for CorrectAttnOut {
    type Prepared = Range<u32>;

    fn prepare(&self, tokens: Range<u32>) -> Result<(Range<u32>, u32)> {
        let extent = self.extent(&tokens)?;
        Ok((tokens, extent))
    }

    fn run(&self, pool: &Pool, tokens: &Range<u32>, args: &CorrectAttnOutArgs<&Buffer>) -> Result<()> {
        if tokens.is_empty() || args.num_heads == 0 {
            return Ok(());
        }
        let output_lse = args.output_lse.unwrap_or(args.output);
        let [a, b] = [args.out, args.lses].map(|view| (view.buffer, Access::Read));
        let locked = lock([a, b, (args.output.buffer, Access::Write), (output_lse.buffer, Access::Write)]);
        let (out, lses) = (locked.bytes(0), locked.bytes(1));
        let [out_at, lse_at, to, lse_to] =
            [args.out, args.lses, args.output, output_lse].map(|view| Rows::of(&view));
        let (dim, dtype, bytes) = (self.head_size as usize, self.dtype, self.dtype.bytes());

        pool.for_each(tokens.len(), |_, token| {
            let token = tokens.start as usize + token;
            for head in 0..args.num_heads as usize {
                let lse_of = |rank: u32| {
                    let at = lse_at.at(token, head) + rank as usize * args.lse_rank_stride as usize;
                    Some(Dtype::F32.decode_at(lses, at)).filter(|lse| lse.is_finite())
                };
                let (first, to) = (out_at.at(token, head), to.at(token, head));
                let some = || (0..args.world).filter_map(lse_of);
                let (mine, several) = (lse_of(args.rank), some().nth(1).is_some());
                let top = some().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = some().map(|lse| args.lse_base.exp(f64::from(lse) - f64::from(top))).sum();
                let weight =
                    mine.map_or(0.0, |lse| (args.lse_base.exp(f64::from(lse) - f64::from(top)) / sum) as f32);
                let words = locked.words(2);
                if weight == 0.0 {
                    store_elements(words, bytes, to, dim, |_| 0);
                } else if several {
                    let value = |i: usize| weight * dtype.decode_at(out, first + i);
                    store_elements(words, bytes, to, dim, |i| bits_of(dtype, value(i)));
                } else {
                    store_elements(words, bytes, to, dim, |i| raw(out, bytes, first + i));
                }
                if args.output_lse.is_some() {
                    let lse = if several { (f64::from(top) + args.lse_base.log(sum)) as f32 } else { top };
                    locked.words(3)[lse_to.at(token, head)].store(lse.to_bits(), Ordering::Relaxed);
                }
            }
        });
        Ok(())
    }
}
