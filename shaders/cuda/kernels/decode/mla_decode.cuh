// Attention of one tile of query rows over one range of tokens on tensor cores: a split of a split-KV decode.
//
// The twin of shaders/mla_decode_coop.wgsl: the same work items and tables. A block takes one item. STAGES tiles of TOKENS cache rows are on
// their way to shared memory, as they lie in the cache. For each tile:
//   1. scores   ROW_WARPS x TOKEN_WARPS: each warp multiplies 16 query rows with its share of the tokens
//   2. softmax  in registers, with the maxima of the tiles before. A row's maximum moves only when it grew by more than LAZY: weights stay below
//               2^LAZY. Only when one does, the warps of a row tell each other their largest logit, and weights and output are scaled anew
//   3. values   each warp owns L / WARPS columns of the output of all rows: += weights x values
//
// bf16 rows are multiplied as bf16, others as f16: FP8 codes become f16 in registers. A query that the type does not hold is split in PARTS, after a
// power of two has brought its row into f16's range.
//
// Masked tokens weigh exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on which
// rows share its tile.
#pragma once

#include "decode_boxes.cuh"
#include "decode_scores.cuh"

// The output of all rows in a warp's columns.
template <class T>
struct Output {
    float sums[T::ROW_TILES][T::COLUMN_TILES][4] = {};

    DEVICE void rescale(const float* factors) {
        const u32 row = threadIdx.x % LANES / 4;
#pragma unroll
        for (int r = 0; r < T::ROW_TILES; r++) {
            const float low = factors[r * 16 + row], high = factors[r * 16 + 8 + row];
#pragma unroll
            for (int c = 0; c < T::COLUMN_TILES; c++) {
                sums[r][c][0] *= low;
                sums[r][c][1] *= low;
                sums[r][c][2] *= high;
                sums[r][c][3] *= high;
            }
        }
    }

    DEVICE void add(u32 weights, u32 stage) {
        using Order = typename T::Order;
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        using WeightOrder = Swizzle<T::WEIGHT_BYTES>;
        // A chunk of 8 tokens is one of a warp's, or all that it has.
        const u32 weight_at = weights + (T::TOKEN_TILES == 1 ? WeightOrder::at(lane % 16, 0) + lane / 16 * T::WEIGHTS_STRIDE : WeightOrder::at(lane % 16, lane / 16));
        constexpr int CHUNKS = T::COLUMN_TILES * T::ELEMENT_BYTES / 2; // of a warp's columns
        static_assert(CHUNKS % Order::GROUP == 0, "whole groups");
        const u32 at = stage + Order::at(lane % 16, warp * CHUNKS + lane / 16);
#pragma unroll
        for (int step = 0; step < T::TOKENS / 16; step++) {
            u32 a[T::ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < T::ROW_TILES; r++) load_matrices(a[r], WeightOrder::from(weight_at, step * 2 % T::TOKEN_TILES) + weights_of<T>(r, step * 2 / T::TOKEN_TILES));
            const u32 row = Order::rows(at, step * 16);
            if constexpr (T::CACHE == E4M3) {
                // A chunk is 16 columns: a tile of the even ones and a tile of the odd ones.
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 4) {
                    u32 codes[4];
                    load_matrices_transposed(codes, Order::from(row, c / 2));
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        u32 even[2], odd[2];
                        e4m3_to_f16(__byte_perm(codes[2 * i], 0, 0x3120), even[0], odd[0]);
                        e4m3_to_f16(__byte_perm(codes[2 * i + 1], 0, 0x3120), even[1], odd[1]);
#pragma unroll
                        for (int r = 0; r < T::ROW_TILES; r++) {
                            multiply<T>(sums[r][c + 2 * i], a[r], even[0], even[1]);
                            multiply<T>(sums[r][c + 2 * i + 1], a[r], odd[0], odd[1]);
                        }
                    }
                }
            } else {
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 2) {
                    u32 b[4];
                    load_matrices_transposed(b, Order::from(row, c));
#pragma unroll
                    for (int r = 0; r < T::ROW_TILES; r++) {
                        multiply<T>(sums[r][c], a[r], b[0], b[1]);
                        multiply<T>(sums[r][c + 1], a[r], b[2], b[3]);
                    }
                }
            }
        }
    }

    // Each row times its factor, where it goes.
    DEVICE void write(const Args& args, const WorkItem& item, const float* factors) const {
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
        for (int r = 0; r < T::ROW_TILES; r++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 row = r * 16 + h * 8 + lane / 4;
                if (row >= item.num_rows) continue;
                const float factor = factors[row];
                const u32 index = item.first_row + row;
                const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
                float* partial = args.partials + (static_cast<u64>(item.partial) + row) * (T::LATENT + 4);
                auto put = [&](u32 column, float first, float second) {
                    if (item.partial == DIRECT) {
                        store_out(args, token, head, column, first * factor, second * factor);
                    } else {
                        *reinterpret_cast<float2*>(partial + column) = make_float2(first * factor, second * factor);
                    }
                };
                const u32 first_column = warp * (T::COLUMN_TILES * 8);
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 2) {
                    if constexpr (T::CACHE == E4M3) {
                        // Even columns in one tile, odd ones in the next.
                        const u32 column = first_column + c * 8 + lane % 4 * 4;
                        put(column, sums[r][c][2 * h], sums[r][c + 1][2 * h]);
                        put(column + 2, sums[r][c][2 * h + 1], sums[r][c + 1][2 * h + 1]);
                    } else {
                        const u32 column = first_column + c * 8 + lane % 4 * 2;
                        put(column, sums[r][c][2 * h], sums[r][c][2 * h + 1]);
                        put(column + 8, sums[r][c + 1][2 * h], sums[r][c + 1][2 * h + 1]);
                    }
                }
            }
        }
    }
};

