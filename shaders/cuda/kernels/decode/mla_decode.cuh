// Split-KV MLA decode in absorbed form on tensor cores (mma.sync m16n8k16): variants `mma_*`, and `mma_tma_m16` with TMA loads.
//
//   one block = one item: out, lse = softmax(scale * q . kv^T) . kv[:, :L] for a tile of query rows over a range of tokens
//
// The same work items and tables as shaders/mla_decode_coop.wgsl. Tile: ROWS query rows, looping over tiles of TOKENS tokens in a pipeline
// of STAGES stages of shared memory, in the cache's dtype. For each tile:
//   1. scores   the warps are ROW_WARPS x TOKEN_WARPS: each multiplies 16 query rows with its share of the tokens
//   2. softmax  in registers, with lazy rescaling (FlashAttention-4): weights are relative to the running maximum, which moves only when
//               some logit exceeds it by more than LAZY, so weights stay below 2^LAZY. One vote of the block a tile tells whether any
//               row's does; only then are maxima exchanged, weights recomputed and the output rescaled
//   3. values   each warp owns L / WARPS columns of the output of all rows: += weights x values, from the same stage
//
// A bf16 cache is multiplied as bf16, others as f16; FP8 codes become f16 in registers, exactly. A query that this dtype does not hold is
// split into PARTS. For f16, a query row is first scaled by a power of two into f16's range.
//
// A masked token weighs exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on which rows share its
// tile. An item with a logit that is NaN or infinite, masked or not, is done again in f32 (decode_f32.cuh). Measured against FlashMLA and
// others: benches/results/h200-cuda*.md.
#pragma once

#include "decode_boxes.cuh"
#include "decode_f32.cuh"
#include "decode_scores.cuh"

// The accumulators of a warp's columns of the output, for all rows.
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
        // ldmatrix addresses of weights: of 16 tokens, two chunks of one warp, or one chunk of each of two warps (TOKEN_TILES of 1).
        const u32 weight_at = weights + (T::TOKEN_TILES == 1 ? WeightOrder::at(lane % 16, 0) + lane / 16 * T::WEIGHTS_STRIDE : WeightOrder::at(lane % 16, lane / 16));
        constexpr int CHUNKS = T::COLUMN_TILES * T::ELEMENT_BYTES / 2; // chunks of 16 bytes of a warp's columns
        static_assert(CHUNKS % Order::GROUP == 0 || T::Layout::IS_RECORD, "whole groups");
        const u32 at = stage + Order::at(lane % 16, warp * CHUNKS + lane / 16);
