//! Input that a backend must refuse, because a kernel would corrupt memory or results.

use wgpu_mla::{
    Backend, Batch, Capacity, DecodeOptions, Dtype, Error, KvAppend, KvAppendArgs, KvCopyPages, KvSpec,
    KvView, MergeState, MergeStateArgs, MlaDecodeArgs, MlaShape, Plan, Query, SplitPolicy, View,
};

use super::Session;
use super::memory::{Pages, Strides};
use super::run::{How, dense_table};
use crate::paint::{Make, Problem};

/// Notes whether a result is an error whose text contains `why`.
pub(super) fn refuses<B: Backend, T>(
    session: &Session<'_, B>,
    what: &str,
    result: Result<T, Error>,
    why: &str,
) {
    let checked = match result {
        Ok(_) => Err("was accepted".to_owned()),
        Err(error) if error.to_string().contains(why) => Ok(()),
        Err(error) => Err(format!("{error:?} does not name {why:?}")),
    };
    session.note(what, checked);
}

/// Dims and dtypes that nothing serves.
pub fn refuses_specs<B: Backend>(session: &Session<'_, B>) {
    let good = Make::default().build().spec;
    let with_shape = |shape: MlaShape| wgpu_mla::MlaDecode { shape, ..good };
    let with_kv = |kv: KvSpec| wgpu_mla::MlaDecode { kv, ..good };
    for (spec, why) in [
        (with_shape(MlaShape { num_heads: 0, ..good.shape }), "num_heads"),
        (with_shape(MlaShape { num_heads: 129, ..good.shape }), "num_heads"),
        (with_shape(MlaShape { kv_lora_rank: 128, ..good.shape }), "kv_lora_rank"),
        (with_shape(MlaShape { qk_rope_head_dim: 32, ..good.shape }), "kv_lora_rank"),
        (with_kv(KvSpec { page_size: 0, ..good.kv }), "page_size"),
        (with_kv(KvSpec { page_size: 257, ..good.kv }), "page_size"),
        (with_kv(KvSpec { num_pages: 0, ..good.kv }), "num_pages"),
        (wgpu_mla::MlaDecode { out: Dtype::E4m3, ..good }, "out"),
    ] {
        refuses(session, &format!("{spec:?}"), session.backend.compile(spec), why);
    }
    let unknown = DecodeOptions { variant: Some("no such variant".into()), ..DecodeOptions::default() };
    let compiled = session.backend.compile_with(good, &unknown);
    refuses(session, "an unknown variant", compiled, "no such variant");
    session.finish("refuses specs");
}

/// Wild pages among those in use.
pub fn refuses_pages<B: Backend>(session: &Session<'_, B>) {
    let good = Make::default().build();
    if !session.serves(&good.spec) {
        session.leave_out();
    } else {
        for wild in [good.spec.kv.num_pages as i32, -1, i32::MIN, i32::MAX] {
            let mut problem = good.clone();
            problem.block_table[1] = wild;
            refuses(session, &format!("page {wild}"), prepare(session, &problem), &wild.to_string());
        }
        let mut short = good.clone();
        short.max_pages = 1;
        short.block_table.truncate(2);
        refuses(session, "a table that is too narrow", prepare(session, &short), "seq");
        let mut missing = good.clone();
        missing.block_table.truncate(good.max_pages);
        refuses(session, "a table without a row", prepare(session, &missing), "block_table");
    }
    session.finish("refuses pages");
}

