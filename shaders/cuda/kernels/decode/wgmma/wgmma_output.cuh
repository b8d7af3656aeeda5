// The output of mla_decode_wgmma.cuh: a warpgroup's accumulators, and the epilogue.
#pragma once

#include "decode/decode_tile.cuh"
#include "decode/staged_output.cuh"
#include "lib/wgmma.cuh"

// The accumulators of a warpgroup's half of the output, in two quarters: a quarter's columns of a stage are released as soon as they are
// added.
template <class T>
struct HalfOutput {
    static constexpr int TILES = T::QUARTER_TILES;
    float sums[2][TILES][4] = {};

    DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int c = 0; c < TILES; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[q][c][e] *= factor[e / 2];
    }

    // Issues the wgmma of a tile at `stage`, asynchronously: a commit group for each quarter. `group` is the warpgroup.
    DEVICE void add(const u32 (&words)[2][T::TOKEN_TILES], u32 stage, u32 group) {
#pragma unroll
        for (int q = 0; q < 2; q++) add_quarter(q, words, stage, group);
    }

    DEVICE void add_quarter(int q, const u32 (&words)[2][T::TOKEN_TILES], u32 stage, u32 group) {
        const u64 values = matrix_at(stage + T::Order::groups(group * 4 + q * 2), T::Order::GROUP_BYTES);
        begin_multiplications(sums[q]);
#pragma unroll
        for (int step = 0; step < T::TOKENS / 16; step++) {
            const u32 a[4] = {words[0][2 * step], words[1][2 * step], words[0][2 * step + 1], words[1][2 * step + 1]};
            multiply_values<T::CACHE == BF16>(sums[q], a, values + step * (16 * 128 / 16));
        }
        end_of_multiplications(sums[q]);
    }

    // Waits for a quarter; of the first, the second may stay in flight.
    template <int QUARTER>
    DEVICE void wait() {
        wgmma_wait<1 - QUARTER>();
        pin(sums[QUARTER]);
    }
};

// Adopts the running maxima that the other warpgroup has of a lane's two rows, `top_of(0)` and `top_of(1)`, and rescales what was summed
// before.
template <class T, class Tops>
DEVICE void adopt_tops(HalfOutput<T>& output, Tops top_of, float (&top)[2], float (&sum)[2]) {
    float factor[2];
    bool grew = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float now = top_of(h);
        factor[h] = exp2_fast(top[h] - now);
        grew |= now != top[h];
        top[h] = now;
        sum[h] *= factor[h];
    }
    // No wgmma on the output is in flight here; the waits tell the compiler so.
    if (__any_sync(~0u, grew)) {
        output.template wait<0>();
        output.template wait<1>();
        output.rescale(factor);
    }
}

// The end of an item, by the warps that multiply: the row sums across the two warpgroups, and the output.
template <class T>
DEVICE void finish(const Args& args, const WorkItem& item, u8* shared, u32 warp, const HalfOutput<T>& output, const float (&top)[2], float (&sum)[2]) {
    float* tops = reinterpret_cast<float*>(shared + T::TOPS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    u32* non_finite = reinterpret_cast<u32*>(shared + T::NON_FINITE_AT);
    const u32 lane = threadIdx.x % LANES, group = warp / 4, first_row = warp % 4 * 16 + lane / 4, stages = shared_address(shared) + T::STAGES_AT;
    // Row sums across the two warpgroups. The output is staged where the cache was: its rows are then written by a short loop, since code
    // that runs once is as slow as its instructions are many.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    bar_sync<T::WARPS>(1);
    if (lane % 4 == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            tops[group * T::ROWS + first_row + h * 8] = sum[h];
            if (group == 0) scales[first_row + h * 8] = top[h];
        }
    }
    const u32 place = stages + (first_row * T::OUTPUT_PITCH + group * (T::LATENT / 2) + lane % 4 * 2) * 4;
    float check[4] = {}; // NaN where some element is NaN or infinite
#pragma unroll
    for (int q = 0; q < 2; q++)
#pragma unroll
        for (int c = 0; c < T::QUARTER_TILES; c++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float first = output.sums[q][c][2 * h], second = output.sums[q][c][2 * h + 1];
                check[2 * h] = fmaf(first, 0.0f, check[2 * h]);
                check[2 * h + 1] = fmaf(second, 0.0f, check[2 * h + 1]);
                store_8(place + (h * 8 * T::OUTPUT_PITCH + (q * T::QUARTER_TILES + c) * 8) * 4, first, second);
            }
    if (!((check[0] + check[1]) + (check[2] + check[3]) == 0.0f)) atomicOr(non_finite, 1u);
    bar_sync<T::WARPS>(1);
    write_rows<T>(args, item, shared, warp, *non_finite != 0);
}
