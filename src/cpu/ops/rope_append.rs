//! `rope_append` on host memory: `rope` of the queries and of the keys, and `kv_append`.

use std::cell::Cell;

use super::rope::rotate;
use crate::base::error::Result;
use crate::base::view::View;
use crate::cpu::buffer::Buffer;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{
    KvAppendArgs, Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent, RopeArgs,
};

thread_local! {
    /// A call's rotated keys. Kept for the next call, so that only a larger one allocates.
    static KEYS: Cell<Option<Buffer>> = const { Cell::new(None) };
}

impl HostOp for RopeAppend {
    /// Slots, `u32::MAX` for a token that is skipped, and positions, if the step has them.
    type Prepared = (Vec<u32>, Option<Buffer>);

    fn prepare(&self, batch: RopeAppendBatch<'_>) -> Result<(Self::Prepared, RopeAppendExtent)> {
        let used = batch.extent()?;
        let (slots, _) = HostOp::prepare(&self.append, batch.slot_mapping)?;
        let positions = match batch.positions {
            Some(positions) => {
                let buffer = Buffer::new(positions.len() as u64 * 4)?;
                buffer.upload(0, bytemuck::cast_slice(positions))?;
                Some(buffer)
            }
            None => None,
        };
        Ok(((slots, positions), used))
    }

    fn run(
        &self,
        pool: &Pool,
        (slots, positions): &Self::Prepared,
        args: &RopeAppendArgs<&Buffer>,
    ) -> Result<()> {
        let (tokens, query) = (0..slots.len() as u32, self.rope());
        let key = Rope { dtype: self.append.input, num_heads: 1, ..query };
        let row_bytes = u64::from(key.rope_dim) * key.dtype.bytes() as u64;
        let key_bytes = u64::from(tokens.end) * row_bytes;
        let keys = match KEYS.take() {
            Some(kept) if kept.bytes() >= key_bytes => kept,
            _ => Buffer::new(key_bytes)?,
        };
        let k_pe = View::dense(&keys, 1, key.rope_dim);
        let positions = positions.as_ref().unwrap_or(args.positions);
        let queries = RopeArgs { positions, ..args.rope() };
        // The op runs once a slab of the pool, but queries are rotated by one of these calls only: twice in place would be wrong.
        if args.layer.kv.slots(&self.append.kv).0 == 0 {
            rotate(&query, pool, &tokens, &queries, (self.query_out, args.q_scale), args.query_guard(self));
        }
        HostOp::run(&key, pool, &tokens, &RopeArgs { x: args.layer.k_pe, y: k_pe, scale: 1.0, ..queries })?;
        HostOp::run(&self.append, pool, slots, &KvAppendArgs { k_pe, ..args.layer.clone() })?;
        KEYS.set(Some(keys));
        Ok(())
    }
}