fn prepare<B: Backend>(session: &Session<'_, B>, problem: &Problem) -> Result<(), Error> {
    let decode = session.decode(&problem.spec)?;
    let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
    let plan = Plan::new(&problem.spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
    let mut step = decode.step(Capacity::of(&plan))?;
    decode.prepare(&mut step, (&plan, dense_table(problem)))
}

/// Scales, strides and sizes.
pub fn refuses_layers<B: Backend>(session: &Session<'_, B>) {
    let problem = Make { heads: 2, ..Make::default() }.build();
    if !session.serves(&problem.spec) {
        session.leave_out();
    } else {
        let result = || -> Result<(), Error> {
            let (backend, spec) = (session.backend, &problem.spec);
            let decode = session.decode(spec)?;
            let tokens = problem.total_q() as u32;
            let [q, kv] = [backend.buffer(problem.q.len() as u64)?, backend.buffer(problem.kv.len() as u64)?];
            let [out, lse] = [3 * 2 * 512 * 4, 3 * 2 * 4].map(|bytes| backend.buffer(bytes));
            let (out, lse) = (out?, lse?);
            let good = MlaDecodeArgs::dense(spec, &q, &kv, &out, &lse, 0.1);
            session.note("a good layer", decode.bind(&good, tokens).map(drop).map_err(|e| e.to_string()));
            for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
                for (layer, why) in [
                    (MlaDecodeArgs { softmax_scale: bad, ..good.clone() }, "softmax_scale"),
                    (MlaDecodeArgs { k_scale: bad, ..good.clone() }, "k_scale"),
                    (MlaDecodeArgs { q_scale: bad, ..good.clone() }, "q_scale"),
                ] {
                    refuses(session, &format!("{why} {bad}"), decode.bind(&layer, tokens), why);
                }
            }
            for softmax_scale in [1e-45, 5e-31, 9e29, 1e38] {
                let bound = decode.bind(&MlaDecodeArgs { softmax_scale, ..good.clone() }, tokens);
                refuses(session, &format!("softmax_scale {softmax_scale:e}"), bound, "softmax_scale");
            }
            for (what, layer, why) in [
                (
                    "one query for all tokens",
                    MlaDecodeArgs { query: whole(&q, 0, 576), ..good.clone() },
                    "q_nope 0",
                ),
                (
                    "one query for all heads",
                    MlaDecodeArgs { query: whole(&q, 1152, 0), ..good.clone() },
                    "q_nope 0",
                ),
                ("half a query", MlaDecodeArgs { query: whole(&q, 576, 288), ..good.clone() }, "q_nope 288"),
                ("half a token", MlaDecodeArgs { query: whole(&q, 576, 576), ..good.clone() }, "q_nope 576"),
                (
                    "rows of a latent alone",
                    MlaDecodeArgs { query: whole(&q, 1024, 512), ..good.clone() },
                    "q 512",
                ),
            ] {
                refuses(session, what, decode.bind(&layer, tokens), why);
            }
            // Only e4m3 has scales; the problem's cache and queries are of another dtype.
            for (layer, why) in [
                (MlaDecodeArgs { k_scale: 0.5, ..good.clone() }, "k_scale 0.5"),
                (MlaDecodeArgs { q_scale: 2.0, ..good.clone() }, "q_scale 2"),
                (
                    MlaDecodeArgs { kv: KvView { layer: 3, ..good.kv.clone() }, ..good.clone() },
                    "layer_stride",
                ),
            ] {
                refuses(session, &format!("{why} without effect"), decode.bind(&layer, tokens), why);
            }
            let far = View { offset: 1 << 20, ..good.out };
            for (what, layer, why) in [
                ("out past its buffer", MlaDecodeArgs { out: far, ..good.clone() }, "out"),
                (
                    "lse past its buffer",
                    MlaDecodeArgs { lse: View { offset: 1 << 20, ..good.lse }, ..good.clone() },
                    "lse",
                ),
                (
                    "overflow",
                    MlaDecodeArgs { out: View { token_stride: u64::MAX / 8 * 4, ..far }, ..good.clone() },
                    "out",
                ),
                (
                    "misaligned out",
                    MlaDecodeArgs { out: View { offset: 2, ..good.out }, ..good.clone() },
                    "out",
                ),
                (
                    "out in the cache",
                    MlaDecodeArgs { out: View { buffer: &kv, ..good.out }, ..good.clone() },
                    "out",
                ),
                (
                    "overlap",
                    MlaDecodeArgs { out: View { head_stride: 4, ..good.out }, ..good.clone() },
                    "out",
                ),
                (
                    "pages that overlap",
                    MlaDecodeArgs { kv: KvView { block_stride: 4, ..good.kv.clone() }, ..good.clone() },
                    "block_stride",
                ),
                (
                    "a layer past the buffer",
                    MlaDecodeArgs {
                        kv: KvView { layer: 1, layer_stride: 1 << 30, ..good.kv.clone() },
                        ..good.clone()
                    },
                    "kv",
                ),
            ] {
                refuses(session, what, decode.bind(&layer, tokens), why);
            }
            refuses(session, "too many queries", decode.bind(&good, 1 << 20), "q");
            Ok(())
        }();
        session.note("layers", result.map_err(|error| error.to_string()));
    }
    session.finish("refuses layers");
}

