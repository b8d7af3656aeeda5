// The end of the epilogue of kernels whose warpgroups stage their output in shared memory.
#pragma once

#include "decode_f32.cuh"
#include "mla.cuh"

// Writes the rows of the output, [ROWS, OUTPUT_PITCH] in place of the stages, a warp a row; or does them `again` in f32, as it does a row
// that sees keys but whose weights are all 0: the logits of those keys are -inf.
template <class T>
DEVICE void write_rows(const Args& args, const WorkItem& item, const u8* shared, u32 warp, bool again) {
    const float* staged = reinterpret_cast<const float*>(shared + T::STAGES_AT);
    const float* sums = reinterpret_cast<const float*>(shared + T::TOPS_AT);
    const float* tops = reinterpret_cast<const float*>(shared + T::SCALES_AT);
    const u32 lane = threadIdx.x % LANES;
#pragma unroll 1
    for (u32 row = warp; row < item.num_rows; row += T::WARPS) {
        const float total = sums[row] + sums[T::ROWS + row];
        const bool any = HAS_WEIGHT(total);
        const u32 index = item.first_row + row, head = index % args.num_heads;
        const float share = any && item.partial == DIRECT ? factor_of_row(total + sink_weight(args, head, tops[row])) : 1.0f;
        const QueryToken query = args.queries[index / args.num_heads];
        const u32 token = bound_token(args, query.token);
        if (again || (!any && min(query.visible, item.kv_end) > item.kv_begin)) {
            decode_row<typename T::Layout>(args, item, row);
            continue;
        }
        float* partial = args.partials + (static_cast<u64>(item.partial) + row) * (T::LATENT + 4);
        if (lane == 0) {
            if (item.partial == DIRECT) {
                store_lse(args, token, head, lse_of_row(tops[row], total), any);
            } else {
                store_weight(partial, T::LATENT, tops[row], total);
            }
        }
#pragma unroll 1
        for (u32 column = lane * 4; column < T::LATENT; column += LANES * 4) {
            float4 out = *reinterpret_cast<const float4*>(staged + row * T::OUTPUT_PITCH + column);
            out = make_float4(out.x * share, out.y * share, out.z * share, out.w * share);
            if (item.partial == DIRECT) {
                store_out(args, token, head, column, out.x, out.y);
                store_out(args, token, head, column + 2, out.z, out.w);
            } else {
                *reinterpret_cast<float4*>(partial + column) = out;
            }
        }
    }
}
