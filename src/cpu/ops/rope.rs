//! `rope` on host memory.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::view::check_tokens;
use crate::cpu::buffer::{Access, Buffer, lock, store_elements};
use crate::cpu::decode::Rows;
use crate::cpu::device::HostOp;
use crate::cpu::kernels::formats::scaled_bits;
use crate::cpu::pool::Pool;
use crate::ops::guard::{GuardBounds, GuardView, Lost};
use crate::ops::{Rope, RopeArgs, RopeLayout};

/// The largest [`Rope::rope_dim`].
const MAX_DIM: usize = 1024;

impl HostOp for Rope {
    type Prepared = Range<u32>;

    fn prepare(&self, tokens: Range<u32>) -> Result<(Range<u32>, u32)> {
        let (_, end) = check_tokens(&tokens)?;
        Ok((tokens, end))
    }

    fn run(&self, pool: &Pool, tokens: &Range<u32>, args: &RopeArgs<&Buffer>) -> Result<()> {
        rotate(self, pool, tokens, args, (self.dtype, 1.0), None);
        Ok(())
    }
}

/// Rotates, and rounds to a dtype: what is stored of codes are the quotients by their scale. What that loses is counted by `guard`.
pub(super) fn rotate(
    spec: &Rope,
    pool: &Pool,
    tokens: &Range<u32>,
    args: &RopeArgs<&Buffer>,
    (output, scale): (Dtype, f32),
    guard: Option<GuardView<&Buffer>>,
) {
    let in_place = args.is_in_place(Buffer::same_as);
    let (dim, dtype) = (spec.rope_dim as usize, spec.dtype);
    let half = dim / 2;

    let x_access = if in_place { Access::Write } else { Access::Read };
    let locked = lock([
        (args.x.buffer, x_access),
        (args.y.buffer, Access::Write),
        (args.positions, Access::Read),
        (args.cos_sin, Access::Read),
        (guard.map_or(args.y.buffer, |guard| guard.counters), Access::Write),
    ]);
    let bounds = GuardBounds::of(output, scale);
    let (x_at, y_at) = (Rows::of(&args.x), Rows::of(&args.y));
    let element = |index: usize| {
        if !in_place {
            return dtype.decode_at(locked.bytes(0), index);
        }
        let per_word = 4 / dtype.bytes();
        let word = locked.words(0)[index / per_word].load(Ordering::Relaxed);
        dtype.decode_at(&word.to_le_bytes(), index % per_word)
    };
    let positions: &[i32] = bytemuck::cast_slice(locked.bytes(2));
    let tables: &[f32] = bytemuck::cast_slice(locked.bytes(3));
    let places = |pair: usize| match spec.layout {
        RopeLayout::Interleaved => [2 * pair, 2 * pair + 1],
        RopeLayout::HalfSplit => [pair, half + pair],
    };
    let last = i64::from(args.max_position) - 1;

    pool.for_each(tokens.len(), |_, token| {
        let token = tokens.start as usize + token;
        let position = i64::from(positions[token]).clamp(0, last) as usize;
        let (cos, sin) = tables[position * dim..][..dim].split_at(half);
        let (mut row, mut lost) = ([0f32; MAX_DIM], Lost::default());
        for head in 0..spec.num_heads as usize {
            // All of a row is read before any of it is written.
            for pair in 0..half {
                let [a, b] = places(pair);
                let from = x_at.at(token, head);
                let turned = rotated([element(from + a), element(from + b)], cos[pair], sin[pair]);
                (row[a], row[b]) = (turned[0] * args.scale, turned[1] * args.scale);
            }
            if guard.is_some() {
                row[..dim].iter().for_each(|&x| bounds.note(&mut lost, x));
            }
            let to = y_at.at(token, head);
            store_elements(locked.words(1), output.bytes(), to, dim, |i| scaled_bits(output, row[i], scale));
        }
        if let Some(guard) = guard {
            lost.add_to(locked.words(4), guard.row);
        }
    });
}

fn rotated([x, y]: [f32; 2], cos: f32, sin: f32) -> [f32; 2] {
    if !(x.is_finite() && y.is_finite()) {
        return [f32::NAN; 2];
    }
    [x * cos - y * sin, y * cos + x * sin]
}
