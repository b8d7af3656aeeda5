//! `head_project` against the oracle: absorb, v_up and k_up from one `kv_b_proj`, any strides, hard data.

use crate::reference::{Projection, e4m3_code, e4m3_codes, head_project, q8_0_bytes, q8_0_values};
use wgpu_mla::{
    Backend, Dtype, Error, HeadProject, HeadProjectArgs, OpOptions, Result, View, WeightFormat, WeightOrder,
    WeightScales, WeightView, e4m3_decode,
};

use super::Session;
use super::memory::{Strides, scatter, upload};
use super::run::{Layout, Output};
use crate::close::{Tolerance, close};
use crate::paint::{POISON, Rng};

/// What the elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// randn.
    Randn,
    /// Rows and elements of very different sizes: 1e5 beside 1e-4, and rows of 1e-6. Weights of 300 beside 1e-4.
    Hard,
    /// Small weights, as no model has them.
    Tiny,
    /// Sums that are one element: ties of codes and their neighbours, codes that are subnormal, and what saturates.
    Exact,
}

/// A projection to check.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub spec: HeadProject,
    pub tokens: usize,
    pub layout: Layout,
    /// All heads read the same row.
    pub shared: bool,
    /// Codes have one scale for all heads.
    pub one_scale: bool,
    pub data: Data,
    /// The scale of an output in codes.
    pub out_scale: f32,
}

impl Case {
    pub fn new(spec: HeadProject, tokens: usize) -> Self {
        Self {
            spec,
            tokens,
            layout: Layout::Gaps,
            shared: false,
            one_scale: false,
            data: Data::Randn,
            out_scale: 1.0,
        }
    }
}

/// A spec of these dtypes.
pub fn spec(
    [input, weight, output]: [Dtype; 3],
    num_heads: u32,
    (k, n): (u32, u32),
    order: WeightOrder,
) -> HeadProject {
    HeadProject { input, weight: weight.into(), output, num_heads, k, n, order, guard: false }
}

/// The same with `Q8_0` weights.
pub fn q8_0(
    [input, output]: [Dtype; 2],
    num_heads: u32,
    dims: (u32, u32),
    order: WeightOrder,
) -> HeadProject {
    HeadProject { weight: WeightFormat::Q8_0, ..spec([input, input, output], num_heads, dims, order) }
}

/// A projection's allowed error: of f32 sums, and of what `y` is rounded to.
pub(super) fn tolerance(output: Dtype, n: usize) -> Tolerance {
    let (abs, rel, share, cos) = match output {
        Dtype::F32 => (0.0, 0.0, 1e-5, 1e-9),
        // Half of the last place of a subnormal, and of the others.
        Dtype::F16 => (6e-8, 1.01 / 1024.0, 2e-5, 5e-6),
        Dtype::Bf16 | Dtype::E4m3 => (0.0, 1.01 / 256.0, 2e-5, 5e-6),
    };
    Tolerance { abs, rel, row: Some((n, share)), cos }
}

fn values(rng: &mut Rng, count: usize, columns: usize, data: Data, is_weight: bool) -> Vec<f32> {
    let value = |at: usize, rng: &mut Rng| match data {
        Data::Randn => rng.randn(),
        Data::Tiny => rng.randn() * if is_weight { 1e-5 } else { 1.0 },
        Data::Exact if is_weight => 1.0,
        Data::Exact if at.is_multiple_of(columns) => exact(at / columns),
        Data::Exact => 0.0,
        Data::Hard if is_weight => rng.randn() * [1e-4, 1.0, 75.0][rng.below(3)],
        Data::Hard => match at / columns % 3 {
            0 => rng.randn() * [1e-4, 1.0, 2e4][rng.below(3)],
            1 => rng.randn() * 1e-6,
            _ => rng.randn() * 300.0,
        },
    };
    (0..count).map(|at| value(at, rng)).collect()
}

