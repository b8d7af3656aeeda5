//! Ops of each head's rows: rotations, projections, prefills and merges.

use wgpu_mla::*;

use super::super::Session;
use super::bind_all;

pub(super) fn bind<B: Backend>(
    session: &Session<'_, B>,
    [a, b, c, d, e, f, g, h]: &[B::Buffer; 8],
) -> Result<(), Error> {
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
            guard: false,
        };
        let args = HeadProjectArgs {
            x: View::dense(a, num_heads, 8),
            weight: WeightView { buffer: b, offset: 0, head_stride: 128, row_stride: 16, scales: None },
            y: View::dense(c, num_heads, 16),
            scale: 1.0,
            out_scale: 1.0,
            saturates: false,
            guard: None,
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
