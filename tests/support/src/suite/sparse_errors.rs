//! What a decode of lists or with sinks refuses, and what other ops do with lists: each error names the cure.

use wgpu_mla::{
    Backend, Batch, Capacity, DecodeOptions, Dtype, Error, GatherBatch, Indices, KvGather, KvGatherArgs,
    LayerBatch, LayerOptions, MlaDecode, MlaDecodeArgs, PageTable, Plan, RopeLayout, SlabTable, SparseBatch,
    SplitPolicy, View,
};

use super::Session;
use super::errors::refuses;
use super::layer_rig;
use super::run::{How, dense_table};
use crate::paint::{Lengths, Lists, Make, Problem};

const TOPK: u32 = 24;

/// Lists and sinks that a decode was not compiled for, and the reverse; plans, page tables and arrays that do not fit.
pub fn refuses_lists<B: Backend>(session: &Session<'_, B>) {
    let dense = Make { heads: 2, ..Make::default() }.build();
    let listed = dense.listed(Lists::drawn(&dense, TOPK as usize, Lengths::All, 1));
    let note = |what: &str, result: Result<(), Error>| match result {
        // A forced variant may not serve these dims at all.
        Err(Error::VariantUnavailable { .. }) => session.leave_out(),
        result => session.note(what, result.map_err(|error| error.to_string())),
    };
    note("options", options(session, &dense.spec));
    note("a dense decode", without_lists(session, &dense));
    note("other ops", other_ops(session, &dense));
    if session.takes_inputs(&listed, &How::default()) {
        note("a sparse decode", with_lists(session, &listed));
    }
    let sunk = dense.with_sinks();
    if session.takes_inputs(&sunk, &How::default()) {
        note("sinks", with_sinks(session, &sunk));
    }
    session.finish("refuses lists");
}

fn options<B: Backend>(session: &Session<'_, B>, spec: &MlaDecode) -> Result<(), Error> {
    let compiled = |topk, device_page_list| {
        let options = DecodeOptions { topk, device_page_list, ..DecodeOptions::default() };
        session.backend.compile_with(*spec, &options).map(drop)
    };
    refuses(session, "lists past i32", compiled(1 << 31, false), "DecodeOptions::topk");
    refuses(session, "lists of u32::MAX", compiled(u32::MAX, false), "must be below 2^31");
    refuses(session, "lists and a page list", compiled(8, true), "topk or device_page_list, not both");
    Ok(())
}

/// Buffers of a problem's sizes.
struct Arrays<T> {
    q: T,
    kv: T,
    out: T,
    lse: T,
    lists: T,
    lengths: T,
}

impl<T> Arrays<T> {
    fn new<B: Backend<Buffer = T>>(backend: &B, problem: &Problem) -> Result<Self, Error> {
        let (spec, tokens) = (&problem.spec, problem.total_q() as u32);
        let buffer = |bytes: u64| backend.buffer(bytes);
        Ok(Self {
            q: buffer(spec.query_bytes(tokens))?,
            kv: buffer(spec.cache_bytes())?,
            out: buffer(spec.out_bytes(tokens))?,
            lse: buffer(spec.lse_bytes(tokens))?,
            lists: buffer(u64::from(tokens * TOPK) * 4)?,
            lengths: buffer(u64::from(tokens) * 4)?,
        })
    }

    fn args(&self, problem: &Problem) -> MlaDecodeArgs<&T> {
        let Self { q, kv, out, lse, .. } = self;
        MlaDecodeArgs::dense(&problem.spec, q, kv, out, lse, problem.softmax_scale)
    }
}