/// Halves of e4m3's last place, of every exponent from the subnormal ones to past 448, in either sign. All dtypes hold them.
fn exact(i: usize) -> f32 {
    let (halves, exponent) = (i * 7 % 32, i / 2 % 18);
    let value = halves as f32 * (exponent as f32 - 11.0).exp2();
    if i.is_multiple_of(2) { value } else { -value }
}

/// Runs a case on a variant, or on the best, and compares it with the oracle; gaps and tails hold NaN, and those of `y` must after.
pub fn check<B: Backend>(backend: &B, case: &Case, variant: Option<&str>) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let Case { spec, tokens, layout, shared, one_scale, data, .. } = *case;
    let (heads, k, n) = (spec.num_heads as usize, spec.k as usize, spec.n as usize);
    let mut rng = Rng((tokens * heads + k * n) as u64);
    let x_heads = if shared { 1 } else { heads };
    let x = spec.input.encode_all(&values(&mut rng, tokens * x_heads * k, k, data, false));
    let weight = values(&mut rng, heads * k * n, k * n, data, true);
    let weight = match spec.weight {
        WeightFormat::Elements(dtype) => dtype.encode_all(&weight),
        WeightFormat::Q8_0 => q8_0_bytes(&weight),
    };
    // Each very different from the next, NaN beside them.
    let scales: Vec<f32> =
        (0..if one_scale { 1 } else { heads }).map(|head| [0.07, 3.0, -0.4][head % 3]).collect();
    let around: Vec<f32> = scales.iter().flat_map(|&scale| [f32::NAN, scale]).collect();
    let scale_buffer = upload(backend, &Dtype::F32.encode_all(&around)).map_err(text)?;
    let head_stride = if one_scale { 0 } else { 2 };
    let scales_view = WeightScales { buffer: &scale_buffer, offset: 1, head_stride };
    let has_scales = spec.weight.has_scales();

    let x_dims = [tokens, x_heads, k];
    let x_strides = layout.strides(x_dims, 8);
    let x_buffer = upload(backend, &scatter(&x, x_dims, spec.input.bytes(), x_strides)).map_err(text)?;
    let (rows, columns) = if spec.order == WeightOrder::Kn { (k, n) } else { (n, k) };
    // What offsets and strides count, its bytes, and how many there are in a row.
    let (bytes, columns, unit) = match spec.weight {
        WeightFormat::Elements(dtype) => (dtype.bytes(), columns, if has_scales { 16 } else { 8 }),
        WeightFormat::Q8_0 => (1, columns / 32 * 34, 2),
    };
    let w_dims = [heads, rows, columns];
    let w_strides = layout.strides(w_dims, unit);
    let w_buffer = upload(backend, &scatter(&weight, w_dims, bytes, w_strides)).map_err(text)?;
    // Another layout than the inputs', since strides are never inferred from each other.
    let y_layout = if layout == Layout::Gaps { Layout::HeadMajor } else { layout };
    let mut x_view = x_strides.view(&x_buffer);
    if shared {
        x_view.head_stride = 0;
    }
    let Strides { offset, token, head } = w_strides;
    let [offset, head_stride, row_stride] = [offset, token, head].map(|stride| stride as u64);
    let options = OpOptions { variant: variant.map(str::to_owned) };
    let run = |output: Dtype, out_scale: f32| -> Result<Vec<u8>, String> {
        let y = Output::new([tokens, heads, n], output, y_layout, 8);
        let y_buffer = upload(backend, &vec![POISON; y.len]).map_err(text)?;
        let args = HeadProjectArgs {
            x: x_view,
            weight: WeightView {
                buffer: &w_buffer,
                offset,
                head_stride,
                row_stride,
                scales: has_scales.then_some(scales_view),
            },
            y: y.strides.view(&y_buffer),
            scale: 1.0,
            out_scale,
            saturates: false,
            guard: None,
        };
        let spec = HeadProject { output, ..spec };
        backend.once_with(spec, &options, 0..tokens as u32, &args).map_err(text)?;
        y.read(backend, &y_buffer)
    };
    let out_scale = if spec.output.is_fp8() { case.out_scale } else { 1.0 };
    let bytes = run(spec.output, out_scale)?;
    let mut x = spec.input.decode_all(&x);
    if shared {
        x = x.chunks_exact(k).flat_map(|row| row.repeat(heads)).collect();
    }
    let weight = match spec.weight {
        WeightFormat::Elements(dtype) => dtype.decode_all(&weight),
        WeightFormat::Q8_0 => q8_0_values(&weight),
    };
    let scales: &[f32] = if has_scales { &scales } else { &[] };
    let want = head_project(&Projection {
        num_heads: heads,
        k,
        n,
        order: spec.order,
        x: &x,
        weight: &weight,
        scales,
    });
    if !spec.output.is_fp8() {
        let got = spec.output.decode_all(&bytes);
        return close("y", &got, &want, &tolerance(spec.output, n)).into_result().map(drop);
    }
    // Codes are those of the sums in f32, byte for byte, and between those of the oracle's with an f32 sum's error either way.
    let sums = Dtype::F32.decode_all(&run(Dtype::F32, 1.0)?);
    close("y", &sums, &want, &tolerance(Dtype::F32, n)).into_result()?;
    if let Some(at) = e4m3_codes(&sums, out_scale).iter().zip(&bytes).position(|(want, got)| want != got) {
        return Err(format!("code {at} of {:e} is {:#x}", sums[at], bytes[at]));
    }
    for (row, (want, codes)) in want.chunks(n).zip(bytes.chunks(n)).enumerate() {
        let error = want.iter().fold(0f64, |most, x| most.max(x.abs())) * 1e-5;
        for (want, &code) in want.iter().zip(codes) {
            let [low, high] = [want - error, want + error].map(|x| e4m3_decode(e4m3_code(x, out_scale)));
            if !(low..=high).contains(&e4m3_decode(code)) {
                return Err(format!("row {row}: {want:e} became {code:#x}"));
            }
        }
    }
    Ok(())
}

