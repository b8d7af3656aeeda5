//! The small ops on host memory.

use std::sync::atomic::Ordering;

use super::bind::{Pages, Rows};
use super::buffer::{Access, Buffer, bits_of, lock, store_elements};
use super::pool::Pool;
use crate::layer::{KvView, no_aliases};
use crate::ops::{AppendLayer, AppendSpec, MergeStates, MergeStatesSpec, check_copies};
use crate::{Dtype, Error, KvSpec, MlaShape, MlaSpec, Result};

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
    args: &MergeStates<'_, Buffer>,
) -> Result<()> {
    args.check(spec, Buffer::bytes)?;
    if args.num_tokens == 0 || args.num_heads == 0 {
        return Ok(());
    }
    let inputs = [
        ("prefix_output", args.prefix_output.buffer),
        ("prefix_lse", args.prefix_lse.buffer),
        ("suffix_output", args.suffix_output.buffer),
        ("suffix_lse", args.suffix_lse.buffer),
    ];
    let output_lse = args.output_lse.unwrap_or(args.output);
    no_aliases(
        &inputs,
        &[("output", args.output.buffer), ("output_lse", output_lse.buffer)],
        Buffer::same_as,
    )?;
    if args.output_lse.is_some() && output_lse.buffer.same_as(args.output.buffer) {
        return Err(Error::Aliased { a: "output", b: "output_lse" });
    }

    let [a, b, c, d] = inputs.map(|(_, buffer)| (buffer, Access::Read));
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
    layer: &AppendLayer<'_, Buffer>,
) -> Result<()> {
    let tokens = u32::try_from(slot_mapping.len()).map_err(|_| Error::Length {
        what: "slot_mapping",
        got: slot_mapping.len() as u64,
        want: u32::MAX.into(),
        cure: "append fewer tokens a call",
    })?;
    layer.check(spec, tokens, Buffer::bytes)?;
    let slots = spec.slots(slot_mapping)?;
    let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
    // Without a rotary part its buffer is unread, whatever it is.
    let k_pe = if rope == 0 { layer.kv_c } else { layer.k_pe };
    no_aliases(
        &[("kv_c", layer.kv_c.buffer), ("k_pe", k_pe.buffer)],
        &[("kv", layer.kv.buffer)],
        Buffer::same_as,
    )?;

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
pub(super) fn kv_copy_pages(
    kv: &KvSpec,
    row_elems: u32,
    copies: &[(u32, u32)],
    view: &KvView<'_, Buffer>,
) -> Result<()> {
    kv.check()?;
    if row_elems == 0 || !row_elems.is_multiple_of(4) {
        let cure = "must be kv_lora_rank + qk_rope_head_dim, a multiple of 4";
        return Err(Error::Shape { what: "row_elems", got: row_elems.into(), cure });
    }
    check_copies(kv, copies)?;
    // The view's check asks for the length of a row only.
    let shape = MlaShape { num_heads: 1, kv_lora_rank: row_elems, qk_rope_head_dim: 0 };
    view.check(&MlaSpec { shape, kv: *kv, query: Dtype::F32, out: Dtype::F32 }, view.buffer.bytes())?;

    let locked = lock([(view.buffer, Access::Write)]);
    let words = locked.words(0);
    let pages = Pages::of(view, kv.page_size, row_elems);
    let word = |page: u32| pages.at(page as usize, 0) * kv.dtype.bytes() / 4;
    let page_words = kv.page_size as usize * row_elems as usize * kv.dtype.bytes() / 4;
    for &(from, to) in copies {
        let (from, to) = (&words[word(from)..][..page_words], &words[word(to)..][..page_words]);
        for (from, to) in from.iter().zip(to) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
    Ok(())
}
