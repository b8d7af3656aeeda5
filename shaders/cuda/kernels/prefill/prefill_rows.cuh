// The online softmax of mla_prefill on tensor cores, and its epilogue. Accumulators are in the layout of mma.sync and wgmma: a lane has
// query rows lane / 4 and lane / 4 + 8 of a warp's 16, and two consecutive keys or columns of every eight.
#pragma once

#include "prefill.cuh"

// A lane's two query rows.
struct PrefillRows {
    u32 seen[2]; // keys that a row sees
    float top[2]; // largest logit so far, in base 2
    float sum[2]; // of the weights of this lane's keys
    u32 seen_by_all, seen_by_any; // by the warp's rows: those before are not masked for any, those from there on for all

    DEVICE void begin(const Tile &tile, u32 first_row) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            seen[h] = visible_to(tile, first_row + h * 8 + threadIdx.x % LANES / 4);
            top[h] = EMPTY;
            sum[h] = 0.0f;
        }
        seen_by_all = visible_to(tile, first_row);
        seen_by_any = visible_to(tile, first_row + 15);
    }

    // Scores of a block of keys to weights relative to the new maxima, in place, and the factors of what was summed before.
    template <int KEY_TILES>
    DEVICE void weigh(float (&scores)[KEY_TILES][4], u32 block, float scale, float (&factor)[2]) {
        if (block + KEY_TILES * 8 > seen_by_all) mask(scores, block + threadIdx.x % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = NO_KEY;
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++) largest = fmaxf(largest, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            // The scale is positive.
            const float now = fmaxf(top[h], largest * scale);
            factor[h] = exp2_fast(top[h] - now);
            top[h] = now;
            float fresh = 0.0f;
#pragma unroll
            for (int j = 0; j < KEY_TILES; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    // fma: the product is not rounded before the subtraction, so large logits lose no accuracy beyond the dot product's.
                    float &score = scores[j][2 * h + e];
                    score = exp2_fast(fmaf(score, scale, -now));
                    fresh += score;
                }
            }
            sum[h] = fmaf(sum[h], factor[h], fresh);
        }
    }

    template <int KEY_TILES>
    DEVICE void mask(float (&scores)[KEY_TILES][4], u32 first) const {
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (first + j * 8 + e % 2 >= seen[e / 2]) scores[j][e] = NO_KEY;
        }
    }

    // Multiplies the output by the factors, if one of the warp's is not 1.
    template <int TILES>
    DEVICE static void rescale(float (&out)[TILES][4], const float (&factor)[2]) {
        if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int c = 0; c < TILES; c++) {
#pragma unroll
            for (int e = 0; e < 4; e++) out[c][e] *= factor[e / 2];
        }
    }

    // Stores a lane's columns of a row. The dtype is looked at once a row, not once a store.
    template <int TILES>
    DEVICE static void store_row(u64 row, u32 dtype, const float2 (&pairs)[TILES]) {
        const u64 at = row + threadIdx.x % 4 * (dtype == DTYPE_F32 ? 8 : 4);
        float2* to_f32 = global_pointer<float2>(at);
        u32* to_16_bit = global_pointer<u32>(at);
        if (dtype == DTYPE_F32) {
#pragma unroll
            for (int c = 0; c < TILES; c++) to_f32[c * 4] = pairs[c];
        } else if (dtype == DTYPE_F16) {
#pragma unroll
            for (int c = 0; c < TILES; c++) to_16_bit[c * 4] = pack_f16(pairs[c].x, pairs[c].y);
        } else {
#pragma unroll
            for (int c = 0; c < TILES; c++) to_16_bit[c * 4] = pack_bf16(pairs[c].x, pairs[c].y);
        }
    }

    // The epilogue: divides by the sums, and stores the output and the LSE of the warp's rows that the tile has.
    template <int TILES>
    DEVICE void write(const Args &args, const Tile &tile, u32 first_row, const float (&out)[TILES][4]) {
        const u32 lane = threadIdx.x % LANES;
        // Not unrolled, so that the code is there once: a row is selected, since registers have no index.
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            float total = h == 0 ? sum[0] : sum[1];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const u32 row = first_row + h * 8 + lane / 4, to = tile.first_row + row;
            if (row >= tile.num_rows || to >= args.max_rows) continue;
            const bool any = HAS_WEIGHT(total);
            const float factor = any ? factor_of_row(total) * args.v_scale : 0.0f;
            float2 pairs[TILES];
#pragma unroll
            for (int c = 0; c < TILES; c++) pairs[c] = make_float2((h == 0 ? out[c][0] : out[c][2]) * factor, (h == 0 ? out[c][1] : out[c][3]) * factor);
            store_row(row_of(args.out, to, tile.head), args.out_dtype, pairs);
            if (lane % 4 == 0) {
                const float lse = ((h == 0 ? top[0] : top[1]) + log2_fast(total)) * 0.693147182f;
                store_4(row_of(args.lse, to, tile.head), any ? __float_as_uint(lse) : 0xFF800000u);
            }
        }
    }
};