/// Outputs in codes, of tokens of one tile and of several: scales of either kind, ties, what saturates, subnormal codes.
pub fn projected_codes<B: Backend>(session: &Session<'_, B>) {
    use Dtype::{Bf16, E4m3, F16, F32};
    use WeightOrder::{Kn, Nk};
    for (dtypes, order) in [([Bf16, Bf16, E4m3], Kn), ([F32, F32, E4m3], Nk), ([F16, F16, E4m3], Nk)] {
        let spec = spec(dtypes, 3, (64, 64), order);
        for (tokens, data, out_scale) in
            [(5, Data::Randn, 0.037), (70, Data::Randn, 0.25), (70, Data::Exact, 1.0), (70, Data::Exact, 0.3)]
        {
            let case = Case { data, out_scale, ..Case::new(spec, tokens) };
            session.note(&format!("{case:?}"), check(session.backend, &case, None));
        }
    }
    for (what, dtype) in [("f32", F32), ("bf16", Bf16)] {
        session.note(what, check_not_finite(session.backend, dtype));
    }
    session.finish("projected codes");
}

/// What is infinite saturates, and a NaN stays one.
fn check_not_finite<B: Backend>(backend: &B, dtype: Dtype) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let spec = spec([dtype, dtype, Dtype::E4m3], 1, (64, 64), WeightOrder::Nk);
    // Weights of 1 everywhere, so that no product is 0 times infinity.
    let rows = [f32::NAN, 3e38, -3e38, 1.0];
    let x: Vec<f32> = rows.iter().flat_map(|&x| [x; 64]).collect();
    let x = upload(backend, &dtype.encode_all(&x)).map_err(text)?;
    let weight = upload(backend, &dtype.encode_all(&[1.0; 64 * 64])).map_err(text)?;
    let y = upload(backend, &[0; 4 * 64]).map_err(text)?;
    let args = HeadProjectArgs {
        x: View::dense(&x, 1, 64),
        weight: WeightView { buffer: &weight, offset: 0, head_stride: 64 * 64, row_stride: 64, scales: None },
        y: View::dense(&y, 1, 64),
        scale: 1.0,
        out_scale: 0.5,
        saturates: false,
        guard: None,
    };
    backend.once(spec, 0..4, &args).map_err(text)?;
    let got = super::memory::download(backend, &y, 4 * 64).map_err(text)?;
    let want: Vec<u8> =
        [0x7F, 0x7E, 0xFE, e4m3_code(64.0, 0.5)].iter().flat_map(|&code| [code; 64]).collect();
    if got[..4 * 64] == want { Ok(()) } else { Err(format!("{got:x?}")) }
}

