// Softmax of mla_decode_swap_fp8.cuh: a tile's tokens lie in the warps of a warpgroup, of which a lane has two of each query row that it
// has.
#pragma once

#include "swap_fp8_tile.cuh"
#include "swap_row_sums.cuh"

// A lane's accumulators of a wgmma tile, [64 rows in a warpgroup, 8 query rows each]: two rows x two query rows.
template <class T>
using Sums = float[T::ROW_TILES][4];

// What a block knows of its query rows, in shared memory, and the two of each eight that a lane has.
template <class T>
struct SharedRows {
    u8* const shared;

    DEVICE float* maxima() const { return reinterpret_cast<float*>(shared + T::MAXIMA_AT); }
    DEVICE float* factors() const { return reinterpret_cast<float*>(shared + T::FACTORS_AT); }
    DEVICE float* tops() const { return reinterpret_cast<float*>(shared + T::TOPS_AT); }
    DEVICE float* scales() const { return reinterpret_cast<float*>(shared + T::SCALES_AT); }
    DEVICE u32* seen() const { return reinterpret_cast<u32*>(shared + T::SEEN_AT); } // so many of the item's keys are visible
    DEVICE volatile u32* moved() const { return reinterpret_cast<u32*>(shared + T::MOVED_AT); }
    DEVICE static u32 first_row() { return threadIdx.x % 4 * 2; }

    DEVICE float2 pair(const float* of, int tile) const { return *reinterpret_cast<const float2*>(of + first_row() + tile * 8); }

    // Sets what rows begin with, by all multiplying warps. Returns how many of the item's keys all rows see.
    DEVICE u32 begin(const Args& args, const WorkItem& item, u32 warp) const {
        u32 seen_by_all = ~0u;
#pragma unroll
        for (u32 row = threadIdx.x % LANES; row < T::ROWS; row += LANES) {
            const u32 index = item.first_row + min(row, item.num_rows - 1), before = max(min(args.queries[index / args.num_heads].visible, item.kv_end), item.kv_begin) - item.kv_begin;
            seen_by_all = min(seen_by_all, before);
            if (warp == 0) {
                seen()[row] = before;
                tops()[row] = EMPTY;
            }
        }
        return __reduce_min_sync(~0u, seen_by_all);
    }

    // Masks the tokens that rows do not see. `first_token` is the lane's first, counted from the item's begin.
    DEVICE void mask(Sums<T>& logits, u32 first_token) const {
        asm volatile(""); // keeps the caller's branch: few tiles have masked tokens
#pragma unroll
        for (int j = 0; j < T::ROW_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (first_token + e / 2 * 8 >= seen()[first_row() + j * 8 + e % 2]) logits[j][e] = NO_WEIGHT;
    }

    // Weights relative to the running maxima to shared memory, two query rows a word, and a lane's sums of them by row. Whether some logit
    // is above its row's maximum by more than LAZY.
    DEVICE bool weigh(const Sums<T>& logits, u32 to, float (&fresh)[T::ROW_TILES][2]) const {
        constexpr int BATCH = T::ROW_TILES < 4 ? T::ROW_TILES : 4; // of loads, all issued before the first is used
        bool grows = false;
#pragma unroll
        for (int first = 0; first < T::ROW_TILES; first += BATCH) {
            float2 scale[BATCH], top[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                scale[i] = pair(scales(), first + i);
                top[i] = pair(tops(), first + i);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int j = first + i;
                fresh[j][0] = fresh[j][1] = 0.0f;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float low = fmaf(logits[j][2 * h], scale[i].x, -top[i].x), high = fmaf(logits[j][2 * h + 1], scale[i].y, -top[i].y);
                    grows |= low > LAZY || high > LAZY;
                    const float one = exp2_fast(low), other = exp2_fast(high);
                    fresh[j][0] += one;
                    fresh[j][1] += other;
                    store_4((to ^ j << 4) + h * (8 * 128), pack_f16(one, other));
                }
            }
        }
        return grows;
    }

    // Moves the running maxima that logits of the warpgroup's tile exceed by more than LAZY, by all of its warps, and sets its factors of
    // what was summed before. `barrier` is the warpgroup's.
    DEVICE void move_tops(const Sums<T>& logits, u32 warp, u32 barrier) const {
        const u32 group = warp / 4;
#pragma unroll
        for (int j = 0; j < T::ROW_TILES; j++) {
            const float2 scale = pair(scales(), j);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float largest = fmaxf(logits[j][e], logits[j][e + 2]) * (e ? scale.y : scale.x);
#pragma unroll
                for (int lanes = 4; lanes < LANES; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
                if (threadIdx.x % LANES < 4) maxima()[warp * T::ROWS + first_row() + j * 8 + e] = largest;
            }
        }
        bar_sync<4>(barrier);
        if (const u32 row = threadIdx.x % (4 * LANES); row < T::ROWS) {
            float largest = EMPTY;
#pragma unroll
            for (int w = 0; w < 4; w++) largest = fmaxf(largest, maxima()[(group * 4 + w) * T::ROWS + row]);
            const float top = tops()[row], now = largest > top + LAZY ? largest : top;
            factors()[group * T::ROWS + row] = exp2_fast(top - now);
            tops()[row] = now;
        }
        bar_sync<4>(barrier);
    }

    // Puts row sums and maxima, of a lane's sums of its tokens, where write_rows looks for them. By all multiplying warps.
    DEVICE void finish(float (&sum)[T::ROW_TILES][2], u32 warp) const {
        share_sums_turned<T>(sum, maxima(), warp, threadIdx.x % LANES, first_row());
        bar_sync<T::WARPS>(1);
        if (const u32 row = threadIdx.x; row < T::ROWS) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < T::WARPS; w++) total += maxima()[w * T::ROWS + row];
            scales()[row] = tops()[row];
            tops()[row] = total;
            tops()[T::ROWS + row] = 0.0f;
        }
    }
};