// The weights of keys 8 * j to 8 * j + 15 as a fragment of the second product.
template <bool IS_BF16, int KEY_TILES>
DEVICE void weights_of(const float (&scores)[KEY_TILES][4], int j, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float first = scores[j + i / 2][i % 2 * 2], second = scores[j + i / 2][i % 2 * 2 + 1];
        a[i] = IS_BF16 ? pack_bf16(first, second) : pack_f16(first, second);
    }
}

// Issues cp.async of ROWS rows of two arrays side by side, `first_chunks` chunks of 16 bytes of the first and the rest of the second, by
// THREADS threads, UNROLL passes of them at a time. Rows from `count` on are zeros. `row_of_array(is_second, row)` is the address of a row.
template <class Order, int ROW_BYTES, int ROWS, int THREADS, int UNROLL = 64, class RowOf>
DEVICE void copy_rows(u32 to, u32 thread, u32 count, u32 first_chunks, const RowOf &row_of_array) {
    constexpr int ROW_LANES = Order::GROUP, PASS_ROWS = THREADS / ROW_LANES, CHUNKS = ROW_BYTES / 16;
    static_assert(ROWS % PASS_ROWS == 0 || PASS_ROWS % ROWS == 0, "whole passes");
#pragma unroll UNROLL
    for (int pass = 0; pass < (ROWS + PASS_ROWS - 1) / PASS_ROWS; pass++) {
        const u32 row = pass * PASS_ROWS + thread / ROW_LANES;
        if (PASS_ROWS > ROWS && row >= ROWS) break;
        const u64 first = row_of_array(false, row), second = row_of_array(true, row) - first_chunks * 16;
#pragma unroll
        for (int i = 0; i < CHUNKS / ROW_LANES; i++) {
            const u32 chunk = i * ROW_LANES + thread % ROW_LANES;
            copy_16(to + Order::at(row, chunk), reinterpret_cast<const void *>((chunk < first_chunks ? first : second) + chunk * 16), row < count);
        }
    }
}

// The address of a row of keys or queries, from their two arrays.
DEVICE auto keys_from(const Args &args, const Tile &tile, u32 block) {
    return [&args, &tile, block](bool is_pe, u32 row) { return row_of(is_pe ? args.k_pe : args.k_nope, key_of(args, tile, block + row), tile.head); };
}

DEVICE auto values_from(const Args &args, const Tile &tile, u32 block) {
    return [&args, &tile, block](bool, u32 row) { return row_of(args.v, key_of(args, tile, block + row), tile.head); };
}

DEVICE auto queries_from(const Args &args, const Tile &tile, u32 first) {
    return [&args, &tile, first](bool is_pe, u32 row) { return row_of(is_pe ? args.q_pe : args.q_nope, token_of(args, tile, first + row), tile.head); };
}
