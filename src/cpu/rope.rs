//! The rotary ops on host memory.

use std::sync::atomic::Ordering;

use super::bind::Rows;
use super::buffer::{Access, Buffer, bits_of, lock, store_elements};
use super::ops::kv_append;
use super::pool::Pool;
use crate::Result;
use crate::layer::View;
use crate::ops::{AppendLayer, Rope, RopeAppend, RopeAppendSpec, RopeLayout, RopeSpec};

/// See [`crate::Backend::rope`].
pub(super) fn rope(pool: &Pool, spec: &RopeSpec, args: &Rope<&Buffer>) -> Result<()> {
    args.check(spec, Buffer::bytes)?;
    let in_place = args.is_in_place(spec, Buffer::same_as)?;
    let (dim, dtype) = (spec.rope_dim as usize, spec.dtype);
    let half = dim / 2;

    let x_access = if in_place { Access::Write } else { Access::Read };
    let locked = lock([
        (args.x.buffer, x_access),
        (args.y.buffer, Access::Write),
        (args.positions, Access::Read),
        (args.cos_sin, Access::Read),
    ]);
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

    pool.for_each(args.num_tokens as usize, |_, token| {
        let position = i64::from(positions[token]).clamp(0, last) as usize;
        let (cos, sin) = tables[position * dim..][..dim].split_at(half);
        let mut row = vec![0f32; dim];
        for head in 0..spec.num_heads as usize {
            // All of a row is read before any of it is written.
            for pair in 0..half {
                let [a, b] = places(pair);
                let from = x_at.at(token, head);
                let turned = rotated([element(from + a), element(from + b)], cos[pair], sin[pair]);
                (row[a], row[b]) = (turned[0], turned[1]);
            }
            let to = y_at.at(token, head);
            store_elements(locked.words(1), dtype.bytes(), to, dim, |i| bits_of(dtype, row[i]));
        }
    });
    Ok(())
}

fn rotated([x, y]: [f32; 2], cos: f32, sin: f32) -> [f32; 2] {
    if !(x.is_finite() && y.is_finite()) {
        return [f32::NAN; 2];
    }
    [x * cos - y * sin, y * cos + x * sin]
}

/// See [`crate::Backend::rope_append`].
pub(super) fn rope_append(
    pool: &Pool,
    spec: &RopeAppendSpec,
    slot_mapping: &[i64],
    args: &RopeAppend<&Buffer>,
) -> Result<()> {
    let tokens = spec.append.slots(slot_mapping)?.len() as u32;
    args.check(spec, tokens, Buffer::bytes)?;
    args.is_in_place(spec, tokens, Buffer::same_as)?;

    let (query, layer) = (spec.rope(), &args.layer);
    let key = RopeSpec { dtype: spec.append.input, num_heads: 1, ..query };
    let row_bytes = u64::from(key.rope_dim) * key.dtype.bytes() as u64;
    let keys = Buffer::new(u64::from(tokens) * row_bytes)?;
    let k_pe = View::dense(&keys, 1, key.rope_dim);
    let queries = args.rope(tokens);
    rope(pool, &query, &queries)?;
    rope(pool, &key, &Rope { x: layer.k_pe, y: k_pe, ..queries })?;
    let layer = AppendLayer { kv_c: layer.kv_c, k_pe, kv: layer.kv, k_scale: layer.k_scale };
    kv_append(pool, &spec.append, slot_mapping, &layer)
}