/// A query of given strides.
fn whole<B>(buffer: &B, token_stride: u64, head_stride: u64) -> Query<&B> {
    Query::Whole(View { buffer, offset: 0, token_stride, head_stride })
}

/// Scales of an e4m3 cache and query, each and as a product; those in the range are right, where logits are 0 and where they are not.
pub fn scale_products<B: Backend>(session: &Session<'_, B>) {
    let make = Make { cache: Dtype::E4m3, query: Dtype::E4m3, out: Dtype::F32, ..Make::default() };
    let problem = make.build();
    if !session.serves(&problem.spec) {
        session.leave_out();
        return session.finish("scale products");
    }
    let with =
        |softmax_scale, k_scale, q_scale| Problem { softmax_scale, k_scale, q_scale, ..problem.clone() };
    let result = || -> Result<(), Error> {
        let (backend, spec) = (session.backend, &problem.spec);
        let decode = session.decode(spec)?;
        let tokens = problem.total_q() as u32;
        let [q, kv] = [backend.buffer(problem.q.len() as u64)?, backend.buffer(problem.kv.len() as u64)?];
        let [out, lse] = [backend.buffer(spec.out_bytes(tokens))?, backend.buffer(spec.lse_bytes(tokens))?];
        let good = MlaDecodeArgs::dense(spec, &q, &kv, &out, &lse, 0.1);
        let product = "softmax_scale * k_scale * q_scale";
        for (softmax_scale, k_scale, q_scale, why) in [
            (0.1, 1e-45, 1.0, "k_scale 1e-45: must be finite and at least 2^-126"),
            (0.1, 1.0, 1e-39, "q_scale 1e-39: must be finite and at least 2^-126"),
            (0.1, 1e38, 1.0, product),
            (0.1, 1.0, 1e38, product),
            (1e-30, 1e-30, 1.0, "softmax_scale * k_scale * q_scale 1.0000"),
            (1.0, 1e-30, 1e-30, product),
            (1e20, 1e20, 1e20, product),
            (f32::MAX, 1.0, 1.0, product),
        ] {
            let args = MlaDecodeArgs { softmax_scale, k_scale, q_scale, ..good.clone() };
            let what = format!("{softmax_scale:e} * {k_scale:e} * {q_scale:e}");
            refuses(session, &what, decode.bind(&args, tokens), why);
        }
        Ok(())
    }();
    session.note("scale products", result.map_err(|error| error.to_string()));
    for (softmax_scale, k_scale, q_scale) in [
        (6e-31, 1.0, 1.0),
        (1e-30, 1e-3, 1e3),
        (1e-20, 1e15, 1e-25),
        (1e30, 1e-15, 1e-16),
        (f32::MIN_POSITIVE, 1e18, 1e19),
    ] {
        session.check(&with(softmax_scale, k_scale, q_scale), &How::default());
    }
    // With logits of 0 the largest scale is right too.
    for (softmax_scale, k_scale, q_scale) in [(8e29, 1.0, 1.0), (1e29, 2.0, 4.0)] {
        let mut zero = with(softmax_scale, k_scale, q_scale);
        zero.q.fill(0);
        session.check(&zero, &How::default());
    }
    session.finish("scale products");
}