#pragma unroll
        for (int step = 0; step < T::TOKENS / 16; step++) {
            u32 a[T::ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < T::ROW_TILES; r++) load_matrices(a[r], WeightOrder::from(weight_at, step * 2 % T::TOKEN_TILES) + weights_of<T>(r, step * 2 / T::TOKEN_TILES));
            const u32 row = Order::rows(at, step * 16);
            u32 scales[2];
            if constexpr (T::Layout::IS_RECORD) load_scales(scales, stage, step);
            if constexpr (T::CACHE == E4M3) {
                // A chunk is 16 columns: one mma tile of the even columns and one of the odd ones.
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 4) {
                    u32 codes[4];
                    load_matrices_transposed(codes, Order::from(row, c / 2));
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        u32 even[2], odd[2];
                        e4m3_to_f16(__byte_perm(codes[2 * i], 0, 0x3120), even[0], odd[0]);
                        e4m3_to_f16(__byte_perm(codes[2 * i + 1], 0, 0x3120), even[1], odd[1]);
                        if constexpr (T::Layout::IS_RECORD) {
#pragma unroll
                            for (int h = 0; h < 2; h++) {
                                even[h] = multiply_f16_pairs(even[h], scales[h]);
                                odd[h] = multiply_f16_pairs(odd[h], scales[h]);
                            }
                        }
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

    // The scales of records: those of the lane's four of 16 tokens, in the group that has the warp's columns.
    DEVICE static void load_scales(u32 (&to)[2], u32 stage, int step) {
        constexpr int COLUMNS = T::COLUMN_TILES * 8;
        static_assert(128 % COLUMNS == 0, "one group");
        const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES * COLUMNS / 128;
        const u32 at = stage + (step * 16 + lane % 4 * 2) * T::ROW_BYTES + T::LATENT + group * 4;
#pragma unroll
        for (int h = 0; h < 2; h++) to[h] = pack_scales(__uint_as_float(load_4(at + h * 8 * T::ROW_BYTES)), __uint_as_float(load_4(at + (h * 8 + 1) * T::ROW_BYTES)));
    }

    // The epilogue: stores each row times its factor. A warp's columns pass through shared memory, where the queries and the stages were,
    // 16 rows at a time, so that a loop stores them: written out for each accumulator, the stores were a third of the kernel's code. `rows`
    // are where rows begin.
    static constexpr int COLUMNS = T::COLUMN_TILES * 8, PITCH = COLUMNS + 8, WARP_FLOATS = 16 * PITCH;
    static constexpr int ROWS_AT = T::WARPS * WARP_FLOATS * 4;
    static_assert(ROWS_AT + T::ROWS * 8 <= T::WEIGHTS_AT, "fits");

    DEVICE void write(const Destination& destination, u32 num_rows, u8* const* rows, const float* factors, u8* shared) const {
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        float* staged = reinterpret_cast<float*>(shared) + warp * WARP_FLOATS;
#pragma unroll 1
        for (int tile = 0; tile < T::ROW_TILES; tile++) {
#pragma unroll
            for (int r = 0; r < T::ROW_TILES; r++)
                if (r == tile) stage(sums[r], staged);
            __syncwarp();
#pragma unroll 1
            for (u32 i = lane; i < 16 * COLUMNS / 4; i += LANES) {
                const u32 row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
                if (tile * 16 + row >= num_rows) break;
                const float4 x = staged_columns(staged + row * PITCH, column);
                const float factor = factors[tile * 16 + row];
                u8* to = rows[tile * 16 + row];
                __builtin_assume(__isGlobal(to));
                destination.store(to, warp * COLUMNS + column, make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor));
            }
            __syncwarp();
        }
    }

    DEVICE static void stage(const float (&sums)[T::COLUMN_TILES][4], float* staged) {
        const u32 lane = threadIdx.x % LANES;
        float* to = staged + lane / 4 * PITCH + lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < T::COLUMN_TILES; c++) {
            *reinterpret_cast<float2*>(to + c * 8) = make_float2(sums[c][0], sums[c][1]);
            *reinterpret_cast<float2*>(to + 8 * PITCH + c * 8) = make_float2(sums[c][2], sums[c][3]);
        }
    }

    // Four columns of a staged row.
    DEVICE static float4 staged_columns(const float* row, u32 column) {
        if constexpr (T::CACHE == E4M3) {
            // Even columns are in one tile, odd ones in the next.
            const float* tile = row + column / 16 * 16 + column % 16 / 2;
            const float2 even = *reinterpret_cast<const float2*>(tile), odd = *reinterpret_cast<const float2*>(tile + 8);
            return make_float4(even.x, odd.x, even.y, odd.y);
        } else {
            return *reinterpret_cast<const float4*>(row + column);
        }
    }
};

// Softmax weights to shared memory, and a lane's sums of them by row.
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

// The end of a row of an item: its LSE, or what a merge weighs it by, and for Output::write its place and its factor.
template <class T>
DEVICE void finish_row(const Args& args, const WorkItem& item, const Destination& destination, u32 row, float top, float total, float* factors, u8** places) {
    const bool any = HAS_WEIGHT(total);
    if (row >= item.num_rows) return;
    const u32 index = item.first_row + row, token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
    factors[row] = any && destination.is_direct ? factor_of_row(total + sink_weight(args, head, top)) : 1.0f;
    if constexpr (T::Layout::IS_RECORD) factors[row] *= 1.0f / SCALE_BIAS;
    places[row] = destination.row<T::LATENT>(args, item, row, token, head);
    if (destination.is_direct) {
        store_lse(args, token, head, lse_of_row(top, total), any);
    } else {
        store_weight(reinterpret_cast<float*>(places[row]), T::LATENT, top, total);
    }
}

