// Queries of mla_decode_wgmma_fp8.cuh: FP8 (e4m3) codes, from global to shared memory.
#pragma once

#include "wgmma_fp8_tile.cuh"

// A warp's query rows, a lane 8 codes of every 256. BATCH rows at a time: all loads are issued before the first is stored.
template <class T>
DEVICE void copy_query_codes(const Args& args, const WorkItem& item, u32 warp, u32 to, float* scales) {
    constexpr u32 BATCH = 4, CHUNKS = T::DIM / 8, LATENT_CHUNKS = T::LATENT / 8, LANE_CHUNKS = (CHUNKS + LANES - 1) / LANES;
    static_assert(T::ROWS % (BATCH * T::WARPS) == 0, "whole batches");
    const u32 lane = threadIdx.x % LANES;
#pragma unroll 1
    for (u32 first = warp; first < T::ROWS; first += BATCH * T::WARPS) {
        float2 codes[BATCH][LANE_CHUNKS];
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            const u32 index = item.first_row + min(first + b * T::WARPS, item.num_rows - 1);
            const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
            const float2* latent = reinterpret_cast<const float2*>(args.q_nope) + (token * args.q_nope_token_stride + head * args.q_nope_head_stride) / 8;
            const float2* rope = reinterpret_cast<const float2*>(args.q_pe) + (token * args.q_pe_token_stride + head * args.q_pe_head_stride) / 8;
#pragma unroll
            for (u32 i = 0; i < LANE_CHUNKS; i++) {
                const u32 chunk = i * LANES + lane;
                codes[b][i] = float2{};
                if (chunk < LATENT_CHUNKS) {
                    codes[b][i] = latent[chunk];
                } else if (chunk < CHUNKS) {
                    codes[b][i] = rope[chunk - LATENT_CHUNKS];
                }
            }
        }
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            const u32 row = first + b * T::WARPS;
            if (lane == 0) scales[row] = args.logit_scale;
#pragma unroll
            for (u32 i = 0; i < LANE_CHUNKS; i++) {
                const u32 chunk = i * LANES + lane;
                if (chunk < CHUNKS) store_8(to + T::QueryOrder::at(row, chunk / 2) + chunk % 2 * 8, codes[b][i].x, codes[b][i].y);
            }
        }
    }
}
