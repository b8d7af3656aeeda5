//! Ops of caches, of index caches and of lists.

use wgpu_mla::*;

use super::super::Session;
use super::bind_all;
use crate::cache::shape_of_row;

pub(super) fn bind<B: Backend>(
    session: &Session<'_, B>,
    [a, b, c, d, e, f, g, _]: &[B::Buffer; 8],
) -> Result<(), Error> {
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
        let append = KvAppend { shape, kv, input: Dtype::F32, guard: false };
        let rows = KvAppendArgs {
            kv_c: View::dense(a, 1, 256),
            k_pe: View::dense(e, 1, 32),
            kv: cache.clone(),
            k_scale: 1.0,
            guard: None,
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
    Ok(())
}

/// A view of the query.
fn part<T>(args: &mut MlaDecodeArgs<T>, index: usize) -> &mut View<T> {
    match (&mut args.query, index) {
        (Query::Whole(view) | Query::Split { q_nope: view, .. }, 0) => view,
        (Query::Split { q_pe, .. } | Query::Whole(q_pe), _) => q_pe,
    }
}
