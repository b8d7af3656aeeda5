//! `indexer_query` on host memory.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::index_row::{Angles, kept, read, rotate, store};
use crate::base::error::Result;
use crate::cpu::buffer::{Access, Buffer, lock};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, RopeAppendExtent};

impl HostOp for IndexerQuery {
    /// Tokens, and their positions, if the step has them.
    type Prepared = (Range<u32>, Option<Vec<i32>>);

    fn prepare(&self, batch: IndexerQueryBatch<'_>) -> Result<(Self::Prepared, RopeAppendExtent)> {
        let (_, used) = batch.extent()?;
        Ok(((batch.tokens.clone(), kept(batch.positions)?), used))
    }

    fn run(
        &self,
        pool: &Pool,
        (tokens, positions): &Self::Prepared,
        args: &IndexerQueryArgs<&Buffer>,
    ) -> Result<()> {
        let (read_only, write, format) = (Access::Read, Access::Write, &self.format);
        // Without RoPE positions and angles may be any buffers, those of outputs among them.
        let unread = |buffer| if format.rope.is_some() { buffer } else { args.q.buffer };
        let locked = lock([
            (args.q.buffer, read_only),
            (args.weights.buffer, read_only),
            (unread(args.positions), read_only),
            (unread(args.cos_sin), read_only),
            (args.q_out.buffer, write),
            (args.weights_out.buffer, write),
        ]);
        let first = tokens.start as usize;
        // A step's own positions begin with its first token, those of the device with token 0.
        let (positions, skipped) = match positions {
            Some(positions) => (&positions[..], first),
            None => (bytemuck::cast_slice(locked.bytes(2)), 0),
        };
        let cos_sin = bytemuck::cast_slice(locked.bytes(3));
        let angles = Angles { positions, cos_sin, max_position: args.max_position };
        let [q, q_out, weights, weights_out] =
            [&args.q, &args.q_out, &args.weights, &args.weights_out].map(Rows::of);
        let all_weights: &[f32] = bytemuck::cast_slice(locked.bytes(1));
        let heads = self.num_heads as usize;
        pool.for_each(tokens.len() * heads, |_, row| {
            let (token, head) = (first + row / heads, row % heads);
            let (mut query, is_finite) = read(self.input, locked.bytes(0), q.at(token, head));
            rotate(format, &mut query, &angles, token - skipped);
            let scale = store(format, locked.words(4), q_out.at(token, head), &query, is_finite);
            let weight = all_weights[weights.at(token, head)] * scale * args.weight_scale;
            locked.words(5)[weights_out.at(token, head)].store(weight.to_bits(), Ordering::Relaxed);
        });
        Ok(())
    }
}
