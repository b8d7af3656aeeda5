// The tile of mla_decode_fp8.cuh, and its two products of FP8 codes.
#pragma once

#include "decode/mla_decode.cuh"

// This tile is that of `mma_m16` with steps of k = 32. Queries stay FP8 codes in shared memory, since registers are short. A warp's weights
// are [LANES, 4 words].
template <int LATENT, int ROPE, int STAGES>
struct Fp8Tile : Tile<LATENT, ROPE, E4M3, 16, 64, 4, STAGES, 1, 1, (LATENT + ROPE) / 16> {
    using Base = Tile<LATENT, ROPE, E4M3, 16, 64, 4, STAGES, 1, 1, (LATENT + ROPE) / 16>;
    static constexpr int STEPS = Base::DIM / 32, SCORE_STEPS = STEPS;
    static constexpr int QUERY_BATCH = 4;
    static constexpr bool LISTS = false;
    static constexpr int UNROLL_BY_8 = 16; // in a loop ptxas spills for sm_100
    static constexpr int QUERIES_AT = (Base::SHARED_BYTES + 127) / 128 * 128, SHARED_BYTES = QUERIES_AT + Base::ROWS * Base::DIM; // in the layout of a stage
    static_assert(Base::WEIGHTS_BYTES == LANES * 16 && Base::TOKEN_TILES == 2, "a warp's 16 tokens are one register of a fragment of weights");
};

// sum += a x b. Tensor cores add FP8 products with fewer bits than f32 has: about 14 in accumulators of compute capability 9.0
// (DeepSeek-V3, arXiv 2412.19437, 3.3.2) and 8.9 (SageAttention2, arXiv 2411.10958). So each product begins at 0, and sums over many are
// f32 additions.
DEVICE void add_product(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    float product[4] = {};
    multiply_e4m3(product, a, b0, b1);
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] += product[e];
}

// A warp's scores: 16 rows by its 16 tokens. `meanwhile` is called after each step, to issue copies between multiplications.
template <class T, class Meanwhile>
DEVICE void add_scores(float (&sums)[2][4], u32 queries, u32 stage, Meanwhile meanwhile) {
    using Order = typename T::Order;
    const u32 lane = threadIdx.x % LANES, row = threadIdx.x / LANES * 16 + lane % 8, chunk = lane / 8;
    const u32 at = stage + Order::at(row, chunk), query_at = queries + Order::at(lane % 16, lane / 16);
    // An ldmatrix.x4 loads four chunks of 8 tokens, which are two steps; the last repeats a chunk where one step is left.
    unrolled<(T::STEPS + 1) / 2>([&](auto load) {
        constexpr int step = decltype(load)::value * 2;
        u32 a[2][4];
#pragma unroll
        for (int s = 0; s < 2; s++)
            if (step + s < T::STEPS) load_matrices(a[s], Order::from(query_at, (step + s) * 2));
        const u32 place = step + 2 <= T::STEPS ? Order::from(at, step * 2) : stage + Order::at(row, min(step * 2 + chunk, T::STEPS * 2 - 1));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 b[4];
            load_matrices(b, Order::rows(place, j * 8));
#pragma unroll
            for (int s = 0; s < 2; s++) {
                if (step + s >= T::STEPS) break;
                add_product(sums[j], a[s], b[2 * s], b[2 * s + 1]);
                if (j == 1) meanwhile(step + s);
            }
        }
    });
}

// A weight of at most 1 becomes two codes, of 4 bits each: weight = high / HIGH + low / LOW. It is off by 2^-9 of itself (bf16: 2^-8), or
// by 2^-22: no worse than bf16 down to 2^-14.
constexpr float HIGH = 256.0f, LOW = 4096.0f;

// The codes of two weights.
DEVICE u32 pack_e4m3(float first, float second) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
}

// Adds the codes of two weights to words of high and of low codes, `shift` bits up.
DEVICE void split_weights(float first, float second, int shift, u32& high, u32& low) {
    first *= HIGH;
    second *= HIGH;
    const u32 codes = pack_e4m3(first, second);
    u32 rounded;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(rounded) : "h"(static_cast<u16>(codes)));
    const float first_rest = first - f16_to_float(static_cast<u16>(rounded)), second_rest = second - f16_to_float(static_cast<u16>(rounded >> 16));
    high |= codes << shift;
    low |= pack_e4m3(first_rest * (LOW / HIGH), second_rest * (LOW / HIGH)) << shift;
}

// output = output * keep + weights x values * add, by rows lane / 4 and lane / 4 + 8.
//
// From each 16 tokens a lane has the weights of tokens 2i, 2i + 1, 2i + 8 and 2i + 9, i = lane % 4: the layout of the scores' accumulators.
// A B fragment has the same order of k: ldmatrix.trans on pairs of codes gives a lane two columns of these tokens, which `prmt` splits into
// the even and the odd one.
template <class T>
DEVICE void add_values(Output<T>& output, u32 weights, u32 stage, const float (&keep)[2], const float (&add)[2]) {
    using Order = typename T::Order;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    constexpr int CHUNKS = T::COLUMN_TILES / 2, STEPS = T::TOKENS / 32;
    const u32 at = stage + Order::at(lane, warp * CHUNKS);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        // Weights are loaded for each chunk, and one chunk at a time: registers are short, all the more where ptxas makes the codes f16
        // (sm_90, sm_100).
        __syncwarp();
        // Products of the high codes and of the low codes, [even or odd columns].
        float highs[2][4] = {}, lows[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            // The weights that two warps wrote, 16 tokens each: high codes of both rows, then low codes of both.
            u32 first[4], last[4], codes[4];
            load_16(first, weights + (step * 2 * LANES + lane) * 16);
            load_16(last, weights + ((step * 2 + 1) * LANES + lane) * 16);
            const u32 high[4] = {first[0], first[1], last[0], last[1]}, low[4] = {first[2], first[3], last[2], last[3]};
            load_matrices_transposed(codes, Order::rows(Order::from(at, c), step * 32));
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const u32 b0 = __byte_perm(codes[0], codes[1], odd ? 0x7531 : 0x6420), b1 = __byte_perm(codes[2], codes[3], odd ? 0x7531 : 0x6420);
                multiply_e4m3(highs[odd], high, b0, b1);
                multiply_e4m3(lows[odd], low, b0, b1);
            }
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& sum = output.sums[0][c * 2 + odd][e];
                const float product = fmaf(lows[odd][e], 1.0f / LOW, highs[odd][e] * (1.0f / HIGH));
                sum = fmaf(sum, keep[e / 2], product * add[e / 2]);
            }
    }
}