fn without_lists<B: Backend>(session: &Session<'_, B>, dense: &Problem) -> Result<(), Error> {
    let (spec, tokens) = (&dense.spec, dense.total_q() as u32);
    let decode = session.decode(spec)?;
    let arrays = Arrays::new(session.backend, dense)?;
    let good = arrays.args(dense);
    decode.bind(&good, tokens)?;
    let lists = Indices::dense(&arrays.lists, TOPK);
    let with = MlaDecodeArgs { indices: Some(lists), ..good.clone() };
    refuses(session, "lists", decode.bind(&with, tokens), "compiled with DecodeOptions::topk");
    let with = MlaDecodeArgs { attn_sink: Some(vec![0.0; 2]), ..good };
    refuses(session, "sinks", decode.bind(&with, tokens), "compiled with DecodeOptions::attn_sink");

    let batch = Batch::new(&dense.seq_lens, &dense.query_start_loc);
    let plan = Plan::new(spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
    let sparse = Plan::sparse(spec, &decode.tiling(), &SparseBatch::new(tokens, TOPK), SplitPolicy::Auto)?;
    let mut step = decode.step(Capacity::default())?;
    let mut prepare = |plan: &Plan, pages| decode.prepare(&mut step, (plan, pages));
    refuses(session, "slots for pages", prepare(&plan, PageTable::Indices), "give it page ids");
    for pages in [PageTable::Indices, dense_table(dense)] {
        let refused = prepare(&sparse, pages);
        refuses(session, "a plan of lists", refused, "needs a decode compiled with DecodeOptions::topk");
    }
    prepare(&plan, dense_table(dense))?;

    let slabs = Some(SlabTable { pages: PageTable::Indices, slab_pages: 2 });
    let planned = Plan::new(spec, &decode.tiling(), &Batch { slabs, ..batch }, SplitPolicy::Auto);
    refuses(session, "a slab's slots for pages", planned.map(drop), "PageTable::Indices");
    for (topk, why) in [(0, "topk of the plan"), (1 << 31, "topk of the plan")] {
        let batch = SparseBatch::new(tokens, topk);
        let planned = Plan::sparse(spec, &decode.tiling(), &batch, SplitPolicy::Auto);
        refuses(session, &format!("a plan of lists of {topk}"), planned.map(drop), why);
    }
    let batch = SparseBatch { slab_pages: Some(0), ..SparseBatch::new(tokens, TOPK) };
    let planned = Plan::sparse(spec, &decode.tiling(), &batch, SplitPolicy::Auto);
    refuses(session, "slabs of no page", planned.map(drop), "slab");
    let batch = SparseBatch::new(tokens, TOPK);
    let planned = Plan::sparse(spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(0));
    refuses(session, "splits of no entry", planned.map(drop), "tokens per split");
    Ok(())
}

fn with_lists<B: Backend>(session: &Session<'_, B>, listed: &Problem) -> Result<(), Error> {
    let (spec, tokens) = (&listed.spec, listed.total_q() as u32);
    let decode = session.decode_of(listed, &How::default())?;
    let arrays = Arrays::new(session.backend, listed)?;
    let lists = Indices::dense(&arrays.lists, TOPK);
    let lengths = View::dense(&arrays.lengths, 1, 1);
    let good = MlaDecodeArgs {
        indices: Some(Indices { topk_length: Some(lengths), ..lists }),
        ..arrays.args(listed)
    };
    decode.bind(&good, tokens)?;
    let slots = |slots| Some(Indices { slots, ..lists });
    let lengths_at = |view| Some(Indices { topk_length: Some(view), ..lists });
    let view = lists.slots;
    for (what, indices, why) in [
        ("no lists", None, "needs MlaDecodeArgs::indices"),
        ("lists past their buffer", slots(View { offset: 1, ..view }), "indices"),
        ("far lists", slots(View { token_stride: u64::MAX / 2, ..view }), "indices"),
        ("lists of every second word", slots(View { head_stride: 2, ..view }), "indices head_stride"),
        ("lists in the output", slots(View { buffer: &arrays.out, ..view }), "indices and out"),
        ("lists in the LSE", slots(View { buffer: &arrays.lse, token_stride: 0, ..view }), "indices"),
        ("lengths past their buffer", lengths_at(View { offset: 1 << 16, ..lengths }), "topk_length"),
        ("lengths in the LSE", lengths_at(View { buffer: &arrays.lse, ..lengths }), "topk_length and lse"),
    ] {
        let bound = decode.bind(&MlaDecodeArgs { indices, ..good.clone() }, tokens);
        refuses(session, what, bound, why);
    }
    refuses(session, "a list too few", decode.bind(&good, tokens + 1), "q");
    let sunk = MlaDecodeArgs { attn_sink: Some(vec![0.0; 2]), ..good };
    refuses(session, "sinks", decode.bind(&sunk, tokens), "compiled with DecodeOptions::attn_sink");

    let tiling = decode.tiling();
    let batch = Batch::new(&listed.seq_lens, &listed.query_start_loc);
    let dense = Plan::new(spec, &tiling, &batch, SplitPolicy::Auto)?;
    let sparse = |topk| Plan::sparse(spec, &tiling, &SparseBatch::new(tokens, topk), SplitPolicy::Auto);
    let mut step = decode.step(Capacity::default())?;
    let mut prepare = |plan: &Plan, pages| decode.prepare(&mut step, (plan, pages));
    for pages in [dense_table(listed), PageTable::Indices] {
        refuses(session, "a plan of pages", prepare(&dense, pages), "needs a plan of Plan::sparse");
    }
    let refused = prepare(&sparse(TOPK)?, dense_table(listed));
    refuses(session, "pages", refused, "takes PageTable::Indices");
    let refused = prepare(&sparse(TOPK)?, PageTable::Device);
    refuses(session, "a page list of the device", refused, "DecodeOptions::");
    let refused = prepare(&sparse(TOPK + 1)?, PageTable::Indices);
    refuses(session, "longer lists", refused, "must be at most DecodeOptions::topk");
    let other = MlaDecode { shape: wgpu_mla::MlaShape { num_heads: 3, ..spec.shape }, ..*spec };
    let other = Plan::sparse(&other, &tiling, &SparseBatch::new(tokens, TOPK), SplitPolicy::Auto)?;
    refuses(session, "lists of other heads", prepare(&other, PageTable::Indices), "num_heads");
    prepare(&sparse(1)?, PageTable::Indices)?;
    // Nothing to do, in both kinds.
    let none = Plan::sparse(spec, &tiling, &SparseBatch::new(0, TOPK), SplitPolicy::Auto)?;
    prepare(&none, PageTable::Indices)
}

fn with_sinks<B: Backend>(session: &Session<'_, B>, sunk: &Problem) -> Result<(), Error> {
    let tokens = sunk.total_q() as u32;
    let decode = session.decode_of(sunk, &How::default())?;
    let arrays = Arrays::new(session.backend, sunk)?;
    let with =
        |sinks: Option<&[f32]>| MlaDecodeArgs { attn_sink: sinks.map(<[f32]>::to_vec), ..arrays.args(sunk) };
    decode.bind(&with(Some(&[f32::NEG_INFINITY, f32::INFINITY])), tokens)?;
    for (what, sinks, why) in [
        ("no sinks", None, "needs MlaDecodeArgs::attn_sink"),
        ("a sink of NaN", Some(&[0.0, f32::NAN][..]), "attn_sink"),
        ("a sink too few", Some(&[0.0]), "one sink a head"),
        ("a sink too many", Some(&[0.0; 3]), "one sink a head"),
        ("none of the sinks", Some(&[]), "one sink a head"),
    ] {
        refuses(session, what, decode.bind(&with(sinks), tokens), why);
    }
    Ok(())
}

/// Ops that need pages.
fn other_ops<B: Backend>(session: &Session<'_, B>, dense: &Problem) -> Result<(), Error> {
    let backend = session.backend;
    let (shape, kv) = (dense.spec.shape, dense.spec.kv);
    let arrays = Arrays::new(backend, dense)?;
    let args = KvGatherArgs {
        kv: arrays.args(dense).kv,
        k_scale: 1.0,
        out: View::dense(&arrays.q, 1, shape.row_elems()),
    };
    let batch = GatherBatch { pages: PageTable::Indices, seq_lens: &[], ranges: &[] };
    let gathered = backend.once(KvGather { shape, kv, output: Dtype::Bf16 }, batch, &args);
    refuses(session, "a gather of slots", gathered, "PageTable::Indices has no pages");

    let spec = layer_rig::spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 24);
    let layer = backend.compile_with(spec, &LayerOptions::default())?;
    let batch = LayerBatch {
        seq_lens: &[1],
        query_start_loc: &[0, 1],
        slot_mapping: &[0],
        pages: PageTable::Indices,
        shared_prefixes: &[],
        expanded: &[],
    };
    let prepared = layer.prepare(&mut layer.step(Default::default())?, (&batch, SplitPolicy::Auto));
    refuses(session, "a layer over slots", prepared, "PageTable::Indices has no pages");
    Ok(())
}
