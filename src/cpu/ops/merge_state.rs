//! `merge_state` on host memory.

use std::sync::atomic::Ordering;

use super::raw;
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::bits_of;
use crate::cpu::pool::Pool;
use crate::ops::{MergeState, MergeStateArgs};

impl HostOp for MergeState {
    type Prepared = ();

    fn prepare(&self, (): ()) -> Result<((), ())> {
        Ok(((), ()))
    }

    fn run(&self, pool: &Pool, (): &(), args: &MergeStateArgs<&Buffer>) -> Result<()> {
        if args.is_empty() {
            return Ok(());
        }
        let output_lse = args.output_lse.unwrap_or(args.output);

        let inputs = [args.prefix_output, args.prefix_lse, args.suffix_output, args.suffix_lse];
        let [a, b, c, d] = inputs.map(|view| (view.buffer, Access::Read));
        let locked =
            lock([a, b, c, d, (args.output.buffer, Access::Write), (output_lse.buffer, Access::Write)]);
        let outputs = [
            (locked.bytes(0), Rows::of(&args.prefix_output)),
            (locked.bytes(2), Rows::of(&args.suffix_output)),
        ];
        let lses =
            [(locked.bytes(1), Rows::of(&args.prefix_lse)), (locked.bytes(3), Rows::of(&args.suffix_lse))];
        let (output_at, output_lse_at) = (Rows::of(&args.output), Rows::of(&output_lse));
        let (dim, bytes) = (self.head_size as usize, self.dtype.bytes());

        pool.for_each(args.num_tokens as usize, |_, token| {
            for head in 0..args.num_heads as usize {
                let [prefix, suffix] = lses.map(|(lse, at)| Dtype::F32.decode_at(lse, at.at(token, head)));
                let rows = outputs.map(|(out, at)| (out, at.at(token, head)));
                let store = |bits: &dyn Fn(usize) -> u32| {
                    store_elements(locked.words(4), bytes, output_at.at(token, head), dim, bits);
                };
                let copy = |(from, at): (&[u8], usize)| {
                    if args.output_scale == 1.0 {
                        return store(&|i| raw(from, bytes, at + i));
                    }
                    store(&|i| bits_of(self.dtype, self.dtype.decode_at(from, at + i) * args.output_scale));
                };
                let lse = match (prefix.is_finite(), suffix.is_finite()) {
                    (true, true) => {
                        let (lse, weights) = pair_weights(prefix, suffix);
                        store(&|i| {
                            let [x, y] = rows.map(|(from, at)| self.dtype.decode_at(from, at + i));
                            bits_of(self.dtype, (x * weights[0] + y * weights[1]) * args.output_scale)
                        });
                        lse
                    }
                    (true, false) => {
                        copy(rows[0]);
                        prefix
                    }
                    (false, true) => {
                        copy(rows[1]);
                        suffix
                    }
                    (false, false) => {
                        store(&|_| 0);
                        f32::NEG_INFINITY
                    }
                };
                if args.output_lse.is_some() {
                    locked.words(5)[output_lse_at.at(token, head)].store(lse.to_bits(), Ordering::Relaxed);
                }
            }
        });
        Ok(())
    }
}

/// The LSE of two and the share of each.
fn pair_weights(prefix: f32, suffix: f32) -> (f32, [f32; 2]) {
    let both = [f64::from(prefix), f64::from(suffix)];
    let max = both[0].max(both[1]);
    let weights = both.map(|lse| (lse - max).exp());
    let sum = weights[0] + weights[1];
    ((max + sum.ln()) as f32, weights.map(|weight| (weight / sum) as f32))
}
