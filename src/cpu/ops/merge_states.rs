//! `merge_states` on host memory.

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
use crate::ops::{MergeStates, MergeStatesArgs, MergeStatesExtent};

/// Columns that are summed at a time, on the stack.
const COLUMNS: usize = 256;

impl HostOp for MergeStates {
    type Prepared = (Range<u32>, u32);

    fn prepare(
        &self,
        (tokens, num_sets): (Range<u32>, u32),
    ) -> Result<((Range<u32>, u32), MergeStatesExtent)> {
        let extent = self.extent(&tokens, num_sets)?;
        Ok(((tokens, num_sets), extent))
    }

    fn run(
        &self,
        pool: &Pool,
        (tokens, num_sets): &(Range<u32>, u32),
        args: &MergeStatesArgs<&Buffer>,
    ) -> Result<()> {
        if tokens.is_empty() || args.num_heads == 0 {
            return Ok(());
        }
        let output_lse = args.output_lse.unwrap_or(args.output);
        let [a, b] = [args.states, args.lse].map(|view| (view.buffer, Access::Read));
        let locked = lock([a, b, (args.output.buffer, Access::Write), (output_lse.buffer, Access::Write)]);
        let (states, lses) = (locked.bytes(0), locked.bytes(1));
        let [states_at, lse_at, to, lse_to] =
            [args.states, args.lse, args.output, output_lse].map(|view| Rows::of(&view));
        let (dim, dtype, bytes) = (self.head_size as usize, self.dtype, self.dtype.bytes());

        pool.for_each(tokens.len(), |_, token| {
            let token = tokens.start as usize + token;
            for head in 0..args.num_heads as usize {
                // A set's first element, and its LSE where it has a part.
                let sets = || {
                    (0..*num_sets as usize).filter_map(|set| {
                        let at = lse_at.at(token, head) + set * args.lse_set_stride as usize;
                        let lse = Dtype::F32.decode_at(lses, at);
                        let first = states_at.at(token, head) + set * args.set_stride as usize;
                        lse.is_finite().then_some((first, lse))
                    })
                };
                let out = to.at(token, head);
                let lse = match (sets().next(), sets().nth(1)) {
                    (None, _) => {
                        store_elements(locked.words(2), bytes, out, dim, |_| 0);
                        f32::NEG_INFINITY
                    }
                    (Some((first, lse)), None) if args.output_scale == 1.0 => {
                        store_elements(locked.words(2), bytes, out, dim, |i| raw(states, bytes, first + i));
                        lse
                    }
                    _ => {
                        let top = sets().map(|(_, lse)| f64::from(lse)).fold(f64::NEG_INFINITY, f64::max);
                        let weight = |lse: f32| args.lse_base.exp(f64::from(lse) - top);
                        let sum: f64 = sets().map(|(_, lse)| weight(lse)).sum();
                        for begin in (0..dim).step_by(COLUMNS) {
                            // In f64: 65,536 sets may be merged.
                            let mut columns = [0f64; COLUMNS];
                            let columns = &mut columns[..COLUMNS.min(dim - begin)];
                            for (first, lse) in sets() {
                                let weight = weight(lse) / sum;
                                if weight as f32 == 0.0 {
                                    continue; // whatever the set holds
                                }
                                for (i, x) in columns.iter_mut().enumerate() {
                                    *x += weight * f64::from(dtype.decode_at(states, first + begin + i));
                                }
                            }
                            let bits = |i: usize| bits_of(dtype, columns[i] as f32 * args.output_scale);
                            store_elements(locked.words(2), bytes, out + begin, columns.len(), bits);
                        }
                        (top + args.lse_base.log(sum)) as f32
                    }
                };
                if args.output_lse.is_some() {
                    locked.words(3)[lse_to.at(token, head)].store(lse.to_bits(), Ordering::Relaxed);
                }
            }
        });
        Ok(())
    }
}