/// Every dtype, both orders, tokens from one to more than a tile, odd sizes, all layouts.
pub fn projections<B: Backend>(session: &Session<'_, B>) {
    use Dtype::{Bf16, F16, F32};
    use WeightOrder::{Kn, Nk};
    let dtypes = [[F32; 3], [F16; 3], [Bf16; 3], [Bf16, F16, F32], [F32, Bf16, Bf16], [F16, F32, F16]];
    for (turn, dtypes) in dtypes.into_iter().enumerate() {
        let order = [Kn, Nk][turn % 2];
        let dims = [(40, 72), (24, 136), (8, 8), (64, 64)][turn % 4];
        for (tokens, layout) in
            [(1, Layout::Dense), (5, Layout::Gaps), (70, Layout::HeadMajor), (0, Layout::Dense)]
        {
            for shared in [false, true] {
                let spec = spec(dtypes, 3, dims, order);
                let case = Case { layout, shared, ..Case::new(spec, tokens) };
                let result = check(session.backend, &case, None);
                session.note(&format!("{case:?}"), result);
            }
        }
        let mut spec = spec(dtypes, 2, (64, 72), order);
        // f16 has no room for them, and no precision for the small ones.
        let wide = |dtype| if dtype == F16 { Bf16 } else { dtype };
        let [input, weight, output] = dtypes.map(wide);
        (spec.input, spec.weight, spec.output) = (input, weight.into(), output);
        let case = Case { data: Data::Hard, ..Case::new(spec, 7) };
        let result = check(session.backend, &case, None);
        session.note(&format!("{case:?}"), result);
    }
    session.finish("projections");
}

/// Weights in e4m3 with scales, and in blocks of `Q8_0`: both orders, tokens from one to more than a tile, all layouts. A NaN code makes
/// its products NaN and no others.
pub fn quantised_weights<B: Backend>(session: &Session<'_, B>) {
    use Dtype::{Bf16, E4m3, F16, F32};
    use WeightOrder::{Kn, Nk};
    for spec in [
        spec([Bf16, E4m3, Bf16], 3, (40, 80), Kn),
        spec([F16, E4m3, F32], 3, (80, 40), Nk),
        q8_0([F32, F32], 3, (24, 96), Kn),
        q8_0([Bf16, F16], 3, (64, 40), Nk),
    ] {
        for (tokens, layout, one_scale) in
            [(1, Layout::Dense, false), (5, Layout::Gaps, true), (70, Layout::HeadMajor, false)]
        {
            let case = Case { layout, shared: tokens == 5, one_scale, ..Case::new(spec, tokens) };
            let result = check(session.backend, &case, None);
            session.note(&format!("{case:?}"), result);
        }
    }
    session.note("a NaN code", nan_code(session.backend).map_err(|error| error.to_string()).flatten());
    session.finish("quantised weights");
}

