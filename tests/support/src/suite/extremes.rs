//! Offsets and strides at the end of u64, on every op: an error or, where one is unread, nothing. Never an overflow.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use wgpu_mla::{
    Backend, CorrectAttnOut, CorrectAttnOutArgs, Dtype, Error, HeadProject, HeadProjectArgs, IndexFormat,
    IndexSpec, IndexerAppend, IndexerAppendArgs, IndexerLogits, IndexerLogitsArgs, IndexerLogitsExtent,
    IndexerQuery, IndexerQueryArgs, Kernel, KvAppend, KvAppendArgs, KvCalibrate, KvCalibrateArgs,
    KvCopyPages, KvGather, KvGatherArgs, KvSpec, KvView, LseBase, MergeState, MergeStateArgs, MergeStates,
    MergeStatesArgs, MergeStatesExtent, MlaDecode, MlaDecodeArgs, MlaPrefill, MlaPrefillArgs, MlaShape, Op,
    PrefillExtent, Query, ReorgExtent, ReorgKvCache, ReorgKvCacheArgs, Rope, RopeAppend, RopeAppendArgs,
    RopeAppendExtent, RopeArgs, RopeLayout, TopK, TopKArgs, TopKExtent, View, WeightOrder, WeightView,
    for_each_op,
};

use super::Session;
use crate::cache::shape_of_row;

/// Numbers whose sums and products with counts and sizes leave u64, multiples of every unit among them.
const NUMBERS: [u64; 7] =
    [u64::MAX, u64::MAX - 7, 1 << 63, (1 << 63) - 8, u64::MAX / 2 + 9, u64::MAX / 4 * 2, (1 << 61) + 8];

