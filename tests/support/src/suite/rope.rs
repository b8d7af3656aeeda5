//! The rotary ops: `rope` against the oracle, `rope_append` against the three ops that it replaces.

use crate::reference::{Rotation, e4m3_codes, rope};
use wgpu_mla::{
    Backend, Dtype, Error, KvAppend, KvAppendArgs, KvSpec, MlaShape, Rope, RopeAppend, RopeAppendArgs,
    RopeAppendBatch, RopeArgs, RopeFrequencies, RopeLayout, View, Yarn,
};

use super::Session;
use super::memory::{Pages, Strides, download, gather, page_dims, scatter, stored_elems, upload};
use super::ops::random_append;
use super::run::Layout;
use crate::case::AppendCase;
use crate::paint::{POISON, Rng};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const LAYOUTS: [RopeLayout; 2] = [RopeLayout::Interleaved, RopeLayout::HalfSplit];
const MAX_POSITION: u32 = 4999;

fn text(error: Error) -> String {
    error.to_string()
}

/// Where the output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Apart,
    /// The same view.
    Same,
    /// Behind the input, in its buffer.
    Behind,
}

/// Every dtype and pairing, dense and strided, in place and not, positions in and out of the table.
pub fn rotations<B: Backend>(session: &Session<'_, B>) {
    let shapes = [(9, 3, 64), (7, 1, 32), (1, 16, 64), (5, 4, 8)];
    for (turn, dtype) in DTYPES.into_iter().enumerate() {
        for (half, layout) in LAYOUTS.into_iter().enumerate() {
            // Compiling takes most of the time: two shapes for each.
            for i in [0, 1] {
                let (tokens, heads, rope_dim) = shapes[(turn + half + 2 * i) % shapes.len()];
                let spec = Rope { dtype, num_heads: heads, rope_dim, layout };
                for strides in [Layout::Dense, Layout::Gaps, Layout::HeadMajor] {
                    for place in [Place::Apart, Place::Same, Place::Behind] {
                        let result = check_rotation(session.backend, &spec, tokens, strides, place);
                        session.note(&format!("{spec:?}, {tokens} tokens, {strides:?}, {place:?}"), result);
                    }
                }
            }
        }
    }
    session.finish("rotations");
}

/// Cosines and sines of a YaRN with an attention factor of its own.
pub fn table(rope_dim: u32) -> Vec<f32> {
    let yarn = Yarn { mscale: 1.0, mscale_all_dim: 0.5, ..Yarn::new(40.0, 4096.0) };
    let frequencies = RopeFrequencies::yarn(rope_dim, 1e4, &yarn).expect("frequencies");
    frequencies.cos_sin(MAX_POSITION).expect("a table")
}

/// In the table, at its ends, and far outside.
pub fn positions(rng: &mut Rng, tokens: usize) -> Vec<i32> {
    let last = MAX_POSITION as i32 - 1;
    let some = [0, last, last + 1, -1, i32::MAX, i32::MIN, 1];
    let mut any = |_| (rng.next() % u64::from(MAX_POSITION)) as i32;
    (0..tokens).map(|i| if i % 2 == 1 { some[i / 2 % some.len()] } else { any(i) }).collect()
}

fn words(positions: &[i32]) -> Vec<u8> {
    positions.iter().flat_map(|position| position.to_le_bytes()).collect()
}

/// Usual values, the ends of the dtype's range, and some that are not finite.
pub fn rows(rng: &mut Rng, dtype: Dtype, elements: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for i in 0..elements {
        let x = match i % 37 {
            5 => 300.0 * rng.randn(),
            11 => 1e-4 * rng.randn(),
            17 if dtype == Dtype::F16 => 65504.0,
            17 => 1e5 * rng.randn(),
            23 => 6e-8,
            _ => rng.randn(),
        };
        dtype.encode(x, &mut bytes);
        if i % 97 == 96 {
            let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i / 97 % 3];
            bytes.truncate(i * dtype.bytes());
            dtype.encode(odd, &mut bytes);
        }
    }
    bytes
}

