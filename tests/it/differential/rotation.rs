//! Rotations by position, alone and with an append.

use wgpu_mla::{
    Backend, Dtype, KvAppend, KvAppendArgs, MlaDecode, Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch,
    RopeArgs, RopeLayout,
};

use super::cache_ops::{anything, line, slots, spec, stored};
use super::decode::FLOATS;
use super::decode::factor;
use super::draw::{Draw, bytes, nearest, value, values};
use super::judge::same;
use super::place::{Array, Cache, upload};
use super::reference::rotate;
use super::{Under, text};

const MAX_POSITION: usize = 64;

/// Cosines and sines of positions, as f32 holds them.
pub fn angles(rope: usize) -> Vec<f32> {
    let angle =
        |position: usize, pair: usize| position as f64 * 10_000f64.powf(-2.0 * pair as f64 / rope as f64);
    let row = |p| {
        (0..rope).map(move |i| if i < rope / 2 { angle(p, i).cos() } else { angle(p, i - rope / 2).sin() })
    };
    (0..MAX_POSITION).flat_map(row).map(|x| x as f32).collect()
}

/// A rotated row against the reference: f32's error of two products and a sum, and half of the dtype's last place.
pub fn judge_rotated(dtype: Dtype, scale: f64, x: &[f64], got: &[f64], want: &[f64]) -> Result<(), String> {
    let (rel, abs, most) = match dtype {
        Dtype::F16 => ((-11f64).exp2(), (-25f64).exp2(), 65520.0),
        Dtype::Bf16 => ((-8f64).exp2(), 1.2e-38, 3.39e38),
        _ => (0.0, 1.2e-38, f64::from(f32::MAX)),
    };
    let size = x.iter().filter(|x| x.is_finite()).fold(0.0f64, |size, x| size.max(x.abs())) * scale;
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let allowed = 2.0 * size * (-22f64).exp2() + want.abs() * rel * 1.001 + abs;
        let is_fine = if !want.is_finite() {
            // A pair with an infinity becomes two NaN, whatever its angle.
            got.is_nan()
        } else if want.abs() > most * 0.999 {
            got.abs() >= most * 0.99 && (got > 0.0) == (want > 0.0)
        } else {
            (got - want).abs() <= allowed
        };
        if !is_fine {
            return Err(format!("[{i}] expected {want:e} got {got:e} tolerance {allowed:.1e}"));
        }
    }
    Ok(())
}

/// Rows before a rotation: usual ones, and some that are large, tiny or not finite.
fn unrotated(draw: &mut Draw, dtype: Dtype, count: usize) -> Vec<u8> {
    let one = |draw: &mut Draw| match draw.below(200) {
        0 => draw.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]),
        1 => 3e4 * draw.unit(),
        2 => 1e-7,
        _ => draw.normal(),
    };
    bytes(dtype, (0..count).map(|_| one(draw)).collect::<Vec<_>>())
}

/// A rotated row by the reference; pairs that are not finite are NaN.
fn rotated(x: &[f64], cos_sin: &[f64], layout: RopeLayout, scale: f32) -> Vec<f64> {
    let turned = rotate(x, cos_sin, layout == RopeLayout::Interleaved);
    turned.into_iter().map(|x| x * f64::from(scale)).collect()
}