fn nan_code<B: Backend>(backend: &B) -> Result<Result<(), String>> {
    let spec = spec([Dtype::Bf16, Dtype::E4m3, Dtype::Bf16], 3, (40, 80), WeightOrder::Kn);
    let mut codes = vec![0x38; 3 * 40 * 80];
    // Head 1 has both NaNs, and the largest numbers, whose codes are the next.
    for (column, code) in [(5, 0x7F), (6, 0xFF), (7, 0x7E), (8, 0xFE)] {
        codes[(40 + 11) * 80 + column] = code;
    }
    let x = upload(backend, &Dtype::Bf16.encode_all(&[1.0; 2 * 3 * 40]))?;
    let (codes, scales) = (upload(backend, &codes)?, upload(backend, &Dtype::F32.encode_all(&[0.5]))?);
    let y = Output::new([2, 3, 80], Dtype::Bf16, Layout::Dense, 8);
    let y_buffer = upload(backend, &vec![POISON; y.len])?;
    let weight = WeightView { buffer: &codes, offset: 0, head_stride: 40 * 80, row_stride: 80, scales: None };
    let args = HeadProjectArgs {
        x: Strides::dense(3, 40).view(&x),
        weight: weight.with_scales(WeightScales::per_tensor(&scales)),
        y: y.strides.view(&y_buffer),
        scale: 1.0,
        out_scale: 1.0,
        saturates: false,
        guard: None,
    };
    backend.once(spec, 0..2, &args)?;
    Ok(y.read(backend, &y_buffer).and_then(|bytes| {
        for (at, got) in Dtype::Bf16.decode_all(&bytes).into_iter().enumerate() {
            let fits = match (at / 80 % 3, at % 80) {
                (1, 5 | 6) => got.is_nan(),
                (1, 7) => got == (39.0 + 448.0) / 2.0 || (got - 243.5).abs() <= 1.0,
                (1, 8) => (got + 204.5).abs() <= 1.0,
                _ => got == 20.0,
            };
            if !fits {
                return Err(format!("{got} at {at}"));
            }
        }
        Ok(())
    }))
}

