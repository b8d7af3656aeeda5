//! Decodes in the browser against the oracle.

use wasm_bindgen_test::wasm_bindgen_test;
use wgpu_mla::gpu::{Gpu, checked};
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Device, Dtype, LseBase, MlaDecodeArgs, Plan, Query, SplitPolicy,
};

use crate::page::{download, gpu, upload};
use mla_support::close::{Tolerance, close};
use mla_support::paint::{Data, Make, POISON, Problem, sequences};
use mla_support::suite::memory::{Pages, gather, page_dims, scatter};
use mla_support::suite::run::{Layout, Output, dense_table};

/// What must not change the result.
#[derive(Debug, Clone, Copy, Default)]
struct How {
    policy: SplitPolicy,
    layout: Layout,
    lse_base: LseBase,
}

const ONE_SPLIT: How = How { policy: SplitPolicy::OneSplit, layout: Layout::Dense, lse_base: LseBase::E };
const SPLITS: How = How { policy: SplitPolicy::FixedTokens(32), layout: Layout::Dense, lse_base: LseBase::E };

/// Runs a problem on every variant that this browser gets, and compares with the oracle.
async fn check(make: &Make, hows: &[How]) {
    let (gpu, problem) = (gpu().await, make.build());
    let (out, lse) = problem.expected();
    for candidate in gpu.variants(&problem.spec).into_iter().filter(|candidate| candidate.lacks.is_none()) {
        for how in hows {
            let result = run(&gpu, &problem, Some(candidate.name), how, &out, &lse).await;
            assert_eq!(result, Ok(()), "{}, {how:?}: {}", candidate.name, problem.name);
        }
    }
}

/// Runs a problem once, on a variant or on the best, and compares with what is expected.
async fn run(
    gpu: &Gpu,
    problem: &Problem,
    variant: Option<&str>,
    how: &How,
    want_out: &[f64],
    want_lse: &[f64],
) -> Result<(), String> {
    let wrong = |error: wgpu_mla::Error| error.to_string();
    let spec = &problem.spec;
    let options = DecodeOptions { variant: variant.map(str::to_owned), ..Default::default() };
    let make = || gpu.compile_with(*spec, &options);
    let mla = checked(gpu.device(), "a decode", make).await.map_err(wrong)?;
    let batch = Batch {
        seq_lens: &problem.seq_lens,
        query_start_loc: &problem.query_start_loc,
        mask: problem.mask(),
        shared_prefixes: &problem.shared_prefixes,
        slabs: None,
    };
    let plan = Plan::new(spec, &mla.tiling(), &batch, how.policy).map_err(wrong)?;

    let (heads, tokens) = (spec.shape.num_heads as usize, problem.total_q());
    let (latent, row) = (spec.shape.kv_lora_rank as usize, spec.shape.row_elems() as usize);
    let q_dims = [tokens, heads, row];
    let q_strides = how.layout.strides(q_dims, 8);
    let q = upload(gpu, &scatter(&problem.q, q_dims, spec.query.bytes(), q_strides));
    let gaps = how.layout != Layout::Dense;
    let pages = if gaps { Pages::gaps(&spec.kv, row) } else { Pages::dense(&spec.kv, row) };
    let kv_bytes = scatter(&problem.kv, page_dims(&spec.kv, row), spec.kv.dtype().bytes(), pages.strides());
    let kv = upload(gpu, &kv_bytes);
    let out = Output::new([tokens, heads, latent], spec.out, how.layout, 8);
    let lse = Output::new([tokens, heads, 1], Dtype::F32, how.layout, 1);
    let (out_buffer, lse_buffer) = (upload(gpu, &vec![POISON; out.len]), upload(gpu, &vec![POISON; lse.len]));
    let layer = MlaDecodeArgs {
        query: Query::Whole(q_strides.view(&q)),
        kv: pages.view(&kv),
        out: out.strides.view(&out_buffer),
        lse: lse.strides.view(&lse_buffer),
        lse_base: how.lse_base,
        softmax_scale: problem.softmax_scale,
        k_scale: problem.k_scale,
        q_scale: problem.q_scale,
        indices: None,
        attn_sink: None,
    };

    // The browser's errors about the step, the binding and the commands.
    let record = || {
        let mut step = mla.step(Capacity::default())?;
        mla.prepare(&mut step, (&plan, dense_table(problem)))?;
        mla.run(&step, &mla.bind(&layer, tokens as u32)?)
    };
    checked(gpu.device(), "a step", record).await.map_err(wrong)?;

    let dense = async |output: &Output, buffer| {
        let bytes = download(gpu, buffer, output.len).await.map_err(wrong)?;
        let (dense, intact) = gather(&bytes, output.dims, output.elem, output.strides);
        intact.map(|()| dense)
    };
    let got_out = spec.out.decode_all(&dense(&out, &out_buffer).await?);
    let got_lse = Dtype::F32.decode_all(&dense(&lse, &lse_buffer).await?);
    let ln_base = if how.lse_base == LseBase::Two { std::f64::consts::LN_2 } else { 1.0 };
    let natural: Vec<f32> = got_lse.iter().map(|&x| (f64::from(x) * ln_base) as f32).collect();
    let tolerance =
        Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, false, problem.largest_latent(), latent);
    close("lse", &natural, want_lse, &Tolerance::lse()).into_result()?;
    close("out", &got_out, want_out, &tolerance).into_result()?;
    for (row, _) in want_lse.iter().enumerate().filter(|(_, lse)| **lse == f64::NEG_INFINITY) {
        if got_out[row * latent..][..latent].iter().any(|&x| x != 0.0) {
            return Err(format!("row {row} sees no key: its out must be exactly 0"));
        }
    }
    Ok(())
}

