//! `kv_calibrate` on host memory.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::base::error::Result;
use crate::base::view::check_tokens;
use crate::cpu::buffer::{Access, Buffer, lock};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{KvCalibrate, KvCalibrateArgs};

impl HostOp for KvCalibrate {
    type Prepared = Range<u32>;

    fn prepare(&self, tokens: Range<u32>) -> Result<(Range<u32>, u32)> {
        let (_, end) = check_tokens(&tokens)?;
        Ok((tokens, end))
    }

    fn run(&self, pool: &Pool, tokens: &Range<u32>, args: &KvCalibrateArgs<&Buffer>) -> Result<()> {
        let k_pe = args.rotary(self);
        let (read, write) = (Access::Read, Access::Write);
        let locked = lock([(args.kv_c.buffer, read), (k_pe.buffer, read), (args.stats, write)]);
        let parts = [
            (locked.bytes(0), Rows::of(&args.kv_c), self.shape.kv_lora_rank as usize),
            (locked.bytes(1), Rows::of(&k_pe), self.shape.qk_rope_head_dim as usize),
        ];
        let (words, limit) = (locked.words(2), args.limit());
        pool.for_each(tokens.len(), |_, token| {
            let (mut amax, mut saturated, mut non_finite, mut elements) = (0f32, 0, 0, 0);
            for (from, rows, dim) in parts {
                let at = rows.at(tokens.start as usize + token, 0);
                for x in (0..dim).map(|i| self.input.decode_at(from, at + i).abs()) {
                    if x.is_finite() {
                        amax = amax.max(x);
                        saturated += u32::from(x > limit);
                    } else {
                        non_finite += 1;
                    }
                }
                elements += dim as u32;
            }
            // The bits of numbers from 0 up are in their order.
            words[0].fetch_max(amax.to_bits(), Ordering::Relaxed);
            for (at, n) in [(2, saturated), (4, non_finite), (6, elements)] {
                add(&words[at..at + 2], n);
            }
        });
        Ok(())
    }
}

/// Adds to a count in two words.
fn add(words: &[AtomicU32], n: u32) {
    if words[0].fetch_add(n, Ordering::Relaxed).checked_add(n).is_none() {
        words[1].fetch_add(1, Ordering::Relaxed);
    }
}
