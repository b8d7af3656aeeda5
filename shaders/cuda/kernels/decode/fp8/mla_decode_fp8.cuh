// Split-KV MLA decode of FP8 codes that stay codes: mma.sync m16n8k32 of e4m3 x e4m3, for compute capability 8.9 and later. Variant
// `mma_fp8_m16`.
//
// Items, tables, copies and tiles are those of `mma_m16` (mla_decode.cuh), and so are scores, softmax and values, but that
//   - the queries are e4m3 and multiplied as they are, 32 columns a step
//   - weights are relative to the largest of the row in the tile, since e4m3 has few exponents. There is no lazy rescaling: the block
//     exchanges maxima for each tile
//   - weights are split in two codes (split_weights), which a tile's values are multiplied by one after the other
#pragma once

#include "fp8_tile.cuh"

// The item's query rows, from global to shared memory.
template <class T>
DEVICE void load_codes(const Args& args, const WorkItem& item, u32 to) {
    using Rows = QueryRows<T>;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    u32 pairs[T::QUERY_BATCH][Rows::PAIRS];
    static_assert(T::QUERY_BATCH * T::WARPS == T::ROWS, "all rows at once");
#pragma unroll
    for (int b = 0; b < T::QUERY_BATCH; b++) {
        const u32 index = item.first_row + min(warp + b * T::WARPS, item.num_rows - 1);
        const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
        load_pairs<T::LATENT, T::DIM, u16>(pairs[b], args, token * args.q_nope_token_stride + head * args.q_nope_head_stride, token * args.q_pe_token_stride + head * args.q_pe_head_stride);
    }
#pragma unroll
    for (int b = 0; b < T::QUERY_BATCH; b++)
#pragma unroll
        for (int i = 0; i < Rows::PAIRS; i++) {
            const u32 column = (i * LANES + lane) * 2;
            if (column < T::DIM) store_2(to + T::Order::at(warp + b * T::WARPS, column / 16) + column % 16, static_cast<u16>(pairs[b][i]));
        }
}

template <class T>
DEVICE void decode_fp8(const Args& args) {
    extern __shared__ __align__(1024) u8 shared[];
    // Like `decode`, it loads the item before num_items is known, and page ids only after the previous kernel if that may have written
    // them.
    const WorkItem item = args.items[blockIdx.x];
    griddep_launch();
    if (blockIdx.x >= args.header->num_items) return griddep_wait();
    const u32 stages = shared_address(shared + T::STAGES_AT), weights = shared_address(shared + T::WEIGHTS_AT);
    float* maxima = reinterpret_cast<float*>(shared + T::MAXIMA_AT);
    u32* non_finite = reinterpret_cast<u32*>(shared + T::SCALES_AT); // NaN as soon as some logit is NaN or infinite: `finish` looks there
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;

    if (args.clamp_pages) griddep_wait();
    Loader<T> loader(args, item);
    Pace<T> pace(0);
    griddep_wait();
#pragma unroll
    for (int i = 0; i < T::STAGES - 1; i++) {
        const bool any = item.kv_begin + i * T::TOKENS < item.kv_end;
        if (any) loader.load(stages + i * T::STAGE_BYTES, i);
        pace.asked(i, any);
    }
    // The barrier before the first tile is that of its copies.
    const u32 queries = shared_address(shared + T::QUERIES_AT);
    load_codes<T>(args, item, queries);
    if (threadIdx.x == 0) *non_finite = 0;

    // The mma accumulator layout: a lane has rows lane / 4 and lane / 4 + 8, of scores and of the output, and of each 8 tokens two.
    float top[2] = {EMPTY, EMPTY}, sum[2] = {};
    u32 seen[2]; // keys before this position are visible to a row
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 index = item.first_row + min(h * 8 + lane / 4, item.num_rows - 1);
        seen[h] = min(args.queries[index / args.num_heads].visible, item.kv_end);
    }
    bool has_any_non_finite = false;
    Output<T> output;

    for (u32 tile_begin = item.kv_begin, stage = 0; tile_begin < item.kv_end; tile_begin += T::TOKENS) {
        pace.wait(stage);
        const u32 free_stage = stage == 0 ? T::STAGES - 1 : stage - 1;
        const u32 tokens = stages + stage * T::STAGE_BYTES, free = stages + free_stage * T::STAGE_BYTES;
        const bool more = tile_begin + (T::STAGES - 1) * T::TOKENS < item.kv_end, copies = more && !loader.by_8();
        if (more && loader.by_8()) loader.load(free, free_stage);

        // 1. scores
        float logits[2][4] = {};
        loader.begin(free);
        add_scores<T>(logits, queries, tokens, [&](int step) { loader.copies_of(step, copies); });
        if (copies) loader.end(free_stage);
        pace.asked(free_stage, more);

        // 2. softmax, relative to the tile's maximum of a row
        const u32 first = tile_begin + warp * 16 + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = EMPTY;
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& logit = logits[j][2 * h + e];
                    logit *= args.logit_scale;
                    has_any_non_finite |= !is_finite(logit);
                    if (first + j * 8 + e >= seen[h]) logit = EMPTY;
                    largest = fmaxf(largest, logit);
                }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            if (lane % 4 == 0) maxima[warp * T::ROWS + h * 8 + lane / 4] = largest;
        }
        __syncthreads();
        float keep[2], add[2];
        u32 words[4] = {}; // high codes of both rows, low codes of both
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = EMPTY;
#pragma unroll
            for (int w = 0; w < T::WARPS; w++) largest = fmaxf(largest, maxima[w * T::ROWS + h * 8 + lane / 4]);
            const float base = base_of(largest), new_top = fmaxf(top[h], largest);
            float fresh = 0.0f;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float low = exp2_fast(logits[j][2 * h] - base), high = exp2_fast(logits[j][2 * h + 1] - base);
                fresh += low;
                fresh += high;
                split_weights(low, high, j * 16, words[h], words[2 + h]);
            }
            keep[h] = exp2_fast(top[h] - new_top);
            add[h] = exp2_fast(largest - new_top);
            sum[h] = fmaf(sum[h], keep[h], fresh * add[h]);
            top[h] = new_top;
        }
        store_16(weights + threadIdx.x * 16, words);
        __syncthreads();

        // 3. values
        add_values<T>(output, weights, tokens, keep, add);
        stage = stage + 1 == T::STAGES ? 0 : stage + 1;
    }
    cp_async_wait<0>();

    if (has_any_non_finite) atomicOr(non_finite, NAN_BITS);
    finish<T>(args, shared, output, top, sum);
}

#define DECODE_FP8(name, ...) \
    extern "C" __global__ void __launch_bounds__(Fp8Tile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args) { \
        decode_fp8<Fp8Tile<__VA_ARGS__>>(args); \
    } \
    NUMBERS_OF(name, Fp8Tile<__VA_ARGS__>)