/// Rotates random rows and compares each with the oracle.
pub fn check_rotation<B: Backend>(
    backend: &B,
    spec: &Rope,
    tokens: usize,
    layout: Layout,
    place: Place,
) -> Result<(), String> {
    let Rope { dtype, num_heads, rope_dim, .. } = *spec;
    let (heads, elem) = (num_heads as usize, dtype.bytes());
    let dims = [tokens, heads, rope_dim as usize];
    let mut rng = Rng(tokens as u64 * 131 + u64::from(rope_dim) + elem as u64);
    let x = rows(&mut rng, dtype, dims.iter().product());
    let (positions, cos_sin) = (positions(&mut rng, tokens), table(rope_dim));

    let x_strides = layout.strides(dims, 4);
    // Strides are never inferred from each other.
    let other = if layout == Layout::Gaps { Layout::HeadMajor } else { layout };
    let mut y_strides = other.strides(dims, 4);
    if place == Place::Same {
        y_strides = x_strides;
    }
    let mut bytes = scatter(&x, dims, elem, x_strides);
    if place == Place::Behind {
        y_strides.offset += x_strides.end(dims).next_multiple_of(4);
        bytes.resize(y_strides.end(dims) * elem, POISON);
    }
    let x_buffer = upload(backend, &bytes).map_err(text)?;
    let y_len = y_strides.end(dims) * elem;
    let apart = upload(backend, &vec![POISON; y_len]).map_err(text)?;
    let y_buffer = if place == Place::Apart { &apart } else { &x_buffer };
    let angles = upload(backend, &Dtype::F32.encode_all(&cos_sin)).map_err(text)?;
    let places = upload(backend, &words(&positions)).map_err(text)?;
    let args = RopeArgs {
        x: x_strides.view(&x_buffer),
        y: y_strides.view(y_buffer),
        positions: &places,
        cos_sin: &angles,
        max_position: MAX_POSITION,
        scale: 1.0,
    };
    backend.once(*spec, 0..tokens as u32, &args).map_err(text)?;

    let mut got = download(backend, y_buffer, y_len).map_err(text)?;
    if place == Place::Behind {
        let input = x_strides.end(dims) * elem;
        if got[..input] != bytes[..input] {
            return Err("the input was written".to_owned());
        }
        got[..input].fill(POISON);
    }
    let (y, intact) = gather(&got, dims, elem, y_strides);
    intact?;
    let decoded = dtype.decode_all(&x);
    let want = rope(&Rotation {
        x: &decoded,
        positions: &positions,
        cos_sin: &cos_sin,
        num_heads: heads,
        rope_dim: rope_dim as usize,
        layout: spec.layout,
    });
    compare(dtype, spec, &decoded, &dtype.decode_all(&y), &want)
}

/// f32's error of two products and their sum, and half a unit in the last place of the dtype.
fn compare(dtype: Dtype, spec: &Rope, x: &[f32], got: &[f32], want: &[f64]) -> Result<(), String> {
    let dim = spec.rope_dim as usize;
    let (rel, abs, max) = match dtype {
        Dtype::F16 => ((-11f64).exp2(), (-25f64).exp2(), 65520.0),
        Dtype::Bf16 => ((-8f64).exp2(), 1.2e-38, 3.39e38),
        // A device may flush subnormals.
        _ => (0.0, 1.2e-38, f64::from(f32::MAX)),
    };
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let (row, column) = (i / dim * dim, i % dim);
        let other = match spec.layout {
            RopeLayout::Interleaved => column ^ 1,
            RopeLayout::HalfSplit => (column + dim / 2) % dim,
        };
        let size = f64::from(x[i]).abs() + f64::from(x[row + other]).abs();
        let error = (f64::from(got) - want).abs();
        let allowed = size * (-22f64).exp2() + want.abs() * rel * 1.001 + abs;
        let fine = if want.is_nan() {
            got.is_nan()
        } else if want.abs() > max {
            f64::from(got).abs() >= max && (f64::from(got) > 0.0) == (want > 0.0)
        } else {
            error <= allowed
        };
        if !fine {
            return Err(format!("[{i}] is {got:e}, expected {want:e}: off by {error:.2e} of {allowed:.2e}"));
        }
    }
    Ok(())
}