/// A rotation alone, in place or not; then of queries and keys with an append.
pub fn ropes<B: Backend>(under: &Under<'_, B>, spec_draw: &mut Draw, draw: &mut Draw) -> Result<(), String> {
    let layout = spec_draw.pick(&[RopeLayout::Interleaved, RopeLayout::HalfSplit]);
    let (mut mla, query) = (spec(spec_draw, draw), spec_draw.pick(&FLOATS));
    if mla.shape.qk_rope_head_dim == 0 {
        mla.shape.qk_rope_head_dim = 64;
    }
    let MlaDecode { shape, kv, query: input, .. } = mla;
    let (backend, rope) = (under.backend, shape.qk_rope_head_dim as usize);
    let (heads, tokens) = (draw.within(1, 12), draw.within(1, 9));
    let scale = draw.pick(&[1.0f32, 1.0, 0.015_625, 0.7]);
    let cos_sin = angles(rope);
    let table: Vec<f64> = cos_sin.iter().map(|&x| x.into()).collect();
    let table_buffer = upload(backend, &bytes(Dtype::F32, table.iter().copied()))?;
    let positions: Vec<i32> = (0..tokens).map(|_| draw.below(MAX_POSITION) as i32).collect();
    let words: Vec<u8> = positions.iter().flat_map(|position| position.to_le_bytes()).collect();
    let positions_buffer = upload(backend, &words)?;
    let told =
        format!("{query} queries of {heads} heads, scale {scale}, {} {layout:?} {tokens} tokens", line(&mla));

    let x_at = Array::draw(draw, [tokens, heads, rope], query.bytes(), 4);
    let x = unrotated(draw, query, tokens * heads * rope);
    let x_buffer = x_at.upload(backend, &x)?;
    let y_at = Array::draw(draw, [tokens, heads, rope], query.bytes(), 4);
    let apart = y_at.nothing(backend)?;
    let in_place = draw.once_in(2);
    let (to_at, to) = if in_place { (&x_at, &x_buffer) } else { (&y_at, &apart) };
    let angles_of = |token: usize| &table[positions[token] as usize * rope..][..rope];
    let judge_queries = |what: &str| -> Result<(), String> {
        let (got, x) = (values(query, &to_at.read(what, backend, to)?), values(query, &x));
        for (at, (got, x)) in got.chunks(rope).zip(x.chunks(rope)).enumerate() {
            let want = rotated(x, angles_of(at / heads), layout, scale);
            judge_rotated(query, scale.into(), x, got, &want)
                .map_err(|error| format!("{what}[{}, {}]{error}", at / heads, at % heads))?;
        }
        Ok(())
    };
    if draw.once_in(3) {
        let op = Rope { dtype: query, num_heads: heads as u32, rope_dim: rope as u32, layout };
        let args = RopeArgs {
            x: x_at.view(&x_buffer),
            y: to_at.view(to),
            positions: &positions_buffer,
            cos_sin: &table_buffer,
            max_position: MAX_POSITION as u32,
            scale,
        };
        let ran = backend.once(op, 0..tokens as u32, &args).map_err(text);
        ran.and_then(|()| judge_queries("y")).map_err(|error| format!("rope of {told}: {error}"))?;
        under.count("rope");
        return Ok(());
    }

    let (latent, row, elem) = (shape.kv_lora_rank as usize, shape.row_elems() as usize, input.bytes());
    let cache = kv.dtype();
    let k_scale = if cache == Dtype::E4m3 { factor(draw, 0.02) } else { 1.0 };
    let slots = slots(draw, &kv, tokens);
    let (kv_c, k_pe) = (anything(draw, input, tokens * latent), unrotated(draw, input, tokens * rope));
    let at = [latent, rope].map(|dim| Array::draw(draw, [tokens, 1, dim], elem, 4));
    let [kv_c_buffer, k_pe_buffer] = [at[0].upload(backend, &kv_c)?, at[1].upload(backend, &k_pe)?];
    let mut want = anything(draw, cache, kv.num_slots() as usize * row);
    let place = Cache::draw(draw, &kv, row, draw.clone().once_in(3));
    let buffers = place.upload(backend, &want)?;
    let layer = KvAppendArgs {
        kv_c: at[0].view(&kv_c_buffer),
        k_pe: at[1].view(&k_pe_buffer),
        kv: place.view(&mla, &buffers)?,
        k_scale,
        guard: None,
    };
    let args = RopeAppendArgs {
        q_pe: x_at.view(&x_buffer),
        q_pe_out: to_at.view(to),
        layer,
        positions: &positions_buffer,
        cos_sin: &table_buffer,
        max_position: MAX_POSITION as u32,
        q_pe_scale: scale,
        q_scale: 1.0,
    };
    let append = KvAppend { shape, kv, input, guard: false };
    let op = RopeAppend { append, query, query_out: query, num_heads: heads as u32, layout };
    let positions_too = draw.once_in(2).then_some(&positions[..]);
    let batch = RopeAppendBatch { slot_mapping: &slots, positions: positions_too };
    let check = || -> Result<(), String> {
        backend.once(op, batch, &args).map_err(text)?;
        judge_queries("q_pe_out")?;
        let pool = place.read(backend, &buffers)?;
        let codes = cache.bytes();
        for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let first = slot as usize * row;
            for i in 0..latent {
                let element = stored(input, cache, k_scale, &kv_c[(token * latent + i) * elem..][..elem]);
                want[(first + i) * codes..][..codes].copy_from_slice(&element);
            }
            // The key is rounded to its input's dtype, then to the cache's: both of its neighbours are right.
            let tail = (first + latent) * codes..(first + row) * codes;
            let key = values(input, &k_pe[token * rope * elem..][..rope * elem]);
            let turned = rotated(&key, angles_of(token), layout, 1.0);
            judge_key((input, cache, k_scale), &key, &values(cache, &pool[tail.clone()]), &turned)
                .map_err(|error| format!("k_pe of token {token}{error}"))?;
            want[tail.clone()].copy_from_slice(&pool[tail]);
        }
        same("cache", cache, row, &pool, &want)
    };
    let mut check = check;
    check().map_err(|error| format!("{told} k_scale {k_scale} slabs {:?}: {error}", place.slab_pages()))?;
    under.count("rope_append");
    Ok(())
}

/// A stored rotary key lies between what the ends of the rotation's tolerance are stored as.
fn judge_key(
    (input, cache, k_scale): (Dtype, Dtype, f32),
    x: &[f64],
    got: &[f64],
    want: &[f64],
) -> Result<(), String> {
    let size = x.iter().filter(|x| x.is_finite()).fold(0.0f64, |size, x| size.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = 2.0 * size * (-22f64).exp2();
        let store = |x: f64| {
            let rounded = value(input, nearest(input, x));
            value(cache, nearest(cache, rounded / f64::from(k_scale)))
        };
        let (low, high) = (store(want - error), store(want + error));
        let is_fine = if want.is_finite() { low <= got && got <= high } else { got.is_nan() };
        if !is_fine {
            return Err(format!("[{i}] expected {low:e} to {high:e} got {got:e} tolerance {error:.1e}"));
        }
    }
    Ok(())
}
