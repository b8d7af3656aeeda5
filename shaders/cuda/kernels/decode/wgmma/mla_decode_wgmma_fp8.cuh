// Split-KV MLA decode in absorbed form by wgmma, for FP8 (e4m3) caches: variant `wgmma_m64`, for compute capability 9.0.
//
// As mla_decode_wgmma.cuh: two warpgroups multiply 64 query rows with tiles of 64 tokens, which they own in turns, and each has half of the
// output's columns. But scores are multiplied in FP8, codes of the cache as they are with an e4m3 query, and only values in f16, to which the
// loader warpgroup converts them. So scores need not wait for a conversion, and codes are half of f16's bytes:
//
//   stages of codes      loaded, by TMA; read by the scores of the tile's owner, and by the conversion
//   values of one tile   filled and freed quarter by quarter: each is multiplied by one warpgroup
//
// While the values of the other warpgroup's tile are multiplied, the softmax of the own tile runs.
//
// mbarriers: a stage is `full` or `empty`; a quarter of the values is `filled` or `freed`; weights are `given`.
// Tokens past the item's end are masked, and their values are zeros. An output that has NaN or infinity, from a masked key too, is done again in
// f32 (decode_f32.cuh).
#pragma once

#include "wgmma_fp8_loader.cuh"
#include "wgmma_fp8_queries.cuh"
#include "wgmma_output.cuh"
#include "wgmma_softmax.cuh"

// Issues one wgmma of the scores, = queries x keys^T, asynchronously.
template <class T, int STEP>
DEVICE void multiply_step(float (&sums)[T::TOKEN_TILES][4], u64 queries, u64 keys) {
    const u64 a = queries + (STEP / 2 * T::QueryOrder::GROUP_BYTES + STEP % 2 * 32) / 16;
    const u64 b = keys + (STEP / 2 * T::CodesOrder::GROUP_BYTES + STEP % 2 * 32) / 16;
    if constexpr (STEP >= 2) pin(sums);
    before_multiplications();
    if constexpr (STEP < 2) {
        multiply_first_codes(sums, a, b);
    } else {
        multiply_again_codes(sums, a, b);
    }
    end_of_multiplications(sums);
}

// A tile's scores.
template <class T>
DEVICE void multiply_keys(float (&logits)[T::TOKEN_TILES][4], u64 queries, u64 keys) {
    multiply_step<T, 0>(logits, queries, keys);
    float more[T::TOKEN_TILES][4];
    unrolled<T::STEPS - 1>([&](auto step) {
        multiply_step<T, decltype(step)::value + 1>(more, queries, keys);
        wait_for_multiplications<0>();
        pin(logits);
        pin(more);
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) logits[j][e] += more[j][e];
    });
}