/// Slots, scales, pages and sizes of the small ops.
pub fn refuses_ops<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 4, num_pages: 3 };
        let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let spec = KvAppend { shape, kv, input: Dtype::F32, guard: false };
        let [rows, cache] = [2 * 288 * 4, 12 * 288].map(|bytes| backend.buffer(bytes));
        let (rows, cache) = (rows?, cache?);
        let good = KvAppendArgs {
            kv_c: Strides::dense(1, 256).view(&rows),
            k_pe: Strides::dense(1, 32).view(&rows),
            kv: Pages::dense(&kv, 288).view(&cache),
            k_scale: 0.5,
            guard: None,
        };
        refuses(session, "slot 12 of 12", backend.once(spec, &[0, 12], &good), "12");
        refuses(session, "a slot twice", backend.once(spec, &[7, 7], &good), "7");
        refuses(session, "rows past their buffer", backend.once(spec, &[0, 1, 2], &good), "kv_c");
        for (kv_c, why) in [(0, "kv_c 0"), (128, "kv_c 128")] {
            let kv_c = View { token_stride: kv_c, ..good.kv_c };
            let layer = KvAppendArgs { kv_c, ..good.clone() };
            refuses(session, "one row for all tokens", backend.once(spec, &[0, 1], &layer), why);
        }
        let overlap = KvView { layer: 1, layer_stride: 4 * 288, ..good.kv.clone() };
        let layer = KvAppendArgs { kv: overlap, ..good };
        let two = KvAppend { kv: KvSpec { num_pages: 2, ..kv }, ..spec };
        refuses(session, "layers that overlap", backend.once(two, &[0], &layer), "layers overlap");
        for k_scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39, 1e-45] {
            let layer =
                KvAppendArgs { k_scale, kv_c: good.kv_c, k_pe: good.k_pe, kv: good.kv.clone(), guard: None };
            refuses(session, &format!("k_scale {k_scale}"), backend.once(spec, &[0], &layer), "k_scale");
        }
        let wide = KvAppend { kv: KvSpec { layout: Dtype::F16.into(), num_pages: 1, ..kv }, ..spec };
        refuses(session, "a scale of f16 rows", backend.once(wide, &[0], &good), "k_scale 0.5");
        let third = KvAppendArgs { kv: KvView { layer: 3, ..good.kv.clone() }, ..good };
        refuses(session, "a layer without a stride", backend.once(spec, &[0], &third), "layer_stride");
        let wrong = KvAppend { input: Dtype::E4m3, ..spec };
        refuses(session, "an e4m3 input", backend.once(wrong, &[0], &good), "e4m3");

        let copy = KvCopyPages { shape, kv };
        let half = KvCopyPages { shape: MlaShape { kv_lora_rank: 128, ..shape }, kv };
        refuses(session, "half a row", backend.once(half, &[(0, 1)], &good.kv), "kv_lora_rank");
        for (copies, why) in
            [(&[(0, 3)][..], "3"), (&[(9, 0)], "9"), (&[(0, 1), (1, 2)], "1"), (&[(0, 2), (1, 2)], "2")]
        {
            refuses(session, &format!("{copies:?}"), backend.once(copy, copies, &good.kv), why);
        }

        let state = Strides::dense(2, 8).view(&rows);
        let lse = Strides { offset: 0, token: 1, head: 4 }.view(&rows);
        let merge = MergeStateArgs {
            prefix_output: state,
            prefix_lse: lse,
            suffix_output: state,
            suffix_lse: lse,
            output: Strides { offset: 1 << 20, token: 16, head: 8 }.view(&cache),
            output_lse: None,
            num_tokens: 4,
            num_heads: 2,
            output_scale: 1.0,
        };
        for (dtype, head_size, why) in
            [(Dtype::F32, 8, "output"), (Dtype::E4m3, 8, "e4m3"), (Dtype::F32, 0, "head_size")]
        {
            let spec = MergeState { dtype, head_size };
            refuses(session, "a merge", backend.once(spec, (), &merge), why);
        }
        Ok(())
    }();
    session.note("ops", result.map_err(|error| error.to_string()));
    session.finish("refuses ops");
}
