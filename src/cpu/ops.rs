//! The small ops on host memory.

mod kv_calibrate;
mod kv_gather;
mod merge_states;

pub(super) use kv_calibrate::kv_calibrate;
pub(super) use kv_gather::kv_gather;
pub(super) use merge_states::merge_states;

use std::sync::atomic::Ordering;

use super::bind::{Pages, Rows};
use super::buffer::{Access, Buffer, bits_of, lock, store_elements};
use super::pool::Pool;
use crate::layer::KvView;
use crate::ops::{AppendLayer, AppendSpec, CopySpec, MergeStates, MergeStatesSpec, check_copies};
use crate::{Dtype, Result};

/// The element at `index` as it stands, in the low end of a word.
fn raw(bytes: &[u8], element_bytes: usize, index: usize) -> u32 {
    let mut word = [0; 4];
    word[..element_bytes].copy_from_slice(&bytes[index * element_bytes..][..element_bytes]);
    u32::from_le_bytes(word)
}

/// See [`crate::Backend::merge_attn_states`].
pub(super) fn merge_attn_states(
    pool: &Pool,
    spec: &MergeStatesSpec,
    args: &MergeStates<&Buffer>,
) -> Result<()> {
    args.check(spec, Buffer::bytes)?;
    if args.num_tokens == 0 || args.num_heads == 0 {
        return Ok(());
    }
    args.check_aliases(Buffer::same_as)?;
    let output_lse = args.output_lse.unwrap_or(args.output);

    let inputs = [args.prefix_output, args.prefix_lse, args.suffix_output, args.suffix_lse];
    let [a, b, c, d] = inputs.map(|view| (view.buffer, Access::Read));
    let locked = lock([a, b, c, d, (args.output.buffer, Access::Write), (output_lse.buffer, Access::Write)]);
    let outputs =
        [(locked.bytes(0), Rows::of(&args.prefix_output)), (locked.bytes(2), Rows::of(&args.suffix_output))];
    let lses = [(locked.bytes(1), Rows::of(&args.prefix_lse)), (locked.bytes(3), Rows::of(&args.suffix_lse))];
    let (output_at, output_lse_at) = (Rows::of(&args.output), Rows::of(&output_lse));
    let (dim, bytes) = (spec.head_size as usize, spec.dtype.bytes());

    pool.for_each(args.num_tokens as usize, |_, token| {
        for head in 0..args.num_heads as usize {
            let [prefix, suffix] = lses.map(|(lse, at)| Dtype::F32.decode_at(lse, at.at(token, head)));
            let rows = outputs.map(|(out, at)| (out, at.at(token, head)));
            let store = |bits: &dyn Fn(usize) -> u32| {
                store_elements(locked.words(4), bytes, output_at.at(token, head), dim, bits);
            };
            let copy = |(from, at): (&[u8], usize)| store(&|i| raw(from, bytes, at + i));
            let lse = match (prefix.is_finite(), suffix.is_finite()) {
                (true, true) => {
                    let (lse, weights) = pair_weights(prefix, suffix);
                    store(&|i| {
                        let [x, y] = rows.map(|(from, at)| spec.dtype.decode_at(from, at + i));
                        bits_of(spec.dtype, x * weights[0] + y * weights[1])
                    });
                    lse
                }
                (true, false) => {
                    copy(rows[0]);
                    prefix
                }
                (false, true) => {
                    copy(rows[1]);
                    suffix
                }
                (false, false) => {
                    store(&|_| 0);
                    f32::NEG_INFINITY
                }
            };
            if args.output_lse.is_some() {
                locked.words(5)[output_lse_at.at(token, head)].store(lse.to_bits(), Ordering::Relaxed);
            }
        }
    });
    Ok(())
}

/// The LSE of two and the share of each.
fn pair_weights(prefix: f32, suffix: f32) -> (f32, [f32; 2]) {
    let both = [f64::from(prefix), f64::from(suffix)];
    let max = both[0].max(both[1]);
    let weights = both.map(|lse| (lse - max).exp());
    let sum = weights[0] + weights[1];
    ((max + sum.ln()) as f32, weights.map(|weight| (weight / sum) as f32))
}

/// See [`crate::Backend::kv_append`].
pub(super) fn kv_append(
    pool: &Pool,
    spec: &AppendSpec,
    slot_mapping: &[i64],
    layer: &AppendLayer<&Buffer>,
) -> Result<()> {
    let slots = spec.slots(slot_mapping)?;
    layer.check(spec, slots.len() as u32, Buffer::bytes)?;
    layer.check_aliases(spec, Buffer::same_as)?;
    let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
    let k_pe = layer.rotary(spec);

    let (read, write) = (Access::Read, Access::Write);
    let locked = lock([(layer.kv_c.buffer, read), (k_pe.buffer, read), (layer.kv.buffer, write)]);
    let pages = Pages::of(&layer.kv, spec.kv.page_size, spec.shape.row_elems());
    let parts = [
        (locked.bytes(0), Rows::of(&layer.kv_c), 0, latent),
        (locked.bytes(1), Rows::of(&k_pe), latent, rope),
    ];
    let (input, cache) = (spec.input, spec.kv.dtype);
    pool.for_each(slots.len(), |_, token| {
        if slots[token] == u32::MAX {
            return;
        }
        let row = pages.slot(slots[token] as usize);
        for (from, rows, column, dim) in parts {
            let at = rows.at(token, 0);
            if input == cache {
                // Rows begin and end on multiples of 4 elements, so they are whole words.
                let words = |elements: usize| elements * cache.bytes() / 4;
                let bits = |i: usize| raw(from, 4, words(at) + i);
                store_elements(locked.words(2), 4, words(row + column), words(dim), bits);
                continue;
            }
            let bits = |i: usize| match cache {
                Dtype::E4m3 => bits_of(cache, input.decode_at(from, at + i) / layer.k_scale),
                _ => bits_of(cache, input.decode_at(from, at + i)),
            };
            store_elements(locked.words(2), cache.bytes(), row + column, dim, bits);
        }
    });
    Ok(())
}

/// See [`crate::Backend::kv_copy_pages`].
pub(super) fn kv_copy_pages(spec: &CopySpec, copies: &[(u32, u32)], view: &KvView<&Buffer>) -> Result<()> {
    spec.check()?;
    check_copies(&spec.kv, copies)?;
    spec.check_view(view, view.buffer.bytes())?;

    let locked = lock([(view.buffer, Access::Write)]);
    let words = locked.words(0);
    let pages = Pages::of(view, spec.kv.page_size, spec.row_elems);
    let word = |page: u32| pages.at(page as usize, 0) * spec.kv.dtype.bytes() / 4;
    let page_words = spec.page_bytes() as usize / 4;
    for &(from, to) in copies {
        let (from, to) = (&words[word(from)..][..page_words], &words[word(to)..][..page_words]);
        for (from, to) in from.iter().zip(to) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
    Ok(())
}