// Row sums across warps, LSEs, then the epilogue. The item is read again, so that the main loop keeps fewer registers.
template <class T>
DEVICE void finish(const Args& args, u8* shared, const Output<T>& output, const float (&top)[2], float (&sum)[2]) {
    const WorkItem item = args.items[blockIdx.x];
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, row_warp = warp / T::TOKEN_WARPS, token_warp = warp % T::TOKEN_WARPS;
    float* maxima = reinterpret_cast<float*>(shared + T::MAXIMA_AT);
    float* factors = reinterpret_cast<float*>(shared + T::FACTORS_AT);
    float* tops = reinterpret_cast<float*>(shared + T::SEEN_AT);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = row_warp * 16 + h * 8 + lane / 4;
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (lane % 4 == 0) maxima[token_warp * T::ROWS + row] = sum[h];
        if (token_warp == 0 && lane % 4 == 0) tops[row] = top[h];
    }
    __syncthreads();
    if (!is_finite(*reinterpret_cast<const float*>(shared + T::SCALES_AT))) return decode_rows<T>(args, warp);
    const Destination destination(args, item);
    u8** places = reinterpret_cast<u8**>(shared + Output<T>::ROWS_AT);
#pragma unroll 1
    for (u32 row = threadIdx.x; row < T::ROWS; row += T::THREADS) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < T::TOKEN_WARPS; w++) total += maxima[w * T::ROWS + row];
        finish_row<T>(args, item, destination, row, tops[row], total, factors, places);
    }
    __syncthreads();
    output.write(destination, item.num_rows, places, factors, shared);
}

// A warp's place in its block: it scores 16 query rows with its share of a tile's tokens.
template <class T>
struct WarpOf {
    u32 lane, warp, row_warp, token_warp;
};

// The item's query rows, as fragments in `queries` or in shared memory; `rows` are on their way there.
template <class T>
DEVICE void load_queries(const Args& args, const WorkItem& item, u32 staged, float* scales, const WarpOf<T>& own, QueryRows<T>& rows, Queries<T>& queries) {
    for (u32 first = 0; first < T::ROWS; first += T::STAGED_ROWS) {
        if (first > 0) __syncthreads();
        for (u32 row = first + own.warp; row < first + T::STAGED_ROWS; row += rows.BATCH * T::WARPS) {
            rows.ask(args, item, row);
            rows.store(args, row, staged - first * T::QUERY_BYTES, scales);
        }
        if constexpr (T::KEPT > 0) {
            __syncthreads();
            queries.keep(first / 16, own.row_warp, own.token_warp);
        }
    }
}

// Sets what a lane's two rows begin with. Returns the position before which all rows of the warp see keys.
template <class T>
DEVICE u32 begin_rows(const Args& args, const WorkItem& item, const WarpOf<T>& own, u32* seen, float (&top)[2], float (&sum)[2]) {
    u32 seen_by_all = ~0u;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own.row_warp * 16 + h * 8 + own.lane / 4;
        const u32 index = item.first_row + min(row, item.num_rows - 1);
        const u32 seen_here = min(args.queries[index / args.num_heads].visible, item.kv_end);
        seen_by_all = min(seen_by_all, seen_here);
        if (own.token_warp == 0 && own.lane % 4 == 0) seen[row] = seen_here;
        top[h] = EMPTY;
        sum[h] = 0.0f;
    }
    return __reduce_min_sync(~0u, seen_by_all);
}

// Completes the tile at `tokens` where it is not in whole boxes, and asks for a later tile, to `free`, where that is done before the
// scores.
template <class T, class LoaderOfTile>
DEVICE void complete_tile(const Args& args, const WorkItem& item, LoaderOfTile& loader, bool early, bool in_boxes, bool more, u32 tile_begin, u32 tokens, u32 free, u32 free_stage) {
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
}