/// What a projection must refuse.
pub fn refuses_projections<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let good = spec([Dtype::F32, Dtype::Bf16, Dtype::F32], 2, (16, 24), WeightOrder::Kn);
        let [x, w, y] = [4 * 2 * 16 * 4, 2 * 16 * 24 * 2, 4 * 2 * 24 * 4].map(|bytes| backend.buffer(bytes));
        let (x, w, y) = (x?, w?, y?);
        let w_floats = 2 * 16 * 24 / 2;
        let weight = WeightView { buffer: &w, offset: 0, head_stride: 384, row_stride: 24, scales: None };
        let args = |weight| HeadProjectArgs {
            x: Strides::dense(2, 16).view(&x),
            weight,
            y: Strides::dense(2, 24).view(&y),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
        };
        let refuses = |what: &str, result: Result<()>, why: &str| {
            let checked = match result {
                Ok(()) => Err("was accepted".to_owned()),
                Err(error) if error.to_string().contains(why) => Ok(()),
                Err(error) => Err(format!("{error:?} does not name {why:?}")),
            };
            session.note(what, checked);
        };
        session.note("a good one", backend.once(good, 0..4, &args(weight)).map_err(|e| e.to_string()));
        for (what, spec, why) in [
            ("n of codes", HeadProject { weight: Dtype::E4m3.into(), ..good }, "multiple of 16"),
            ("n of blocks", HeadProject { weight: WeightFormat::Q8_0, ..good }, "multiple of 32"),
            ("an e4m3 input", HeadProject { input: Dtype::E4m3, ..good }, "input"),
            ("no head", HeadProject { num_heads: 0, ..good }, "num_heads"),
            ("129 heads", HeadProject { num_heads: 129, ..good }, "num_heads"),
            ("k 12", HeadProject { k: 12, ..good }, "k 12"),
            ("n 0", HeadProject { n: 0, ..good }, "n 0"),
            ("more columns", HeadProject { n: 32, ..good }, "y"),
        ] {
            refuses(what, backend.once(spec, 0..4, &args(weight)), why);
        }
        for (what, weight, why) in [
            ("weights past their buffer", WeightView { offset: 8, ..weight }, "weight"),
            ("rows past their buffer", WeightView { row_stride: 1 << 40, ..weight }, "weight"),
            (
                "overflow",
                WeightView { head_stride: u64::MAX / 8 * 8, row_stride: u64::MAX / 8 * 8, ..weight },
                "weight",
            ),
            ("misaligned weights", WeightView { head_stride: 380, ..weight }, "weight 380"),
            ("one row for all", WeightView { row_stride: 0, ..weight }, "weight 0"),
            ("half a row", WeightView { row_stride: 8, ..weight }, "weight 8"),
            ("one matrix for all heads", WeightView { head_stride: 0, ..weight }, "weight 0"),
            ("half a matrix", WeightView { head_stride: 192, ..weight }, "weight"),
        ] {
            refuses(what, backend.once(good, 0..4, &args(weight)), why);
        }
        let codes = HeadProject { weight: Dtype::E4m3.into(), order: WeightOrder::Nk, ..good };
        let of_codes = WeightView { head_stride: 384, row_stride: 16, ..weight };
        let scales = WeightScales::per_head(&w);
        session.note(
            "codes with scales",
            backend.once(codes, 0..4, &args(of_codes.with_scales(scales))).map_err(|e| e.to_string()),
        );
        let far = WeightScales { offset: w_floats - 1, ..scales };
        for (what, spec, weight, why) in [
            ("codes without scales", codes, of_codes, "WeightView::with_scales"),
            ("scales of bf16", good, weight.with_scales(scales), "WeightView::scales"),
            ("scales past their buffer", codes, of_codes.with_scales(far), "scales"),
            (
                "a stride of scales",
                codes,
                of_codes.with_scales(WeightScales { head_stride: u64::MAX, ..scales }),
                "scales",
            ),
            ("misaligned codes", codes, WeightView { offset: 8, ..of_codes }.with_scales(scales), "weight 8"),
        ] {
            refuses(what, backend.once(spec, 0..4, &args(weight)), why);
        }
        let blocks = HeadProject { weight: WeightFormat::Q8_0, k: 32, order: WeightOrder::Nk, ..good };
        let odd = WeightView { head_stride: 36 * 24, row_stride: 35, ..weight };
        let odd = HeadProjectArgs { x: Strides::dense(2, 32).view(&x), ..args(odd) };
        refuses("misaligned blocks", backend.once(blocks, 0..2, &odd), "weight 35");
        for (what, token_stride, head_stride) in [
            ("one row for all tokens", 0, 16),
            ("half a row", 32, 8),
            ("half a token", 16, 16),
            ("one token", 0, 0),
        ] {
            let x = View { token_stride, head_stride, ..args(weight).x };
            refuses(what, backend.once(good, 0..4, &HeadProjectArgs { x, ..args(weight) }), "x ");
        }
        let shared = View { token_stride: 16, head_stride: 0, ..args(weight).x };
        let shared = backend.once(good, 0..4, &HeadProjectArgs { x: shared, ..args(weight) });
        session.note("a row for all heads", shared.map_err(|e| e.to_string()));
        let codes = HeadProject { output: Dtype::E4m3, ..good };
        for out_scale in [0.0, -1.0, 1e-39, f32::NAN, f32::INFINITY] {
            let bad = HeadProjectArgs { out_scale, ..args(weight) };
            refuses("a scale of codes", backend.once(codes, 0..4, &bad), "out_scale");
        }
        let bad = HeadProjectArgs { out_scale: 0.5, ..args(weight) };
        refuses("a scale without codes", backend.once(good, 0..4, &bad), "out_scale");
        let mut bad = args(weight);
        bad.x.token_stride = 1 << 30;
        refuses("x past its buffer", backend.once(good, 0..4, &bad), "x");
        let mut bad = args(weight);
        bad.y.head_stride = 16;
        refuses("rows of y that overlap", backend.once(good, 0..4, &bad), "y");
        let mut bad = args(weight);
        bad.y.offset = 4;
        refuses("a misaligned y", backend.once(good, 0..4, &bad), "y 4");
        let bad = HeadProjectArgs { y: Strides::dense(2, 16).view(&x), ..args(weight) };
        let spec = HeadProject { n: 16, ..good };
        refuses("y in x", backend.once(spec, 0..4, &bad), "same buffer");
        Ok(())
    }();
    session.note("refusals", result.map_err(|error| error.to_string()));
    session.finish("refusals of projections");
}
