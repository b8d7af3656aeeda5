// The end of the epilogue of kernels whose warpgroups stage their output in shared memory.
#pragma once

#include "decode_f32.cuh"
#include "mla.cuh"

// Writes the rows of the output, [ROWS, OUTPUT_PITCH] in place of the stages, a warp a row; or does them `again` in f32, as it does a row that
// sees keys but whose weights are all 0: the logits of those keys are -inf.
template <class T>
DEVICE void write_rows(const Args& args, const WorkItem& item, const u8* shared, u32 warp, bool again) {
    const float* staged = reinterpret_cast<const float*>(shared + T::STAGES_AT);
    const float* sums = reinterpret_cast<const float*>(shared + T::TOPS_AT);
    const float* tops = reinterpret_cast<const float*>(shared + T::SCALES_AT);
    const u32 lane = threadIdx.x % LANES;
    const Destination destination(args, item);
#pragma unroll 1
    for (u32 row = warp; row < item.num_rows; row += T::WARPS) {
        const float total = sums[row] + sums[T::ROWS + row];
        const bool any = !(total == 0.0f); // NaN too
        const float share = any && destination.is_direct ? 1.0f / total : 1.0f;
        const u32 index = item.first_row + row, head = index % args.num_heads;
        const QueryToken query = args.queries[index / args.num_heads];
        const u32 token = bound_token(args, query.token);
        if (again || (!any && min(query.visible, item.kv_end) > item.kv_begin)) {
            decode_row<T::LATENT, T::DIM - T::LATENT, T::CACHE>(args, item, row);
            continue;
        }
        u8* to = destination.row<T::LATENT>(args, item, row, token, head);
        if (lane == 0) {
            if (destination.is_direct) {
                store_lse(args, token, head, tops[row] + log2_fast(total), any);
            } else {
                store_weight(reinterpret_cast<float*>(to), T::LATENT, tops[row], total);
            }
        }
#pragma unroll 1
        for (u32 column = lane * 4; column < T::LATENT; column += LANES * 4) {
            float4 out = *reinterpret_cast<const float4*>(staged + row * T::OUTPUT_PITCH + column);
            out = make_float4(out.x * share, out.y * share, out.z * share, out.w * share);
            destination.store(to, column, out);
        }
    }
}
