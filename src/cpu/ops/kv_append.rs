//! `kv_append` on host memory.

use std::ops::Range;

use super::raw;
use crate::base::error::Result;
use crate::cache::Scales;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::{Pages, Rows};
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::{group_scale, scaled_bits};
use crate::cpu::pool::Pool;
use crate::ops::guard::Lost;
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
        let counters = args.guard.map_or(args.kv.buffer, |guard| guard.counters);
        let locked =
            lock([(args.kv_c.buffer, read), (k_pe.buffer, read), (args.kv.buffer, write), (counters, write)]);
        let bounds = self.guard_bounds(args.k_scale);
        let pages = Pages::of(&args.kv, &self.kv, &self.shape);
        let layout = self.kv.token(&self.shape);
        let parts = [
            (locked.bytes(0), Rows::of(&args.kv_c), layout.latent, latent, bounds[0]),
            (locked.bytes(1), Rows::of(&k_pe), layout.rope, rope, bounds[1]),
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
            let mut lost = Lost::default();
            for (from, rows, section, dim, bounds) in parts {
                let at = rows.at(token, 0);
                if args.guard.is_some() {
                    (0..dim).for_each(|i| bounds.note(&mut lost, input.decode_at(from, at + i)));
                }
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
                    let bits = |i: usize| scaled_bits(cache, element(range.start + i), scale);
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
            if let Some(guard) = args.guard {
                lost.add_to(locked.words(3), guard.row);
            }
        });
        Ok(())
    }
}
