//! `kv_append` on host memory.

use std::ops::Range;

use super::raw;
use crate::base::error::Result;
use crate::cache::Scales;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::{Pages, Rows};
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::{bits_of, group_scale};
use crate::cpu::pool::Pool;
use crate::ops::{KvAppend, KvAppendArgs};

impl HostOp for KvAppend {
    /// Slots, `u32::MAX` for a token that is skipped.
    type Prepared = Vec<u32>;

    fn prepare(&self, slot_mapping: &[i64]) -> Result<(Vec<u32>, u32)> {
        let slots = self.slots(slot_mapping)?;
        let tokens = slots.len() as u32;
        Ok((slots, tokens))
    }

    fn run(&self, pool: &Pool, slots: &Vec<u32>, args: &KvAppendArgs<&Buffer>) -> Result<()> {
        let (latent, rope) = (self.shape.kv_lora_rank as usize, self.shape.qk_rope_head_dim as usize);
        let k_pe = args.rotary(self);

        let (read, write) = (Access::Read, Access::Write);
        let locked = lock([(args.kv_c.buffer, read), (k_pe.buffer, read), (args.kv.buffer, write)]);
        let pages = Pages::of(&args.kv, &self.kv, &self.shape);
        let layout = self.kv.token(&self.shape);
        let parts = [
            (locked.bytes(0), Rows::of(&args.kv_c), layout.latent, latent),
            (locked.bytes(1), Rows::of(&k_pe), layout.rope, rope),
        ];
        let input = self.input;
        let (first_slot, num_slots) = args.kv.slots(&self.kv);
        pool.for_each(slots.len(), |_, token| {
            // A skipped token, and one of another slab.
            let slot = slots[token].wrapping_sub(first_slot);
            if slot >= num_slots {
                return;
            }
            let first = pages.slot(slot as usize);
            for (from, rows, section, dim) in parts {
                let at = rows.at(token, 0);
                let (cache, begin) = (section.dtype, first + section.at as usize);
                if input == cache {
                    // Rows begin and end on multiples of 4 elements, so they are whole words.
                    let words = |elements: usize| elements * cache.bytes() / 4;
                    let bits = |i: usize| raw(from, 4, words(at) + i);
                    store_elements(locked.words(2), 4, begin / 4, words(dim), bits);
                    continue;
                }
                let element = |i: usize| input.decode_at(from, at + i);
                let store = |begin: usize, range: Range<usize>, scale: f32| {
                    let bits = |i: usize| {
                        let element = element(range.start + i);
                        bits_of(cache, if cache.is_fp8() { quotient(element, scale) } else { element })
                    };
                    store_elements(locked.words(2), cache.bytes(), begin / cache.bytes(), range.len(), bits);
                };
                match layout.scales {
                    Scales::Groups { of, at } if cache.is_fp8() => {
                        for (group, columns) in (0..dim).step_by(of as usize).enumerate() {
                            let columns = columns..columns + of as usize;
                            let scale = group_scale(columns.clone().map(element));
                            store_elements(locked.words(2), 4, (first + at as usize) / 4 + group, 1, |_| {
                                scale.to_bits()
                            });
                            store(begin + columns.start, columns, scale);
                        }
                    }
                    _ => store(begin, 0..dim, args.k_scale),
                }
            }
        });
        Ok(())
    }
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