/// Every input dtype into every cache dtype: the bits of `rope`, `rope` and `kv_append`.
pub fn rotated_appends<B: Backend>(session: &Session<'_, B>) {
    let mut turn = 0;
    for input in DTYPES {
        for cache in Dtype::ALL {
            let dims = [(512, 64), (256, 32), (256, 64)][turn % 3];
            let page_size = [16, 3, 1, 64][turn % 4];
            let query = DTYPES[(turn + turn / 4) % 3];
            let (layout, heads) = (LAYOUTS[turn % 2], [16, 3, 1, 20][turn / 2 % 4]);
            let place = [Place::Same, Place::Apart][turn / 2 % 2];
            turn += 1;
            let k_scale = if cache == Dtype::E4m3 { [0.25, 0.37][turn % 2] } else { 1.0 };
            let case = random_append(dims, page_size, input, cache, k_scale);
            let spec = RopeAppend { append: case.spec, query, query_out: query, num_heads: heads, layout };
            for gaps in [false, true] {
                let result = check_rotated_append(session.backend, &spec, &case, place, gaps);
                session.note(&format!("{spec:?}, k_scale {k_scale}, {place:?}, gaps {gaps}"), result);
            }
        }
    }
    session.finish("rotated appends");
}

/// Queries that end in codes, over caches that have codes and that have none: the codes of `rope` in f32.
pub fn rotated_codes<B: Backend>(session: &Session<'_, B>) {
    for (turn, (query, cache)) in
        [(Dtype::Bf16, Dtype::E4m3), (Dtype::F32, Dtype::F16), (Dtype::F16, Dtype::Bf16)]
            .into_iter()
            .enumerate()
    {
        let k_scale = if cache == Dtype::E4m3 { 0.37 } else { 1.0 };
        let case = random_append((256, 32), [16, 3, 64][turn], query, cache, k_scale);
        let layout = LAYOUTS[turn % 2];
        let spec = RopeAppend {
            append: case.spec,
            query,
            query_out: Dtype::E4m3,
            num_heads: [3, 16, 1][turn],
            layout,
        };
        for gaps in [false, true] {
            let result = check_rotated_append(session.backend, &spec, &case, Place::Apart, gaps);
            session.note(&format!("{spec:?}, gaps {gaps}"), result);
        }
    }
    session.finish("rotated codes");
}

/// The scale of codes. Some rotated elements saturate, others are subnormal codes.
const Q_SCALE: f32 = 0.037;