// Masks tokens whose entry of the list is no slot. Their logits are 0, as they are loaded as zeros.
template <class T>
DEVICE void mask_entries(const Args& args, float (&logits)[T::TOKEN_TILES][4], u32 stage, const WarpOf<T>& own) {
    asm volatile(""); // keeps the caller's branch
    const u32 entries = entries_at<T>(stage) + (own.token_warp * (T::TOKEN_TILES * 8) + own.lane % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (!is_slot(args, load_4(entries + (j * 8 + e) * 4))) logits[j][e] = logits[j][2 + e] = EMPTY;
}

// Scales and masks logits. Sets whether some maximum grows by more than LAZY, and whether some logit is NaN or infinite.
template <class T>
DEVICE void mask(const Args& args, float (&logits)[T::TOKEN_TILES][4], const float (&top)[2], u32 stage, u32 tile_begin, u32 seen_by_all, const float* scales, const u32* seen, const WarpOf<T>& own, bool& grows, bool& has_non_finite) {
    const u32 first = tile_begin + own.token_warp * (T::TOKEN_TILES * 8) + own.lane % 4 * 2;
    const bool masks = tile_begin + T::TOKENS > seen_by_all;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own.row_warp * 16 + h * 8 + own.lane / 4;
        const float scale = scales[row];
        // Read from shared memory, not kept in a register: few tiles need it.
        const u32 limit = masks ? seen[row] : ~0u;
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& logit = logits[j][2 * h + e];
                logit *= scale;
                has_non_finite |= !is_finite(logit);
                if (masks && first + j * 8 + e >= limit) logit = EMPTY;
                grows |= logit > top[h] + LAZY;
            }
        }
    }
    if constexpr (T::LISTS) {
        if (args.is_listed) mask_entries<T>(args, logits, stage, own);
    }
}