/// Every cache dtype: ragged, with an empty row and two query tokens, pages of any size, in one split and in several.
#[wasm_bindgen_test]
async fn every_cache_dtype() {
    for (cache, query, page_size, heads) in [
        (Dtype::F32, Dtype::F32, 16, 6),
        (Dtype::F16, Dtype::F16, 3, 20),
        (Dtype::Bf16, Dtype::Bf16, 100, 16),
        (Dtype::E4m3, Dtype::Bf16, 1, 16),
        (Dtype::E4m3, Dtype::E4m3, 48, 1),
    ] {
        let sequences = sequences(&[(37, 1), (0, 1), (70, 2)]);
        let make = Make { cache, query, page_size, heads, sequences, ..Make::default() };
        check(&make, &[ONE_SPLIT, SPLITS, How::default()]).await;
    }
}

/// The other shapes of released models.
#[wasm_bindgen_test]
async fn every_shape() {
    for (dims, heads, cache) in
        [((256, 64), 12, Dtype::Bf16), ((256, 32), 40, Dtype::E4m3), ((512, 0), 8, Dtype::F16)]
    {
        let make = Make { dims, heads, cache, query: Dtype::F16, page_size: 48, ..Make::default() };
        check(&make, &[ONE_SPLIT, SPLITS]).await;
    }
}

/// Rounded outputs, both bases of the LSE, arrays with gaps, one split and several, which write differently.
#[wasm_bindgen_test]
async fn outputs_and_layouts() {
    for out in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let make = Make { out, heads: 6, ..Make::default() };
        let hows = [
            How { policy: SplitPolicy::OneSplit, layout: Layout::Gaps, lse_base: LseBase::Two },
            How { policy: SplitPolicy::FixedTokens(32), layout: Layout::HeadMajor, lse_base: LseBase::E },
            How { lse_base: LseBase::Two, ..SPLITS },
        ];
        check(&make, &hows).await;
    }
}

/// Weights on one token, large logits, elements beyond f16.
#[wasm_bindgen_test]
async fn hard_data() {
    for data in [Data::Needle, Data::BigLogits, Data::Extremes, Data::Huge] {
        check(&Make { data, ..Make::default() }, &[ONE_SPLIT, SPLITS]).await;
    }
}

/// Query lengths of 0, of many tiles, and beyond the sequence; a batch without work.
#[wasm_bindgen_test]
async fn ragged_queries() {
    for lens in [&[(40, 0), (33, 5), (2, 5), (0, 2), (75, 3)][..], &[(70, 20)], &[(40, 0)]] {
        check(&Make { sequences: sequences(lens), ..Make::default() }, &[SPLITS]).await;
    }
}

/// A prefix that is attended once for several sequences.
#[wasm_bindgen_test]
async fn shared_prefix() {
    let sequences = sequences(&[(100, 1), (90, 2), (64, 1)]);
    check(&Make { sequences, prefix: 64, ..Make::default() }, &[SPLITS]).await;
}

/// A problem's expected results.
pub async fn run_expecting(problem: &Problem, out: &[f64], lse: &[f64]) -> Result<(), String> {
    let gpu = gpu().await;
    run(&gpu, problem, None, &How::default(), out, lse).await
}