/// A number of arguments, by name.
type Place<A> = (&'static str, fn(&mut A) -> &mut u64);

macro_rules! places {
    ($($($part:ident).+),* $(,)?) => {
        &[$((stringify!($($part).+), |args| &mut args.$($part).+)),*]
    };
}

thread_local! {
    /// The ops that were bound.
    static BOUND: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

/// Binds with each number at each place, for each room.
fn bind_all<'a, O, B>(
    session: &Session<'_, B>,
    op: O,
    good: O::Args<&'a B::Buffer>,
    rooms: &[O::Extent],
    places: &[Place<O::Args<&'a B::Buffer>>],
) -> Result<(), Error>
where
    O: Op,
    B: Backend + Kernel<O>,
    O::Args<&'a B::Buffer>: Clone,
{
    BOUND.with_borrow_mut(|bound| bound.insert(O::NAME));
    let compiled = session.backend.compile(op)?;
    for &room in rooms {
        let what = format!("{} for {room:?}", O::NAME);
        session.note(&what, compiled.bind(&good, room).map(drop).map_err(|error| error.to_string()));
        for &(place, at) in places {
            for number in NUMBERS {
                let mut args = good.clone();
                *at(&mut args) = number;
                let bound = catch_unwind(AssertUnwindSafe(|| compiled.bind(&args, room).map(drop)));
                let result = match bound {
                    Ok(Ok(()) | Err(_)) => Ok(()),
                    Err(panic) => {
                        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                        Err(text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default())
                    }
                };
                session.note(&format!("{what}, {place} {number}"), result);
            }
        }
    }
    Ok(())
}

/// Every number of every op's arguments.
pub fn extreme_views<B: Backend>(session: &Session<'_, B>) {
    BOUND.take();
    let result = all(session);
    session.note("extreme views", result.map_err(|error| error.to_string()));
    macro_rules! names {
        ($($op:ty),*) => { [$(<$op>::NAME),*] };
    }
    let bound = BOUND.take();
    for name in for_each_op!(names) {
        let result = if bound.contains(name) { Ok(()) } else { Err("no arguments here".to_owned()) };
        session.note(&format!("{name} is bound"), result);
    }
    session.finish("extreme views");
}

fn all<B: Backend>(session: &Session<'_, B>) -> Result<(), Error> {
    let backend = session.backend;
    let buffer = || backend.buffer(1 << 16);
    let buffers = [buffer()?, buffer()?, buffer()?, buffer()?, buffer()?, buffer()?, buffer()?, buffer()?];
    let [a, b, c, d, e, f, g, h] = &buffers;
    let shape = MlaShape { num_heads: 2, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    for num_pages in [1, 3] {
        let kv = KvSpec { layout: Dtype::Bf16.into(), page_size: 4, num_pages };
        let decode = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::Bf16 };
        let cache = KvView { layer: 1, layer_stride: 2 * 2048 * 3, ..KvView::dense(b, &decode) };
        let split = MlaDecodeArgs {
            query: Query::Split { q_nope: View::dense(a, 2, 256), q_pe: View::dense(e, 2, 32) },
            kv: cache.clone(),
            lse_base: LseBase::E,
            ..MlaDecodeArgs::dense(&decode, a, b, c, d, 0.1)
        };
        bind_all(
            session,
            decode,
            split.clone(),
            &[0, 1, 2],
            places![
                kv.offset,
                kv.layer_stride,
                kv.block_stride,
                out.offset,
                out.token_stride,
                out.head_stride,
                lse.offset,
                lse.token_stride,
                lse.head_stride,
            ],
        )?;
        bind_all(
            session,
            decode,
            split.clone(),
            &[0, 1, 2],
            &[
                ("q_nope.offset", |args| &mut part(args, 0).offset),
                ("q_nope.token_stride", |args| &mut part(args, 0).token_stride),
                ("q_nope.head_stride", |args| &mut part(args, 0).head_stride),
                ("q_pe.offset", |args| &mut part(args, 1).offset),
                ("q_pe.token_stride", |args| &mut part(args, 1).token_stride),
                ("q_pe.head_stride", |args| &mut part(args, 1).head_stride),
            ],
        )?;
        let whole = MlaDecodeArgs { query: Query::Whole(View::dense(a, 2, 288)), ..split };
        bind_all(
            session,
            decode,
            whole,
            &[0, 1, 2],
            &[
                ("q.offset", |args| &mut part(args, 0).offset),
                ("q.token_stride", |args| &mut part(args, 0).token_stride),
                ("q.head_stride", |args| &mut part(args, 0).head_stride),
            ],
        )?;
        let append = KvAppend { shape, kv, input: Dtype::F32 };
        let rows = KvAppendArgs {
            kv_c: View::dense(a, 1, 256),
            k_pe: View::dense(e, 1, 32),
            kv: cache.clone(),
            k_scale: 1.0,
        };
        bind_all(
            session,
            append,
            rows.clone(),
            &[0, 1, 2],
            places![
                kv_c.offset,
                kv_c.token_stride,
                kv_c.head_stride,
                k_pe.offset,
                k_pe.token_stride,
                k_pe.head_stride,
                kv.offset,
                kv.layer_stride,
                kv.block_stride,
            ],
        )?;
        let (layout, query, num_heads) = (RopeLayout::Interleaved, Dtype::F32, 2);
        let rope_append = RopeAppend { append, query, query_out: query, num_heads, layout };
        let args = RopeAppendArgs {
            q_pe: View::dense(c, 2, 32),
            q_pe_out: View::dense(d, 2, 32),
            layer: rows,
            positions: f,
            cos_sin: g,
            max_position: 8,
            q_pe_scale: 1.0,
            q_scale: 1.0,
        };
        bind_all(
            session,
            rope_append,
            args,
            &[0, 1, 2].map(RopeAppendExtent::of),
            places![
                q_pe.offset,
                q_pe.token_stride,
                q_pe.head_stride,
                q_pe_out.offset,
                q_pe_out.token_stride,
                q_pe_out.head_stride,
                layer.kv_c.offset,
                layer.kv_c.token_stride,
                layer.k_pe.offset,
                layer.k_pe.token_stride,
                layer.kv.offset,
                layer.kv.layer_stride,
                layer.kv.block_stride,
            ],
        )?;
        bind_all(
            session,
            KvCopyPages { shape: shape_of_row(288), kv },
            cache.clone(),
            &[()],
            places![offset, layer_stride, block_stride,],
        )?;
        let reorg = ReorgKvCacheArgs {
            gathered: View::dense(a, 1, 288),
            rank_stride: 288 * 2,
            out: View::dense(c, 1, 288),
        };
        let rooms = [(0, 0, 0), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)];
        bind_all(
            session,
            ReorgKvCache { dtype: Dtype::F32, row_elems: 288 },
            reorg,
            &rooms.map(|(rows, local_rows, world)| ReorgExtent { rows, local_rows, world }),
            places![gathered.offset, gathered.token_stride, rank_stride, out.offset, out.token_stride,],
        )?;
        let index = IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: 4, num_pages };
        let args = IndexerAppendArgs {
            k: View::dense(a, 1, 128),
            norm_weight: e,
            norm_bias: f,
            norm_eps: 1e-6,
            positions: c,
            cos_sin: g,
            max_position: 8,
            cache: index.view_of_layer(b, 1),
        };
        bind_all(
            session,
            IndexerAppend { index, input: Dtype::F32 },
            args,
            &[0, 1, 2].map(RopeAppendExtent::of),
            places![
                k.offset,
                k.token_stride,
                k.head_stride,
                cache.offset,
                cache.layer_stride,
                cache.block_stride,
            ],
        )?;
        let gather = KvGatherArgs { kv: cache, k_scale: 1.0, out: View::dense(c, 1, 288) };
        bind_all(
            session,
            KvGather { shape, kv, output: Dtype::F32 },
            gather,
            &[0, 1, 2],
            places![
                kv.offset,
                kv.layer_stride,
                kv.block_stride,
                out.offset,
                out.token_stride,
                out.head_stride,
            ],
        )?;
    }
    for (num_pages, layers) in [(1, 1), (3, 2)] {
        let index = IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: 4, num_pages };
        let args = IndexerLogitsArgs {
            q: View::dense(a, 2, 128),
            weights: View::dense(b, 2, 1),
            cache: index.view_of_layer(c, layers - 1),
            logits: View::dense(d, 1, 12),
        };
        let room = |rows| IndexerLogitsExtent { tokens: rows, rows, columns: 4 * rows };
        bind_all(
            session,
            IndexerLogits { index, num_heads: 2, query: Dtype::E4m3 },
            args,
            &[room(0), room(1), room(3)],
            places![
                q.offset,
                q.token_stride,
                q.head_stride,
                weights.offset,
                weights.token_stride,
                weights.head_stride,
                cache.offset,
                cache.layer_stride,
                cache.block_stride,
                logits.offset,
                logits.token_stride,
                logits.head_stride,
            ],
        )?;
    }
    let calibrate =
        KvCalibrateArgs { kv_c: View::dense(a, 1, 256), k_pe: View::dense(e, 1, 32), k_scale: 1.0, stats: c };
    bind_all(
        session,
        KvCalibrate { shape, input: Dtype::F32 },
        calibrate,
        &[0, 1, 2],
        places![
            kv_c.offset,
            kv_c.token_stride,
            kv_c.head_stride,
            k_pe.offset,
            k_pe.token_stride,
            k_pe.head_stride,
        ],
    )?;
    let chosen = TopKArgs {
        logits: View::dense(a, 1, 50),
        columns: 50,
        lengths: b,
        indices: View::dense(c, 1, 8),
        values: Some(View::dense(d, 1, 8)),
    };
    let room = |rows, out_rows| TopKExtent { rows, columns: 50, out_rows };
    bind_all(
        session,
        TopK { k: 8, slots: None },
        chosen,
        &[room(0, 0), room(1, 1), room(2, 1), room(1, 2), room(2, 2)],
        places![
            logits.offset,
            logits.token_stride,
            logits.head_stride,
            indices.offset,
            indices.token_stride,
            indices.head_stride,
        ],
    )?;
    let f32s = Dtype::F32;
    for num_heads in [1, 2] {
        let rope = Rope { dtype: f32s, num_heads, rope_dim: 32, layout: RopeLayout::HalfSplit };
        for y in [d, c] {
            let args = RopeArgs {
                x: View::dense(c, num_heads, 32),
                y: View::dense(y, num_heads, 32),
                positions: f,
                cos_sin: g,
                max_position: 8,
                scale: 1.0,
            };
            bind_all(
                session,
                rope,
                args,
                &[0, 1, 2],
                places![x.offset, x.token_stride, x.head_stride, y.offset, y.token_stride, y.head_stride,],
            )?;
        }
        let query = IndexerQuery { format: IndexFormat::GLM_5, num_heads, input: f32s };
        let args = IndexerQueryArgs {
            q: View::dense(a, num_heads, 128),
            weights: View::dense(b, num_heads, 1),
            q_out: View::dense(c, num_heads, 128),
            weights_out: View::dense(d, num_heads, 1),
            positions: f,
            cos_sin: g,
            max_position: 8,
            weight_scale: 0.1,
        };
        bind_all(
            session,
            query,
            args,
            &[0, 1, 2].map(RopeAppendExtent::of),
            places![
                q.offset,
                q.token_stride,
                q.head_stride,
                weights.offset,
                weights.token_stride,
                weights.head_stride,
                q_out.offset,
                q_out.token_stride,
                q_out.head_stride,
                weights_out.offset,
                weights_out.token_stride,
                weights_out.head_stride,
            ],
        )?;
        let project = HeadProject {
            input: f32s,
            weight: f32s.into(),
            output: f32s,
            num_heads,
            k: 8,
            n: 16,
            order: WeightOrder::Kn,
        };
        let args = HeadProjectArgs {
            x: View::dense(a, num_heads, 8),
            weight: WeightView { buffer: b, offset: 0, head_stride: 128, row_stride: 16, scales: None },
            y: View::dense(c, num_heads, 16),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
        };
        bind_all(
            session,
            project,
            args,
            &[0, 1, 2],
            places![
                x.offset,
                x.token_stride,
                x.head_stride,
                weight.offset,
                weight.head_stride,
                weight.row_stride,
                y.offset,
                y.token_stride,
                y.head_stride,
            ],
        )?;
        let prefill = MlaPrefill {
            num_heads,
            qk_nope_head_dim: 32,
            qk_rope_head_dim: 32,
            v_head_dim: 32,
            dtype: f32s,
            out: f32s,
        };
        let view = |buffer| View::dense(buffer, num_heads, 32);
        let args = MlaPrefillArgs {
            q_nope: view(a),
            q_pe: view(b),
            k_nope: view(c),
            k_pe: View { head_stride: 0, ..View::dense(d, 1, 32) },
            v: view(e),
            out: view(f),
            lse: View::dense(g, num_heads, 1),
            softmax_scale: 0.1,
            v_scale: 1.0,
        };
        let room = |count| PrefillExtent { tokens: count, keys: count, rows: count };
        bind_all(
            session,
            prefill,
            args,
            &[room(0), room(1), room(2)],
            places![
                q_nope.offset,
                q_nope.token_stride,
                q_nope.head_stride,
                q_pe.offset,
                q_pe.token_stride,
                q_pe.head_stride,
                k_nope.offset,
                k_nope.token_stride,
                k_nope.head_stride,
                k_pe.offset,
                k_pe.token_stride,
                k_pe.head_stride,
                v.offset,
                v.token_stride,
                v.head_stride,
                out.offset,
                out.token_stride,
                out.head_stride,
                lse.offset,
                lse.token_stride,
                lse.head_stride,
            ],
        )?;
        for num_tokens in [0, 1, 2] {
            let args = MergeStateArgs {
                prefix_output: view(a),
                prefix_lse: View::dense(b, num_heads, 1),
                suffix_output: view(c),
                suffix_lse: View::dense(d, num_heads, 1),
                output: view(e),
                output_lse: None,
                num_tokens,
                num_heads,
                output_scale: 1.0,
            };
            bind_all(
                session,
                MergeState { dtype: f32s, head_size: 32 },
                args,
                &[()],
                places![
                    prefix_output.offset,
                    prefix_output.token_stride,
                    prefix_output.head_stride,
                    prefix_lse.offset,
                    prefix_lse.token_stride,
                    prefix_lse.head_stride,
                    suffix_output.offset,
                    suffix_lse.offset,
                    output.offset,
                    output.token_stride,
                    output.head_stride,
                ],
            )?;
        }
        let args = MergeStatesArgs {
            states: view(a),
            set_stride: 128,
            lse: View::dense(b, num_heads, 1),
            lse_set_stride: 8,
            output: view(c),
            output_lse: Some(View::dense(h, num_heads, 1)),
            lse_base: LseBase::E,
            num_heads,
            output_scale: 1.0,
        };
        let rooms = [(0, 1), (1, 1), (2, 1), (2, 2)].map(|(tokens, sets)| MergeStatesExtent { tokens, sets });
        // Rows that are a multiple of 8 elements, and others.
        for head_size in [32, 31] {
            bind_all(
                session,
                MergeStates { dtype: f32s, head_size },
                args,
                &rooms,
                places![
                    states.offset,
                    states.token_stride,
                    states.head_stride,
                    set_stride,
                    lse.offset,
                    lse.token_stride,
                    lse.head_stride,
                    lse_set_stride,
                    output.offset,
                    output.token_stride,
                    output.head_stride,
                ],
            )?;
        }
        let args = CorrectAttnOutArgs {
            out: view(a),
            lses: View::dense(b, num_heads, 1),
            lse_rank_stride: 8,
            output: view(c),
            output_lse: Some(View::dense(h, num_heads, 1)),
            lse_base: LseBase::E,
            world: 2,
            rank: 1,
            num_heads,
        };
        for head_size in [32, 31] {
            bind_all(
                session,
                CorrectAttnOut { dtype: f32s, head_size },
                args,
                &[0, 1, 2],
                places![
                    out.offset,
                    out.token_stride,
                    out.head_stride,
                    lses.offset,
                    lses.token_stride,
                    lses.head_stride,
                    lse_rank_stride,
                    output.offset,
                    output.token_stride,
                    output.head_stride,
                ],
            )?;
        }
    }
    Ok(())
}

/// A view of the query.
fn part<T>(args: &mut MlaDecodeArgs<T>, index: usize) -> &mut View<T> {
    match (&mut args.query, index) {
        (Query::Whole(view) | Query::Split { q_nope: view, .. }, 0) => view,
        (Query::Split { q_pe, .. } | Query::Whole(q_pe), _) => q_pe,
    }
}
