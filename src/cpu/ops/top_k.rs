//! `top_k` on host memory: a radix select of each row, a thread a row.

use std::sync::atomic::Ordering::Relaxed;

use super::raw;
use crate::base::error::Result;
use crate::base::order::order_key;
use crate::cpu::buffer::{Access, Buffer, lock};
use crate::cpu::decode::Rows as Places;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{TopK, TopKArgs, TopKBatch, TopKExtent, TopKRows, UNKNOWN};

const MINUS_INFINITY: u32 = 0xFF80_0000;

/// Shift and bins of each digit of a key, the highest first.
const DIGITS: [(u32, usize); 3] = [(21, 1 << 11), (10, 1 << 11), (0, 1 << 10)];

impl HostOp for TopK {
    type Prepared = TopKRows;

    fn prepare(&self, batch: TopKBatch<'_>) -> Result<(TopKRows, TopKExtent)> {
        let rows = self.rows(batch, |_| Ok(()))?;
        let used = rows.extent;
        Ok((rows, used))
    }

    fn run(&self, pool: &Pool, rows: &TopKRows, args: &TopKArgs<&Buffer>) -> Result<()> {
        if rows.rows == 0 {
            return Ok(());
        }
        let values = args.values.unwrap_or(args.indices);
        let locked = lock([
            (args.logits.buffer, Access::Read),
            (args.lengths, Access::Read),
            (args.indices.buffer, Access::Write),
            (values.buffer, Access::Write),
        ]);
        let [from, to, values_to] = [args.logits, args.indices, values].map(|view| Places::of(&view));
        let k = self.k as usize;
        pool.for_each(rows.rows as usize, |_, row| {
            let begin = from.at(row, 0);
            let length = match rows.words[1 + row * self.row_words() as usize] {
                UNKNOWN => (raw(locked.bytes(1), 4, row) as i32).clamp(0, args.columns as i32) as usize,
                length => length as usize,
            };
            // Rows of no columns may lie past the end of their buffer.
            let logits = if length == 0 { &[] } else { &locked.bytes(0)[begin * 4..(begin + length) * 4] };
            let out_row = rows.words[0] as usize + row;
            let (indices, values) =
                (&locked.words(2)[to.at(out_row, 0)..], &locked.words(3)[values_to.at(out_row, 0)..]);
            let put = |place: usize, index: u32, value: u32| {
                indices[place].store(index, Relaxed);
                if args.values.is_some() {
                    values[place].store(value, Relaxed);
                }
            };
            let mut chosen = 0;
            select(logits, k, |index, bits| {
                put(chosen, self.entry(rows, row, index), bits);
                chosen += 1;
            });
            (chosen..k).for_each(|place| put(place, u32::MAX, MINUS_INFINITY));
        });
        Ok(())
    }
}

/// Calls `chosen` with the index and the bits of the best `k` logits, in the order of their indices.
fn select(logits: &[u8], k: usize, mut chosen: impl FnMut(u32, u32)) {
    let bits = || logits.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let (threshold, mut ties) = if logits.len() / 4 > k { threshold(&bits, k) } else { (0, k) };
    for (index, bits) in (0..).zip(bits()) {
        let key = order_key(bits);
        let is_tie = key == threshold && ties > 0;
        if is_tie {
            ties -= 1;
        }
        if key > threshold || is_tie {
            chosen(index, bits);
        }
    }
}

/// The key of the last that is chosen, and how many with this key are.
fn threshold<I: Iterator<Item = u32>>(bits: &impl Fn() -> I, k: usize) -> (u32, usize) {
    let (mut known, mut left) = (0, k);
    let mut mask = 0;
    for (shift, bins) in DIGITS {
        let mut counts = [0u32; 1 << 11];
        for key in bits().map(order_key).filter(|key| key & mask == known) {
            counts[(key >> shift) as usize & (bins - 1)] += 1;
        }
        let mut bin = bins - 1;
        while bin > 0 && (counts[bin] as usize) < left {
            left -= counts[bin] as usize;
            bin -= 1;
        }
        known |= (bin as u32) << shift;
        mask |= (bins as u32 - 1) << shift;
    }
    (known, left)
}