/// Runs the fused op and the three that it replaces, and compares every byte. Codes are made of the result of `rope` in f32.
pub fn check_rotated_append<B: Backend>(
    backend: &B,
    spec: &RopeAppend,
    case: &AppendCase,
    place: Place,
    gaps: bool,
) -> Result<(), String> {
    let KvAppend { shape, kv, input, .. } = case.spec;
    let (row, rope_dim) = (stored_elems(&kv, &shape), shape.qk_rope_head_dim);
    let (tokens, heads) = (case.slot_mapping.len(), spec.num_heads as usize);
    let mut rng = Rng(77);
    let layout = if gaps { Layout::Gaps } else { Layout::Dense };
    let array = |bytes: &[u8], heads: usize, dim: u32, dtype: Dtype| -> Result<_, String> {
        let dims = [tokens, heads, dim as usize];
        let strides = layout.strides(dims, 4);
        let bytes = scatter(bytes, dims, dtype.bytes(), strides);
        Ok((upload(backend, &bytes).map_err(text)?, strides, bytes.len()))
    };
    let queries = rows(&mut rng, spec.query, tokens * heads * rope_dim as usize);
    let (places, angles) = (positions(&mut rng, tokens), table(rope_dim));
    // Positions from the host or from the device; the array that is then unread holds other positions.
    let known: Vec<i32> = places.iter().map(|&place| place.clamp(0, MAX_POSITION as i32 - 1)).collect();
    let unread = upload(backend, &words(&vec![1; tokens])).map_err(text)?;
    let places = upload(backend, &words(&places)).map_err(text)?;
    let angles = upload(backend, &Dtype::F32.encode_all(&angles)).map_err(text)?;
    let (kv_c, kv_c_strides, _) = array(&case.kv_c, 1, shape.kv_lora_rank, input)?;
    let (k_pe, k_pe_strides, k_pe_len) = array(&case.k_pe, 1, rope_dim, input)?;
    let pages = if gaps { Pages::gaps(&kv, row) } else { Pages::dense(&kv, row) };
    let before = scatter(&case.kv_cache_before, page_dims(&kv, row), kv.dtype().bytes(), pages.strides());

    let run = |fused: bool| -> Result<[Vec<u8>; 2], String> {
        let is_coded = spec.query_out != spec.query;
        // Codes are those of a rotation in f32.
        let dtype = if is_coded && !fused { Dtype::F32 } else { spec.query };
        let queries = dtype.encode_all(&spec.query.decode_all(&queries));
        let (q, q_strides, q_len) = array(&queries, heads, rope_dim, dtype)?;
        let other = upload(backend, &vec![POISON; q_len]).map_err(text)?;
        let q_out = if place == Place::Same { &q } else { &other };
        let cache = upload(backend, &before).map_err(text)?;
        let turned = upload(backend, &vec![POISON; k_pe_len]).map_err(text)?;
        let layer = |k_pe| KvAppendArgs {
            kv_c: kv_c_strides.view(&kv_c),
            k_pe,
            kv: pages.view(&cache),
            k_scale: case.k_scale,
            guard: None,
        };
        if fused {
            let args = RopeAppendArgs {
                q_pe: q_strides.view(&q),
                q_pe_out: q_strides.view(q_out),
                layer: layer(k_pe_strides.view(&k_pe)),
                positions: if gaps { &unread } else { &places },
                cos_sin: &angles,
                max_position: MAX_POSITION,
                q_pe_scale: 1.0,
                q_scale: if is_coded { Q_SCALE } else { 1.0 },
            };
            let batch =
                RopeAppendBatch { slot_mapping: &case.slot_mapping, positions: gaps.then_some(&known[..]) };
            backend.once(*spec, batch, &args).map_err(text)?;
        } else {
            let queries = RopeArgs {
                x: q_strides.view(&q),
                y: q_strides.view(q_out),
                positions: &places,
                cos_sin: &angles,
                max_position: MAX_POSITION,
                scale: 1.0,
            };
            let keys = RopeArgs { x: k_pe_strides.view(&k_pe), y: k_pe_strides.view(&turned), ..queries };
            let query = Rope { dtype, num_heads: spec.num_heads, rope_dim, layout: spec.layout };
            let key = Rope { dtype: input, num_heads: 1, ..query };
            backend.once(query, 0..tokens as u32, &queries).map_err(text)?;
            backend.once(key, 0..tokens as u32, &keys).map_err(text)?;
            let layer = layer(k_pe_strides.view(&turned));
            backend.once(case.spec, &case.slot_mapping, &layer).map_err(text)?;
        }
        let downloaded = |buffer, len| download(backend, buffer, len).map_err(text);
        let cache = downloaded(&cache, before.len())?;
        if !is_coded {
            return Ok([downloaded(q_out, q_len)?, cache]);
        }
        let (dims, bytes) = ([tokens, heads, rope_dim as usize], if fused { 1 } else { 4 });
        let (dense, intact) =
            gather(&downloaded(q_out, q_strides.end(dims) * bytes)?, dims, bytes, q_strides);
        intact?;
        let codes = if fused { dense } else { e4m3_codes(&Dtype::F32.decode_all(&dense), Q_SCALE) };
        Ok([codes, cache])
    };
    let (got, want) = (run(true)?, run(false)?);
    for (what, got, want) in [("q_pe_out", &got[0], &want[0]), ("the cache", &got[1], &want[1])] {
        if let Some(at) = got.iter().zip(want).position(|(a, b)| a != b) {
            return Err(format!("{what}: byte {at} is {:#x}, of three ops {:#x}", got[at], want[at]));
        }
    }
    if got[1][..before.len()] == before[..] {
        return Err("nothing was appended".to_owned());
    }
    Ok(())
}

