//! `indexer_append` on host memory.

use super::index_row::{Angles, kept, normalise, read, rotate, store};
use crate::base::error::Result;
use crate::cache::{INDEX_DIM, Scales};
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{INDEX_SHAPE, IndexerAppend, IndexerAppendArgs, RopeAppendBatch, RopeAppendExtent};

impl HostOp for IndexerAppend {
    /// Slots, `u32::MAX` for a token that is skipped, and positions, if the step has them.
    type Prepared = (Vec<u32>, Option<Vec<i32>>);

    fn prepare(&self, batch: RopeAppendBatch<'_>) -> Result<(Self::Prepared, RopeAppendExtent)> {
        let used = batch.extent()?;
        Ok(((self.slots(batch.slot_mapping)?, kept(batch.positions)?), used))
    }

    fn run(
        &self,
        pool: &Pool,
        (slots, positions): &Self::Prepared,
        args: &IndexerAppendArgs<&Buffer>,
    ) -> Result<()> {
        let (read_only, format, kv) = (Access::Read, &self.index.format, self.index.kv());
        // Without RoPE positions and angles may be any buffers, the cache's among them.
        let unread = |buffer| if format.rope.is_some() { buffer } else { args.k.buffer };
        let locked = lock([
            (args.k.buffer, read_only),
            (args.norm_weight, read_only),
            (args.norm_bias, read_only),
            (unread(args.positions), read_only),
            (unread(args.cos_sin), read_only),
            (args.cache.buffer, Access::Write),
        ]);
        let [weight, bias] =
            [1, 2].map(|i| &bytemuck::cast_slice::<u8, f32>(locked.bytes(i))[..INDEX_DIM as usize]);
        let angles = Angles {
            positions: positions.as_deref().unwrap_or(bytemuck::cast_slice(locked.bytes(3))),
            cos_sin: bytemuck::cast_slice(locked.bytes(4)),
            max_position: args.max_position,
        };
        let (rows, layout) = (Rows::of(&args.k), kv.token(&INDEX_SHAPE));
        let (base, block_stride) = (args.cache.base() as usize, args.cache.block_stride as usize);
        let (page_size, element) = (self.index.page_size as usize, format.dtype.bytes());
        let (first_slot, num_slots) = args.cache.slots(&kv);
        pool.for_each(slots.len(), |_, token| {
            // A skipped token, and one of another slab.
            let slot = slots[token].wrapping_sub(first_slot);
            if slot >= num_slots {
                return;
            }
            let (mut key, is_finite) = read(self.input, locked.bytes(0), rows.at(token, 0));
            normalise(&mut key, weight, bias, args.norm_eps);
            rotate(format, &mut key, &angles, token);
            // The keys of a page lie one behind the other, and their scales behind all of them.
            let (page, offset) = (base + slot as usize / page_size * block_stride, slot as usize % page_size);
            let row_bytes = INDEX_DIM as usize * element;
            let scale =
                store(format, locked.words(5), (page + offset * row_bytes) / element, &key, is_finite);
            if layout.scales == Scales::PageFooter {
                let at = (page + page_size * row_bytes) / 4 + offset;
                store_elements(locked.words(5), 4, at, 1, |_| scale.to_bits());
            }
        });
        Ok(())
    }
}