// A warp's weights to shared memory, and a lane's sums of them.
template <class T>
DEVICE void weigh(const float (&logits)[T::TOKEN_TILES][4], const float (&top)[2], float (&sum)[2], u32 weights) {
    using Order = Swizzle<T::WEIGHT_BYTES>;
    const u32 lane = threadIdx.x % LANES, at = weights + Order::at(lane / 4, 0) + lane % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float base = base_of(top[h]);
        sum[h] = 0.0f;
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++) {
            const u32 word = weigh_two<T>(logits[j][2 * h], logits[j][2 * h + 1], base, sum[h]);
            store_4(Order::from(at, j) + h * 8 * T::WEIGHT_BYTES, word);
        }
    }
}

template <class T>
DEVICE void decode(const Args& args, const TensorMap* map = nullptr) {
    extern __shared__ __align__(1024) u8 shared[];
    // Both are asked for at once: there are as many items as blocks, used or not.
    const WorkItem item = args.items[blockIdx.x];
    let_next_kernel_begin();
    const u32 num_items = args.header->num_items;
    if (blockIdx.x >= num_items) return wait_for_kernel_before();
    const u32 stages = shared_address(shared + T::STAGES_AT);
    float* maxima = reinterpret_cast<float*>(shared + T::MAXIMA_AT);
    float* factors = reinterpret_cast<float*>(shared + T::FACTORS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    u32* seen = reinterpret_cast<u32*>(shared + T::SEEN_AT); // keys that a row sees
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 row_warp = warp / T::TOKEN_WARPS, token_warp = warp % T::TOKEN_WARPS;

    // Tables are the host's, but page lists may be a kernel's.
    if (args.clamp_pages) wait_for_kernel_before();
    const u32 barriers = shared_address(shared + T::BARRIERS_AT);
    auto loader = loader_of<T>(args, map, item, barriers);
    Pace<T> pace(barriers);
    if (T::COPIES != GROUPS) __syncthreads();
    wait_for_kernel_before();
#pragma unroll
    for (int i = 0; i < T::STAGES - 1; i++) {
        const bool any = item.kv_begin + i * T::TOKENS < item.kv_end;
        if (any) loader.load(stages + i * T::STAGE_BYTES, i);
        pace.asked(i, any);
    }
    const u32 staged = shared_address(shared + T::QUERIES_AT);
    QueryRows<T> rows;
    Queries<T> queries(staged, shared_address(shared + T::REST_AT), row_warp, token_warp);
    for (u32 first = 0; first < T::ROWS; first += T::STAGED_ROWS) {
        if (first > 0) __syncthreads();
        for (u32 row = first + warp; row < first + T::STAGED_ROWS; row += rows.BATCH * T::WARPS) {
            rows.ask(args, item, row);
            rows.store(args, row, staged - first * T::QUERY_BYTES, scales);
        }
        if constexpr (T::KEPT > 0) {
            __syncthreads();
            queries.keep(first / 16, row_warp, token_warp);
        }
    }

    // A lane has rows lane / 4 and 8 further, and of each two neighbouring tokens of every eight.
    float top[2], sum[2];
    u32 seen_by_all = ~0u;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = row_warp * 16 + h * 8 + lane / 4;
        const u32 index = item.first_row + min(row, item.num_rows - 1);
        const u32 seen_here = min(args.queries[index / args.num_heads].visible, item.kv_end);
        seen_by_all = min(seen_by_all, seen_here);
        if (token_warp == 0 && lane % 4 == 0) seen[row] = seen_here;
        top[h] = EMPTY;
        sum[h] = 0.0f;
    }
    seen_by_all = __reduce_min_sync(~0u, seen_by_all);
    Output<T> output;
    if (T::BOXED) before_tensor_copies();
    if (T::COPIES != GROUPS) __syncthreads();
    // With two stages a block that has its multiprocessor alone asks for a tile as early as it may. Two of them, or one with three stages, are
    // faster if they ask half a tile later and spare themselves a barrier.
    const bool in_boxes = !T::BOXED || item.kv_begin % 16 == 0, early = T::BOXED && T::STAGES == 2 && num_items < args.multiprocessors;
    u32 weights = shared_address(shared + T::WEIGHTS_AT);

    for (u32 tile_begin = item.kv_begin, stage = 0; tile_begin < item.kv_end; tile_begin += T::TOKENS) {
        if (in_boxes) pace.wait(stage);
        const u32 free_stage = stage == 0 ? T::STAGES - 1 : stage - 1;
        const u32 tokens = stages + stage * T::STAGE_BYTES, free = stages + free_stage * T::STAGE_BYTES;
        const bool more = tile_begin + (T::STAGES - 1) * T::TOKENS < item.kv_end;

        if constexpr (T::BOXED) {
            if (early) {
                __syncthreads();
                if (more) loader.load(free, free_stage);
            }
            if (!in_boxes) load_inside_boxes<T>(args, item, tile_begin, tokens);
            if (tile_begin + T::TOKENS > item.kv_end) clear_rest<T>(item, tile_begin, tokens);
        } else {
            if (more && loader.by_8()) loader.load(free, free_stage);
        }

        // 1. scores
        ScoresOf<T> scores;
        if constexpr (T::BOXED) {
            scores.add(queries, tokens, weights, row_warp, token_warp, [](int) {});
        } else {
            // The copies of a later tile stand between: many at once would wait for each other.
            const bool copies = more && !loader.by_8();
            loader.begin(free);
            scores.add(queries, tokens, weights, row_warp, token_warp, [&](int step) { loader.copies_of(step, copies); });
            if (copies) loader.end();
        }
        pace.asked(free_stage, more);
        const u32 own = weights + weights_of<T>(row_warp, token_warp);
        scores.exchange(weights, row_warp, token_warp);
        float(&logits)[T::TOKEN_TILES][4] = scores.logits();

        // 2. softmax
        const u32 first = tile_begin + token_warp * (T::TOKEN_TILES * 8) + lane % 4 * 2;
        const bool masks = tile_begin + T::TOKENS > seen_by_all;
        bool grows = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 row = row_warp * 16 + h * 8 + lane / 4;
            const float scale = scales[row];
            // Looked up anew: it is needed for few tiles.
            const u32 limit = masks ? seen[row] : ~0u;
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& logit = logits[j][2 * h + e];
                    logit *= scale;
                    if (masks && first + j * 8 + e >= limit) logit = EMPTY;
                    grows |= logit > top[h] + LAZY;
                }
            }
        }
        float fresh[2];
        weigh<T>(logits, top, fresh, own);
        if (any_of_block(grows)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float largest = EMPTY;
#pragma unroll
                for (int j = 0; j < T::TOKEN_TILES; j++) largest = fmaxf(largest, fmaxf(logits[j][2 * h], logits[j][2 * h + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                if (lane % 4 == 0) maxima[token_warp * T::ROWS + row_warp * 16 + h * 8 + lane / 4] = largest;
            }
            __syncthreads();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 row = row_warp * 16 + h * 8 + lane / 4;
                float largest = EMPTY;
#pragma unroll
                for (int w = 0; w < T::TOKEN_WARPS; w++) largest = fmaxf(largest, maxima[w * T::ROWS + row]);
                float factor = 1.0f;
                if (largest > top[h] + LAZY) {
                    factor = exp2_fast(top[h] - largest);
                    top[h] = largest;
                }
                sum[h] *= factor;
                if (token_warp == 0 && lane % 4 == 0) factors[row] = factor;
            }
            weigh<T>(logits, top, fresh, own);
            __syncthreads();
            output.rescale(factors);
        }
        // All are done with the tile before: they have voted on this one.
        if constexpr (T::BOXED) {
            if (more && !early) loader.load(free, free_stage);
        }
        sum[0] += fresh[0];
        sum[1] += fresh[1];

        // 3. values
        output.add(weights, tokens);
        pace.done_with_tile();
        if (T::BOXED) weights = shared_address(shared + T::WEIGHTS_AT) * 2 + T::WEIGHTS_TURN - weights;
        stage = stage + 1 == T::STAGES ? 0 : stage + 1;
    }
    if (T::COPIES == GROUPS) wait_for_all_but<0>();

    // The rows' sums, then the output.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (lane % 4 == 0) maxima[token_warp * T::ROWS + row_warp * 16 + h * 8 + lane / 4] = sum[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = row_warp * 16 + h * 8 + lane / 4;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < T::TOKEN_WARPS; w++) total += maxima[w * T::ROWS + row];
        if (token_warp == 0 && lane % 4 == 0) {
            const bool any = !(total == 0.0f); // NaN too
            const float base_2 = any ? top[h] + log2_fast(total) : EMPTY;
            factors[row] = any ? 1.0f / total : 1.0f;
            if (row < item.num_rows) {
                if (item.partial == DIRECT) {
                    const u32 index = item.first_row + row;
                    store_lse(args, bound_token(args, args.queries[index / args.num_heads].token), index % args.num_heads, base_2, any);
                } else {
                    args.partials[(static_cast<u64>(item.partial) + row) * (T::LATENT + 4) + T::LATENT] = base_2;
                }
            }
        }
    }
    __syncthreads();
    output.write(args, item, factors);
}

#define DECODE(name, ...) \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ Args args) { \
        decode<Tile<__VA_ARGS__>>(args); \
    } \
    NUMBERS_OF(name, Tile<__VA_ARGS__>)

#define DECODE_TMA(name, ...) \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__, TENSORS>::THREADS, 1) name(const __grid_constant__ Args args, const __grid_constant__ TensorMap map) { \
        decode<Tile<__VA_ARGS__, TENSORS>>(args, &map); \
    } \
    NUMBERS_OF(name, Tile<__VA_ARGS__, TENSORS>)