// Tells the other warps the maxima of a own.warp's logits.
template <class T>
DEVICE void share_maxima(const float (&logits)[T::TOKEN_TILES][4], float* maxima, const WarpOf<T>& own) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float largest = EMPTY;
#pragma unroll
        for (int j = 0; j < T::TOKEN_TILES; j++) largest = fmaxf(largest, fmaxf(logits[j][2 * h], logits[j][2 * h + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (own.lane % 4 == 0) maxima[own.token_warp * T::ROWS + own.row_warp * 16 + h * 8 + own.lane / 4] = largest;
    }
}

// Moves a row's running maximum if that of the tile exceeds it by more than LAZY. Returns the factor of what was summed before.
template <class T>
DEVICE float move_top(const float* maxima, float& top) {
    float largest = EMPTY;
#pragma unroll
    for (int w = 0; w < T::TOKEN_WARPS; w++) largest = fmaxf(largest, maxima[w * T::ROWS]);
    float factor = 1.0f;
    if (largest > top + LAZY) {
        factor = exp2_fast(top - largest);
        top = largest;
    }
    return factor;
}

// Asks for the first tiles.
template <class T, class LoaderOfTile>
DEVICE void load_first_tiles(const WorkItem& item, u32 stages, LoaderOfTile& loader, Pace<T>& pace) {
#pragma unroll 1
    for (int i = 0; i < T::STAGES - 1; i++) {
        const bool any = item.kv_begin + i * T::TOKENS < item.kv_end;
        if (any) loader.load(stages + i * T::STAGE_BYTES, i);
        pace.asked(i, any);
    }
}

// The values of a block are variables of this function, which others take by reference: as members of one struct nvcc gives them other
// registers, and the code is another.
template <class T>
DEVICE void decode(const Args& args, const TensorMap* map = nullptr) {
    extern __shared__ __align__(1024) u8 shared[];
    // The item is loaded before num_items is known, to overlap their latency: the table has room for an item a block.
    WorkItem item = args.items[blockIdx.x];
    griddep_launch();
    const u32 num_items = args.header->num_items;
    if (blockIdx.x >= num_items) return griddep_wait();
    const u32 stages = shared_address(shared + T::STAGES_AT);
    float* maxima = reinterpret_cast<float*>(shared + T::MAXIMA_AT);
    float* factors = reinterpret_cast<float*>(shared + T::FACTORS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    u32* seen = reinterpret_cast<u32*>(shared + T::SEEN_AT); // [ROWS] keys before this position are visible to a row; running maxima at the end
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 row_warp = warp / T::TOKEN_WARPS, token_warp = warp % T::TOKEN_WARPS;
    const WarpOf<T> own{lane, warp, row_warp, token_warp};
    // Programmatic dependent launch: the tables are the host's and may be read before the previous kernel has ended, but a page list
    // written on the device may not, nor may lists.
    if (args.clamp_pages || (T::LISTS && args.is_listed)) griddep_wait();
    if constexpr (T::LISTS) find_list(args, item);
    const u32 barriers = shared_address(shared + T::BARRIERS_AT);
    auto loader = loader_of<T>(args, map, item, barriers);
    Pace<T> pace(barriers);
    if (T::COPIES != GROUPS) __syncthreads();
    griddep_wait();
    load_first_tiles<T>(item, stages, loader, pace);
    QueryRows<T> rows;
    Queries<T> queries(shared_address(shared + T::QUERIES_AT), shared_address(shared + T::REST_AT), row_warp, token_warp);
    load_queries<T>(args, item, shared_address(shared + T::QUERIES_AT), scales, own, rows, queries);

    // The mma accumulator layout: a lane has rows lane / 4 and lane / 4 + 8, and of each two consecutive tokens of every eight.
    float top[2], sum[2];
    const u32 seen_by_all = begin_rows<T>(args, item, own, seen, top, sum);
    Output<T> output;
    if (T::BOXED) fence_proxy_async();
    if (T::COPIES != GROUPS) __syncthreads();
    // With two stages, a block alone on its multiprocessor refills a stage as early as possible (`early`), at the price of a barrier. Two
    // blocks on one, or three stages, are faster refilling half a tile later, after the vote, without that barrier.
    const bool in_boxes = !T::BOXED || item.kv_begin % 16 == 0, early = T::BOXED && T::STAGES == 2 && num_items < args.multiprocessors;
    u32 weights = shared_address(shared + T::WEIGHTS_AT);

    for (u32 tile_begin = item.kv_begin, stage = 0; tile_begin < item.kv_end; tile_begin += T::TOKENS) {
        if (in_boxes) pace.wait(stage);
        const u32 free_stage = stage == 0 ? T::STAGES - 1 : stage - 1;
        const u32 tokens = stages + stage * T::STAGE_BYTES, free = stages + free_stage * T::STAGE_BYTES;
        const bool more = tile_begin + (T::STAGES - 1) * T::TOKENS < item.kv_end;
        complete_tile<T>(args, item, loader, early, in_boxes, more, tile_begin, tokens, free, free_stage);

        // 1. scores
        ScoresOf<T> scores;
        if constexpr (T::BOXED) {
            scores.add(queries, tokens, weights, row_warp, token_warp, [](int) {});
        } else {
            // The copies of a later tile are interleaved with the multiplications: many at once would stall on each other.
            const bool copies = more && !loader.by_8();
            loader.begin(free);
            if (copies) loader.find_slots();
            scores.add(queries, tokens, weights, row_warp, token_warp, [&](int step) { loader.copies_of(step, copies); });
            if (copies) loader.end(free_stage);
        }
        pace.asked(free_stage, more);
        const u32 own_weights = weights + weights_of<T>(row_warp, token_warp);
        scores.exchange(weights, row_warp, token_warp);
        float(&logits)[T::TOKEN_TILES][4] = scores.logits();

        // 2. softmax
        bool grows = false, has_non_finite = false;
        mask<T>(args, logits, top, stage, tile_begin, seen_by_all, scales, seen, own, grows, has_non_finite);
        float fresh[2];
        weigh<T>(logits, top, fresh, own_weights);
        if (any_of_block(grows || has_non_finite)) {
            // Recorded in a row's scale, which takes no register: all warps have read their scales of this tile, and see the change after
            // the next barrier.
            if (has_non_finite) atomicOr(reinterpret_cast<u32*>(scales), NAN_BITS);
            share_maxima<T>(logits, maxima, own);
            __syncthreads();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 row = row_warp * 16 + h * 8 + lane / 4;
                const float factor = move_top<T>(maxima + row, top[h]);
                sum[h] *= factor;
                if (token_warp == 0 && lane % 4 == 0) factors[row] = factor;
            }
            weigh<T>(logits, top, fresh, own_weights);
            __syncthreads();
            output.rescale(factors);
        }
        // The stage is empty: all warps have voted on this tile, so they are done with the one before.
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
    if (T::COPIES == GROUPS) cp_async_wait<0>();

    finish<T>(args, shared, output, top, sum);
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

// The same of records of a layout.
#define DECODE_RECORDS(name, layout, ...) \
    extern "C" __global__ void __launch_bounds__(Tile<layout::LATENT, layout::DIM - layout::LATENT, E4M3, __VA_ARGS__, GROUPS, layout>::THREADS, 1) name(const __grid_constant__ Args args) { \
        decode<Tile<layout::LATENT, layout::DIM - layout::LATENT, E4M3, __VA_ARGS__, GROUPS, layout>>(args); \
    } \
    NUMBERS_OF(name, Tile<layout::LATENT, layout::DIM - layout::LATENT, E4M3, __VA_ARGS__, GROUPS, layout>)
