//! Index queries against the oracle: every input and every format, any heads, strides and ranges, and what is refused.

use wgpu_mla::{Backend, Dtype, Error, IndexFormat, IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, View};

use super::Session;
use super::indexer_append::{dtypes, formats, rows};
use super::memory::{Strides, download, gather, scatter, upload};
use super::rope::{positions, table};
use super::run::Layout;
use crate::case::IndexQueryCase;
use crate::index_rows::{Codes, same_codes, same_elements};
use crate::paint::{POISON, Rng};
use crate::reference::{IndexRows, index_queries};

const DIM: usize = 128;
/// All tokens of the arrays, and those of the step.
const TOKENS: usize = 6;
const STEP: std::ops::Range<usize> = 1..5;

fn text(error: Error) -> String {
    error.to_string()
}

fn words(words: &[i32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Rotates and quantises the tokens of [`STEP`]; all others keep their poison.
fn check<B: Backend>(backend: &B, spec: &IndexerQuery, layout: Layout, seed: u64) -> Result<(), String> {
    let IndexerQuery { format, num_heads, input } = *spec;
    let (heads, output) = (num_heads as usize, format.dtype);
    let mut rng = Rng(seed);
    let q = rows(&mut rng, input, TOKENS * heads);
    let mut weights: Vec<f32> = (0..TOKENS * heads).map(|_| rng.randn()).collect();
    weights[heads] = f32::NAN;
    weights[2 * heads] = f32::NEG_INFINITY;
    let (places, cos_sin) = (positions(&mut rng, TOKENS), table(64));
    let max_position = (cos_sin.len() / 64) as u32;
    let weight_scale = 1.0 / ((heads * DIM) as f32).sqrt();

    let (dims, flat) = ([TOKENS, heads, DIM], [TOKENS, heads, 1]);
    let other = if layout == Layout::Gaps { Layout::HeadMajor } else { layout };
    let (q_at, out_at) = (layout.strides(dims, 4), other.strides(dims, 4));
    // Weights are at any element.
    let weights_at = Strides { offset: 3, token: heads + 1, head: 1 };
    let weights_out_at = Strides { offset: 1, token: 1, head: TOKENS + 2 };
    let q_buffer = upload(backend, &scatter(&q, dims, input.bytes(), q_at)).map_err(text)?;
    let weights_buffer = scatter(&Dtype::F32.encode_all(&weights), flat, 4, weights_at);
    let weights_buffer = upload(backend, &weights_buffer).map_err(text)?;
    let (out_len, weights_len) = (out_at.end(dims) * output.bytes(), weights_out_at.end(flat) * 4);
    let out = upload(backend, &vec![POISON; out_len]).map_err(text)?;
    let weights_out = upload(backend, &vec![POISON; weights_len]).map_err(text)?;
    let angles = upload(backend, &Dtype::F32.encode_all(&cos_sin)).map_err(text)?;
    // The step's own positions are inside of the table; the array that is then unread holds others.
    let is_own = layout == Layout::Gaps;
    let known: Vec<i32> = places[STEP].iter().map(|&place| place.clamp(0, max_position as i32 - 1)).collect();
    let on_device = if is_own { words(&[1; TOKENS]) } else { words(&places) };
    let on_device = upload(backend, &on_device).map_err(text)?;
    let has_rope = format.rope.is_some();
    let args = IndexerQueryArgs {
        q: q_at.view(&q_buffer),
        weights: weights_at.view(&weights_buffer),
        q_out: out_at.view(&out),
        weights_out: weights_out_at.view(&weights_out),
        // Without RoPE these are unread, and may be anything.
        positions: if has_rope { &on_device } else { &out },
        cos_sin: if has_rope { &angles } else { &out },
        max_position: if has_rope { max_position } else { 0 },
        weight_scale,
    };
    let tokens = STEP.start as u32..STEP.end as u32;
    let batch = IndexerQueryBatch { tokens, positions: is_own.then_some(&known[..]) };
    backend.once(*spec, batch, &args).map_err(text)?;

    let bytes = download(backend, &out, out_len).map_err(text)?;
    let (got, intact) = gather(&bytes, dims, output.bytes(), out_at);
    intact.map_err(|error| format!("q_out: {error}"))?;
    let bytes = download(backend, &weights_out, weights_len).map_err(text)?;
    let (got_weights, intact) = gather(&bytes, flat, 4, weights_out_at);
    intact.map_err(|error| format!("weights_out: {error}"))?;
    let x = input.decode_all(&q);
    let want =
        index_queries(&IndexRows { format, x: &x, num_heads: heads, positions: &places, cos_sin: &cos_sin });
    let (row_bytes, mut codes) = (DIM * output.bytes(), Codes::default());
    for row in 0..TOKENS * heads {
        let (row_got, weight) = (&got[row * row_bytes..][..row_bytes], &got_weights[4 * row..][..4]);
        if !STEP.contains(&(row / heads)) {
            if row_got.iter().chain(weight).any(|&byte| byte != POISON) {
                return Err(format!("row {row} is of another token, and was written"));
            }
            continue;
        }
        let (row_want, got) = (&want[row * DIM..][..DIM], f64::from(Dtype::F32.decode_at(weight, 0)));
        let is_scale = |scale: f64| {
            let want = f64::from(weights[row]) * scale * f64::from(weight_scale);
            let same = got.is_nan() && want.is_nan() || got == want;
            same || (got - want).abs() <= if format.ue8m0 { 1e-6 } else { 1e-5 } * want.abs()
        };
        let result = if output.is_fp8() {
            same_codes(&format, row_want, row_got, is_scale, &mut codes)
        } else if is_scale(1.0) {
            same_elements(output, row_want, row_got)
        } else {
            Err("the weight is wrong".to_owned())
        };
        result.map_err(|error| format!("row {row}: {error}, weight {} to {got:e}", weights[row]))?;
    }
    codes.finish().map(drop)
}

/// Runs a case in the layout of its file.
pub fn check_case<B: Backend>(backend: &B, case: &IndexQueryCase) -> Result<(), String> {
    let heads = case.spec.num_heads;
    let floats = |values: &[f32]| upload(backend, &Dtype::F32.encode_all(values)).map_err(text);
    let (q, weights) = (upload(backend, &case.q).map_err(text)?, floats(&case.weights)?);
    let (cos_sin, positions) =
        (floats(&case.cos_sin)?, upload(backend, &words(&case.positions)).map_err(text)?);
    let codes_len = case.q_codes.len();
    let (q_out, weights_out) = (
        upload(backend, &vec![POISON; codes_len]).map_err(text)?,
        upload(backend, &vec![POISON; 4 * case.weights.len()]).map_err(text)?,
    );
    let args = IndexerQueryArgs {
        q: View::dense(&q, heads, DIM as u32),
        weights: View::dense(&weights, heads, 1),
        q_out: View::dense(&q_out, heads, DIM as u32),
        weights_out: View::dense(&weights_out, heads, 1),
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: (case.cos_sin.len() / 64) as u32,
        weight_scale: case.weight_scale,
    };
    let tokens = case.weights.len() as u32 / heads;
    backend.once(case.spec, IndexerQueryBatch::tokens(0..tokens), &args).map_err(text)?;
    let codes = download(backend, &q_out, codes_len).map_err(text)?;
    let weights = download(backend, &weights_out, 4 * case.weights.len()).map_err(text)?;
    let weights = Dtype::F32.decode_all(&weights[..4 * case.weights.len()]);
    case.compare(&codes[..codes_len], &weights).map(drop)
}

/// Every input and every format.
pub fn index_queries_of_formats<B: Backend>(session: &Session<'_, B>) {
    for (turn, (input, dtype)) in session.one_in(5, dtypes().into_iter().enumerate()) {
        for (at, format) in formats(dtype).into_iter().enumerate() {
            let num_heads = [20, 1, 5, 7][(turn + at) % 4];
            let spec = IndexerQuery { format, num_heads, input };
            let layout = [Layout::Dense, Layout::Gaps, Layout::HeadMajor][(turn + at) % 3];
            let result = check(session.backend, &spec, layout, (turn + at) as u64);
            session.note(&format!("{spec:?}, {layout:?}"), result);
        }
    }
    session.finish("index queries");
}

/// An amax that is exactly 448 times a power of two has that power as its scale, one that is the next f32 has twice it, and zeros have the
/// least: read from the weights.
pub fn index_scales<B: Backend>(session: &Session<'_, B>) {
    let format = IndexFormat { rope: None, hadamard: false, ..IndexFormat::DEEPSEEK_V32 };
    let amaxes =
        [448.0, 448f32.next_up(), 448f32.next_down(), 3.5, 3.5f32.next_up(), 1.0, 1e-4, 9e-5, 0.0, 1e30];
    let scales: Vec<f32> = [0, 1, 0, -7, -6, -8, -22, -22, -22, 91].map(|e| f32::powi(2.0, e)).to_vec();
    let mut q = vec![0.0; amaxes.len() * DIM];
    amaxes.iter().enumerate().for_each(|(row, &amax)| q[row * DIM + 13 * row % DIM] = -amax);
    let result = || -> Result<Vec<f32>, Error> {
        let (backend, heads) = (session.backend, amaxes.len() as u32);
        let q = upload(backend, &Dtype::F32.encode_all(&q))?;
        let weights = upload(backend, &Dtype::F32.encode_all(&vec![1.0; amaxes.len()]))?;
        let (q_out, weights_out) = (upload(backend, &[POISON; 2048])?, upload(backend, &[POISON; 64])?);
        let args = IndexerQueryArgs {
            q: View::dense(&q, heads, 128),
            weights: View::dense(&weights, heads, 1),
            q_out: View::dense(&q_out, heads, 128),
            weights_out: View::dense(&weights_out, heads, 1),
            positions: &q,
            cos_sin: &q,
            max_position: 0,
            weight_scale: 1.0,
        };
        backend.once(
            IndexerQuery { format, num_heads: heads, input: Dtype::F32 },
            IndexerQueryBatch::tokens(0..1),
            &args,
        )?;
        Ok(Dtype::F32.decode_all(&download(backend, &weights_out, 4 * amaxes.len())?[..4 * amaxes.len()]))
    }();
    let checked = result.map_err(text).and_then(|got| {
        let wrong = got.iter().zip(&scales).position(|(got, want)| got != want);
        wrong.map_or(Ok(()), |at| {
            Err(format!("amax {} has scale {}, not {}", amaxes[at], got[at], scales[at]))
        })
    });
    session.note("scales of exact powers", checked);
    session.finish("index scales");
}

/// What must be refused before a kernel sees it.
pub fn refuses_index_queries<B: Backend>(session: &Session<'_, B>) {
    let result = refusals(session);
    session.note("index queries", result.map_err(text));
    session.finish("refuses index queries");
}

fn refusals<B: Backend>(session: &Session<'_, B>) -> Result<(), Error> {
    let backend = session.backend;
    let refuses = |what: &str, result: Result<(), Error>, why: &str| {
        let checked = match result {
            Ok(()) => Err("was accepted".to_owned()),
            Err(error) if error.to_string().contains(why) => Ok(()),
            Err(error) => Err(format!("{error} does not name {why:?}")),
        };
        session.note(what, checked);
    };
    // 3 tokens of 2 heads; 5 positions.
    let spec = IndexerQuery { format: IndexFormat::GLM_5, num_heads: 2, input: Dtype::F32 };
    let [q, q_out, weights, weights_out, places, angles] =
        [3 * 2 * 512, 3 * 2 * 128, 3 * 2 * 4, 3 * 2 * 4, 3 * 4, 5 * 256].map(|bytes| backend.buffer(bytes));
    let (q, q_out, weights, weights_out) = (q?, q_out?, weights?, weights_out?);
    let (places, angles) = (places?, angles?);
    let good = IndexerQueryArgs {
        q: View::dense(&q, 2, 128),
        weights: View::dense(&weights, 2, 1),
        q_out: View::dense(&q_out, 2, 128),
        weights_out: View::dense(&weights_out, 2, 1),
        positions: &places,
        cos_sin: &angles,
        max_position: 5,
        weight_scale: 0.0625,
    };
    let tokens = IndexerQueryBatch::tokens;
    session.note("good queries", backend.once(spec, tokens(0..3), &good).map_err(text));
    session.note("no token", backend.once(spec, tokens(2..2), &good).map_err(text));
    refuses("too many tokens", backend.once(spec, tokens(1..4), &good), "q:");
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = tokens(2..1);
    refuses("a range that ends before it begins", backend.once(spec, reversed, &good), "token range");
    for (positions, why) in [(&[0][..], "positions"), (&[0, -1], "negative"), (&[0, 5], "max_position")] {
        let batch = IndexerQueryBatch { tokens: 1..3, positions: Some(positions) };
        refuses(&format!("positions {positions:?}"), backend.once(spec, batch, &good), why);
    }
    for (wrong, why) in [
        (IndexerQuery { num_heads: 0, ..spec }, "index heads"),
        (IndexerQuery { num_heads: 65, ..spec }, "index heads"),
        (IndexerQuery { input: Dtype::E4m3, ..spec }, "e4m3"),
    ] {
        refuses(&format!("{wrong:?}"), backend.once(wrong, tokens(0..1), &good), why);
    }
    for (what, args, why) in [
        ("queries past their buffer", IndexerQueryArgs { q: View { offset: 4, ..good.q }, ..good }, "q:"),
        ("misaligned queries", IndexerQueryArgs { q: View { head_stride: 130, ..good.q }, ..good }, "q 130"),
        (
            "codes past their buffer",
            IndexerQueryArgs { q_out: View { offset: 4, ..good.q_out }, ..good },
            "q_out",
        ),
        (
            "codes that overlap",
            IndexerQueryArgs { q_out: View { head_stride: 64, ..good.q_out }, ..good },
            "q_out",
        ),
        (
            "weights past their buffer",
            IndexerQueryArgs { weights: View { offset: 64, ..good.weights }, ..good },
            "weights",
        ),
        (
            "weights that overlap",
            IndexerQueryArgs { weights_out: View { token_stride: 1, ..good.weights_out }, ..good },
            "weights_out",
        ),
        ("a scale of 0", IndexerQueryArgs { weight_scale: 0.0, ..good }, "weight_scale"),
        (
            "a scale that is infinite",
            IndexerQueryArgs { weight_scale: f32::INFINITY, ..good },
            "weight_scale",
        ),
        ("no table", IndexerQueryArgs { max_position: 0, ..good }, "max_position"),
        ("a table past its buffer", IndexerQueryArgs { max_position: 6, ..good }, "cos_sin"),
        (
            "weights in place",
            IndexerQueryArgs { weights_out: good.weights, ..good },
            "weights and weights_out",
        ),
        ("queries in place", IndexerQueryArgs { q_out: View::dense(&q, 2, 128), ..good }, "q and q_out"),
    ] {
        refuses(what, backend.once(spec, tokens(0..3), &args), why);
    }
    Ok(())
}
