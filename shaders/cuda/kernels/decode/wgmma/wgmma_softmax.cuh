// Softmax of the kernels on wgmma, in registers: a row's tokens lie in four lanes, a lane has two rows.
#pragma once

#include "decode/decode_tile.cuh"

// The scales of a lane's two rows, `first_row` and 8 further, and the position before which each sees keys. Returns that before which all
// rows of the warp do.
DEVICE u32 see_rows(const Args& args, const WorkItem& item, const float* scales, u32 first_row, float (&scale)[2], u32 (&seen)[2]) {
    u32 seen_by_all = ~0u;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = first_row + h * 8, index = item.first_row + min(row, item.num_rows - 1);
        seen[h] = min(args.queries[index / args.num_heads].visible, item.kv_end);
        seen_by_all = min(seen_by_all, seen[h]);
        scale[h] = scales[row];
    }
    return __reduce_min_sync(~0u, seen_by_all);
}

// Softmax weights in registers, two tokens a word, and a lane's sums of them by row.
template <class T>
DEVICE void weigh_in_registers(const float (&logits)[T::TOKEN_TILES][4], const float (&scale)[2], const float (&top)[2], float (&sum)[2], u32 (&words)[2][T::TOKEN_TILES]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float base = base_of(top[h]);
        float sums[2] = {};
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++) {
            const float low = exp2_fast(fmaf(logits[j][2 * h], scale[h], -base)), high = exp2_fast(fmaf(logits[j][2 * h + 1], scale[h], -base));
            sums[0] += low;
            sums[1] += high;
            words[h][j] = T::CACHE == BF16 ? pack_bf16(low, high) : pack_f16(low, high);
        }
        sum[h] = sums[0] + sums[1];
    }
}

// Masks the tokens that the lane's rows do not see, those from `seen` on, in a tile that begins at `tile_begin`.
template <class T>
DEVICE void mask_tokens(float (&logits)[T::TOKEN_TILES][4], u32 tile_begin, const u32 (&seen)[2], u32 seen_by_all) {
    if (tile_begin + T::TOKENS > seen_by_all) {
        asm volatile(""); // keeps the branch: few tiles have masked tokens
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (tile_begin + threadIdx.x % 4 * 2 + j * 8 + e % 2 >= seen[e / 2]) logits[j][e] = NO_WEIGHT;
    }
}

// Masks the tokens whose entry of the list is no slot. `entries` are those of the tile.
template <class T>
DEVICE void mask_entries(const Args& args, float (&logits)[T::TOKEN_TILES][4], u32 entries) {
    asm volatile(""); // keeps the caller's branch
#pragma unroll
    for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (!is_slot(args, load_4(entries + (threadIdx.x % 4 * 2 + j * 8 + e) * 4))) logits[j][e] = logits[j][2 + e] = NO_WEIGHT;
}

// Moves the running maxima that logits exceed by more than LAZY. Returns whether some of the warp's did, and sets the factors of what was
// summed before.
template <class T>
DEVICE bool move_tops(const float (&logits)[T::TOKEN_TILES][4], const float (&scale)[2], float (&top)[2], float (&factor)[2]) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most[4];
#pragma unroll
        for (int i = 0; i < 4; i++) most[i] = fmaxf(fmaxf(logits[2 * i][2 * h], logits[2 * i][2 * h + 1]), fmaxf(logits[2 * i + 1][2 * h], logits[2 * i + 1][2 * h + 1]));
        largest[h] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) * scale[h];
        factor[h] = 1.0f;
    }
    const bool grows = __any_sync(~0u, largest[0] > top[0] + LAZY || largest[1] > top[1] + LAZY);
    if (grows) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
            if (largest[h] > top[h] + LAZY) {
                factor[h] = exp2_fast(top[h] - largest[h]);
                top[h] = largest[h];
            }
        }
    }
    return grows;
}

// A lane's weights of a tile, as it passes them to the warp of the other warpgroup that has the same rows.
template <class T>
DEVICE void store_weights(u32 to, const u32 (&words)[2][T::TOKEN_TILES]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 low[4] = {words[h][0], words[h][1], words[h][2], words[h][3]}, high[4] = {words[h][4], words[h][5], words[h][6], words[h][7]};
        store_16(to + h * 2 * (LANES * 16), low);
        store_16(to + (h * 2 + 1) * (LANES * 16), high);
    }
}

template <class T>
DEVICE void load_weights(u32 (&words)[2][T::TOKEN_TILES], u32 from) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 low[4], high[4];
        load_16(low, from + h * 2 * (LANES * 16));
        load_16(high, from + (h * 2 + 1) * (LANES * 16));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[h][i] = low[i];
            words[h][4 + i] = high[i];
        }
    }
}