template <class T>
DEVICE void decode_codes(const Args& args, const TensorMap& map) {
    extern __shared__ __align__(1024) u8 shared[];
    const WorkItem item = args.items[blockIdx.x];
    let_next_kernel_begin();
    const u32 num_items = args.header->num_items;
    if (blockIdx.x >= num_items) return wait_for_kernel_before();
    const u32 base = shared_address(shared);
    float* tops = reinterpret_cast<float*>(shared + T::TOPS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    u32* non_finite = reinterpret_cast<u32*>(shared + T::NON_FINITE_AT);
    // Uniform in a warp, which the shuffle tells the compiler.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(~0u, threadIdx.x / LANES, 0);

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < T::STAGES; i++) {
            begin_barrier(base + T::FULL_AT + i * 8, 1);
            begin_barrier(base + T::EMPTY_AT + i * 8, T::WARPS / 2 + T::LOADERS);
        }
#pragma unroll
        for (int i = 0; i < T::QUARTERS; i++) {
            begin_barrier(base + T::FILLED_AT + i * 8, T::LOADERS);
            begin_barrier(base + T::FREED_AT + i * 8, T::WARPS / 2);
        }
#pragma unroll
        for (int i = 0; i < T::WARPS; i++) begin_barrier(base + T::GIVEN_AT + i * 8, LANES);
        *non_finite = 0;
        before_tensor_copies();
    }
    __syncthreads();
    wait_for_kernel_before();
    if (warp >= T::WARPS) {
        give_registers<T::LOADER_REGISTERS>();
        return Fp8Loader<T>{args, map, item, base, warp - T::WARPS}.run();
    }
    take_registers<T::REGISTERS>();

    copy_query_codes<T>(args, item, warp, base + T::QUERIES_AT, scales);
    if (warp < T::WARPS / 2) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < T::VALUES_BYTES / 2 / 16; i += T::WARPS / 2 * LANES) store_16(base + T::VALUES_AT + i * 16, {0, 0, 0, 0});
    }
    before_tensor_copies();
    wait_for_warps<T::WARPS>(1);

    // The wgmma accumulator layout: a lane has rows lane / 4 and lane / 4 + 8 of its warp's 16, and of each two consecutive tokens of every
    // eight.
    const u32 group = warp / 4, first_row = warp % 4 * 16 + lane / 4;
    float top[2] = {EMPTY, EMPTY}, sum[2] = {}, scale[2];
    u32 seen[2]; // keys before this position are visible
    const u32 seen_by_all = see_rows(args, item, scales, first_row, scale, seen);
    HalfOutput<T> output;

    const u64 queries = codes_at(base + T::QUERIES_AT);
    const u32 weights = base + T::WEIGHTS_AT + warp % 4 * (4 * LANES * 16) + lane * 16, given = base + T::GIVEN_AT + warp % 4 * 8;
    const u32 own_weights = weights + group * T::WEIGHTS_BYTES, other_weights = weights + (group ^ 1) * T::WEIGHTS_BYTES;
    const u32 own_given = given + group * 32, other_given = given + (group ^ 1) * 32;
    const u32 filled = base + T::FILLED_AT + group * 16, freed = base + T::FREED_AT + group * 16; // of the warpgroup's first quarter
    auto release = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };
    // Issues the wgmma of a tile's values, each quarter once it is filled.
    auto add_values = [&](const u32 (&words)[2][T::TOKEN_TILES], u32 tile, bool is_filled) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
            if (!is_filled) wait_for_arrivals(filled + q * 8, tile % 2);
            output.add_quarter(q, words, base + T::VALUES_AT, group);
        }
    };
    // Waits for them.
    auto free_values = [&] {
        output.template wait<0>();
        release(freed);
        output.template wait<1>();
        release(freed + 8);
    };
    // Begins to add the other warpgroup's last tile to the output, after adopting its running maxima. Before the first tile zeros are added instead:
    // ptxas serialises wgmma that are in flight only on some paths.
    auto add_other = [&](u32 tile) {
        u32 words[2][T::TOKEN_TILES] = {};
        if (tile > 0) {
            wait_for_arrivals(other_given, (tile - 1) / 2 % 2);
            load_weights<T>(words, other_weights);
        }
        adopt_tops(output, [&](int h) { return tile > 0 ? tops[(group ^ 1) * T::ROWS + first_row + h * 8] : top[h]; }, top, sum);
        add_values(words, tile - 1, tile == 0);
    };

    const u32 num_tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
    u32 tile = group;
    if (group == 1) {
        release(freed);
        release(freed + 8);
    }
    for (; tile < num_tiles; tile += 2) {
        // 1. scores
        const u32 stage = tile % T::STAGES;
        float logits[T::TOKEN_TILES][4];
        wait_for_arrivals(base + T::FULL_AT + stage * 8, tile / T::STAGES % 2);
        multiply_keys<T>(logits, queries, codes_at(base + T::STAGES_AT + stage * T::STAGE_BYTES));
        release(base + T::EMPTY_AT + stage * 8);
        add_other(tile);

        // 2. softmax
        mask_tokens<T>(logits, item.kv_begin + tile * T::TOKENS, seen, seen_by_all);
        float factor[2], fresh[2];
        u32 own[2][T::TOKEN_TILES];
        const bool grows = move_tops<T>(logits, scale, top, factor);
        weigh_in_registers<T>(logits, scale, top, fresh, own);
        // The buffer is free: the other warpgroup took the previous weights before it gave those that add_other took above.
        store_weights<T>(own_weights, own);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (lane % 4 == 0) tops[group * T::ROWS + first_row + h * 8] = top[h];
            sum[h] = sum[h] * factor[h] + fresh[h];
        }
        // Every lane arrives: compute-sanitizer does not see the order of a __syncwarp followed by one lane's arrival.
        arrive(own_given);

        // 3. values
        free_values();
        if (grows) output.rescale(factor);
        add_values(own, tile, false);
        free_values();
    }
    if (num_tiles > 0 && tile == num_tiles) {
        add_other(tile);
        output.template wait<0>();
        output.template wait<1>();
    }
    finish<T>(args, item, shared, warp, output, top, sum);
}

#define DECODE_CODES(name) \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Fp8Tile::THREADS, 1) name(const __grid_constant__ Args args, const __grid_constant__ TensorMap map) { \
        decode_codes<Fp8Tile>(args, map); \
    } \
    NUMBERS_OF(name, Fp8Tile)