/// What both ops must refuse before a kernel sees it.
pub fn refuses_rotations<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let refuses = |what: &str, result: Result<(), Error>, why: &str| {
            let checked = match result {
                Ok(()) => Err("was accepted".to_owned()),
                Err(error) if error.to_string().contains(why) => Ok(()),
                Err(error) => Err(format!("{error:?} does not name {why:?}")),
            };
            session.note(what, checked);
        };
        // 3 tokens of 2 heads of 8, 5 positions.
        let spec = Rope { dtype: Dtype::F32, num_heads: 2, rope_dim: 8, layout: RopeLayout::HalfSplit };
        let [x, y, places, angles] =
            [3 * 2 * 8 * 4, 2 * 3 * 2 * 8 * 4, 3 * 4, 5 * 8 * 4].map(|n| backend.buffer(n));
        let (x, y, places, angles) = (x?, y?, places?, angles?);
        let good = RopeArgs {
            x: View::dense(&x, 2, 8),
            y: View::dense(&y, 2, 8),
            positions: &places,
            cos_sin: &angles,
            max_position: 5,
            scale: 1.0,
        };
        session.note("a good rotation", backend.once(spec, 0..3, &good).map_err(text));
        session.note("no token", backend.once(spec, 0..0, &good).map_err(text));
        refuses("too many tokens", backend.once(spec, 0..4, &good), "x");
        for (token_stride, head_stride) in [(0, 8), (16, 0), (16, 4), (8, 8)] {
            let x = View { token_stride, head_stride, ..good.x };
            let rotated = backend.once(spec, 0..3, &RopeArgs { x, ..good });
            refuses("one row for several", rotated, "x ");
        }
        for (wrong, why) in [
            (Rope { dtype: Dtype::E4m3, ..spec }, "e4m3"),
            (Rope { num_heads: 0, ..spec }, "num_heads"),
            (Rope { rope_dim: 12, ..spec }, "qk_rope_head_dim"),
            (Rope { rope_dim: 0, ..spec }, "qk_rope_head_dim"),
        ] {
            refuses(&format!("{wrong:?}"), backend.once(wrong, 0..3, &good), why);
        }
        for (what, args, why) in [
            ("an input past its buffer", RopeArgs { x: View { offset: 4, ..good.x }, ..good }, "x"),
            ("an output past its buffer", RopeArgs { y: View { offset: 52, ..good.y }, ..good }, "y"),
            ("a misaligned input", RopeArgs { x: View { token_stride: 18, ..good.x }, ..good }, "x 18"),
            ("a misaligned output", RopeArgs { y: View { offset: 2, ..good.y }, ..good }, "y 2"),
            ("rows that overlap", RopeArgs { y: View { head_stride: 4, ..good.y }, ..good }, "y"),
            (
                "a stride that overflows",
                RopeArgs { x: View { token_stride: u64::MAX / 4 * 4, ..good.x }, ..good },
                "x",
            ),
            ("no table", RopeArgs { max_position: 0, ..good }, "max_position"),
            ("a table past its buffer", RopeArgs { max_position: 6, ..good }, "cos_sin"),
            (
                "positions past their buffer",
                RopeArgs { positions: &angles, cos_sin: &places, ..good },
                "cos_sin",
            ),
            ("an output that is read", RopeArgs { cos_sin: &y, ..good }, "cos_sin"),
            ("positions that are written", RopeArgs { positions: &y, ..good }, "positions"),
            (
                "rows that others read",
                RopeArgs { x: View { offset: 16, ..View::dense(&y, 2, 8) }, ..good },
                "x and y",
            ),
            (
                "in place with other strides",
                RopeArgs { x: View { token_stride: 8, head_stride: 24, ..View::dense(&y, 2, 8) }, ..good },
                "x and y",
            ),
        ] {
            refuses(what, backend.once(spec, 0..3, &args), why);
        }

        let kv = KvSpec { layout: Dtype::Bf16.into(), page_size: 4, num_pages: 2 };
        let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let append = KvAppend { shape, kv, input: Dtype::F32, guard: false };
        let layout = RopeLayout::Interleaved;
        let spec = RopeAppend { append, query: Dtype::F16, query_out: Dtype::F16, num_heads: 2, layout };
        let [q, rows, cache, places, angles] =
            [2 * 2 * 32 * 2, 2 * 288 * 4, 8 * 288 * 2, 2 * 4, 5 * 32 * 4].map(|n| backend.buffer(n));
        let (q, rows, cache, places, angles) = (q?, rows?, cache?, places?, angles?);
        let layer = || KvAppendArgs {
            kv_c: Strides::dense(1, 256).view(&rows),
            k_pe: Strides { offset: 512, ..Strides::dense(1, 32) }.view(&rows),
            kv: Pages::dense(&kv, 288).view(&cache),
            k_scale: 1.0,
            guard: None,
        };
        let good = || RopeAppendArgs {
            q_pe: View::dense(&q, 2, 32),
            q_pe_out: View::dense(&q, 2, 32),
            layer: layer(),
            positions: &places,
            cos_sin: &angles,
            max_position: 5,
            q_pe_scale: 1.0,
            q_scale: 1.0,
        };
        session.note(
            "a good append",
            backend.once(spec, RopeAppendBatch::slots(&[0, -1]), &good()).map_err(text),
        );
        session.note(
            "nothing to append",
            backend.once(spec, RopeAppendBatch::slots(&[]), &good()).map_err(text),
        );
        refuses("slot 8 of 8", backend.once(spec, RopeAppendBatch::slots(&[0, 8]), &good()), "8");
        refuses("a slot twice", backend.once(spec, RopeAppendBatch::slots(&[7, 7]), &good()), "7");
        refuses("too many tokens", backend.once(spec, RopeAppendBatch::slots(&[0, 1, 2]), &good()), "kv_c");
        for (positions, why) in [(&[0][..], "positions"), (&[0, -1], "negative"), (&[0, 5], "max_position")] {
            let batch = RopeAppendBatch { slot_mapping: &[0, 1], positions: Some(positions) };
            refuses(&format!("positions {positions:?}"), backend.once(spec, batch, &good()), why);
        }
        let no_rope = MlaShape { qk_rope_head_dim: 0, kv_lora_rank: 512, ..shape };
        for (wrong, why) in [
            (RopeAppend { query: Dtype::E4m3, ..spec }, "q_pe"),
            (RopeAppend { append: KvAppend { input: Dtype::E4m3, ..append }, ..spec }, "kv_c"),
            (RopeAppend { append: KvAppend { shape: no_rope, ..append }, ..spec }, "qk_rope_head_dim"),
            (RopeAppend { query_out: Dtype::Bf16, ..spec }, "q_pe_out"),
            (RopeAppend { num_heads: 0, ..spec }, "num_heads"),
        ] {
            refuses(&format!("{wrong:?}"), backend.once(wrong, RopeAppendBatch::slots(&[0]), &good()), why);
        }
        let far = View { offset: 4, ..View::dense(&q, 2, 32) };
        for (what, args, why) in [
            ("queries past their buffer", RopeAppendArgs { q_pe: far, ..good() }, "q_pe"),
            ("outputs past their buffer", RopeAppendArgs { q_pe_out: far, ..good() }, "q_pe_out"),
            (
                "outputs in the cache",
                RopeAppendArgs { q_pe_out: View::dense(&cache, 2, 32), ..good() },
                "q_pe_out",
            ),
            ("queries in the cache", RopeAppendArgs { q_pe: View::dense(&cache, 2, 32), ..good() }, "q_pe"),
            (
                "outputs in the rows",
                RopeAppendArgs { q_pe_out: View::dense(&rows, 2, 32), ..good() },
                "q_pe_out",
            ),
            ("a scale without codes", RopeAppendArgs { q_scale: 0.5, ..good() }, "q_scale"),
            ("positions in the cache", RopeAppendArgs { positions: &cache, ..good() }, "positions"),
            ("a table past its buffer", RopeAppendArgs { max_position: 6, ..good() }, "cos_sin"),
            (
                "a scale of 0",
                RopeAppendArgs { layer: KvAppendArgs { k_scale: 0.0, ..layer() }, ..good() },
                "k_scale",
            ),
        ] {
            refuses(what, backend.once(spec, RopeAppendBatch::slots(&[0, 1]), &args), why);
        }
        Ok(())
    }();
    session.note("rope", result.map_err(text));
    session.finish("refuses rotations");
}
