// Attention of one tile of query rows over one range of tokens on tensor cores: a split of a split-KV decode.
//
// The twin of ../mla_decode_coop.wgsl: the same work items and tables. A block takes one item. STAGES tiles of TOKENS cache rows are on
// their way to shared memory, as they lie in the cache. For each tile:
//   1. scores   ROW_WARPS x TOKEN_WARPS: each warp multiplies 16 query rows with its share of the tokens
//   2. softmax  in registers; the warps of a row tell each other their largest logit. A row's maximum moves only when it grew by more
//               than LAZY: weights stay below 2^LAZY, and the output is rarely rescaled
//   3. values   each warp owns L / WARPS columns of the output of all rows: += weights x values
//
// bf16 rows are multiplied as bf16, others as f16: FP8 codes become f16 in registers. A query that the type does not hold is split in PARTS, after a
// power of two has brought its row into f16's range.
//
// Masked tokens weigh exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on which
// rows share its tile.
#pragma once

#include "mla.cuh"

constexpr float LAZY = 12.0f;

// How a block cuts an item.
template <int LATENT_, int ROPE_, Dtype CACHE_, int ROWS_, int TOKENS_, int WARPS_, int STAGES_, int PARTS_, bool KEEPS_QUERIES_>
struct Tile {
    static constexpr int LATENT = LATENT_, DIM = LATENT_ + ROPE_, ROWS = ROWS_, TOKENS = TOKENS_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int PARTS = PARTS_; // that a query is split in
    static constexpr Dtype CACHE = CACHE_;
    static constexpr bool KEEPS_QUERIES = KEEPS_QUERIES_; // in registers; else they are read from shared memory for each tile
    static constexpr int THREADS = WARPS * LANES;
    static constexpr int ROW_WARPS = ROWS / 16, TOKEN_WARPS = WARPS / ROW_WARPS;
    static constexpr int TOKEN_TILES = TOKENS / TOKEN_WARPS / 8; // of a warp's scores
    static constexpr int ROW_TILES = ROWS / 16, COLUMN_TILES = LATENT / WARPS / 8; // of a warp's output
    static constexpr int STEPS = DIM / 16; // of a score
    static constexpr int ELEMENT_BYTES = bytes_of(CACHE), ROW_BYTES = DIM * ELEMENT_BYTES, QUERY_BYTES = DIM * 2;
    static constexpr int WEIGHT_PITCH = TOKENS + 8; // 16-bit elements
    static constexpr int STAGE_BYTES = TOKENS * ROW_BYTES, QUERIES_BYTES = PARTS * ROWS * QUERY_BYTES;
    // Queries that stay in registers pass through the last stage.
    static constexpr int STAGES_AT = KEEPS_QUERIES ? 0 : QUERIES_BYTES;
    static constexpr int QUERIES_AT = KEEPS_QUERIES ? (STAGES - 1) * STAGE_BYTES : 0;
    static constexpr int WEIGHTS_AT = STAGES_AT + STAGES * STAGE_BYTES;
    static constexpr int MAXIMA_AT = WEIGHTS_AT + ROWS * WEIGHT_PITCH * 2; // [TOKEN_WARPS, ROWS]
    static constexpr int FACTORS_AT = MAXIMA_AT + TOKEN_WARPS * ROWS * 4; // [ROWS]
    static constexpr int SCALES_AT = FACTORS_AT + ROWS * 4; // [ROWS]
    static constexpr int SHARED_BYTES = SCALES_AT + ROWS * 4;
    static_assert(TOKEN_TILES >= 1 && COLUMN_TILES % 2 == 0 && TOKENS % 16 == 0 && DIM % 32 == 0, "shape");
    static_assert(!KEEPS_QUERIES || QUERIES_BYTES <= STAGE_BYTES, "queries pass through a stage");
    static_assert(STAGES >= 2, "one tile is used, the others are on their way");
};

// Which 16-byte chunk of a row stands in place of chunk `chunk`: neighbouring rows use other banks.
template <int ROW_BYTES>
struct Swizzle {
    // Chunks that change places, and rows that share an order.
    static constexpr int GROUP = ROW_BYTES % 128 == 0 ? 8 : ROW_BYTES % 64 == 0 ? 4 : 2;
    static constexpr int SHIFT = GROUP == 8 ? 0 : GROUP == 4 ? 1 : 2;
    static_assert(ROW_BYTES % (GROUP * 16) == 0, "whole groups");
    DEVICE static u32 of(u32 row) { return (row >> SHIFT) & (GROUP - 1); }
    DEVICE static u32 at(u32 row, u32 chunk) { return row * ROW_BYTES + ((chunk ^ of(row)) << 4); }
};

// Where a thread's rows of the cache are: those of the next tile to load.
template <class T>
struct Loader {
    using Order = Swizzle<T::ROW_BYTES>;
    static constexpr int ROW_LANES = Order::GROUP, PASS_ROWS = T::THREADS / ROW_LANES;
    static constexpr int PASSES = (T::TOKENS + PASS_ROWS - 1) / PASS_ROWS;
    static constexpr int CHUNKS = T::ROW_BYTES / 16 / ROW_LANES; // of a thread's share of a row
    // Passes share the order of their rows' chunks.
    static_assert(PASSES == 1 || PASS_ROWS % 8 == 0, "order");

    const Args& args;
    u32 page_begin, kv_end, page_size, num_pages;
    u32 token; // of the first pass
    u32 page[PASSES], offset[PASSES], id[PASSES];

    DEVICE Loader(const Args& args, const WorkItem& item) : args(args) {
        page_begin = item.page_begin;
        kv_end = item.kv_end;
        page_size = args.header->page_size;
        num_pages = args.header->num_pages;
        token = item.kv_begin + threadIdx.x / ROW_LANES;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            page[i] = (token + i * PASS_ROWS) / page_size;
            offset[i] = token + i * PASS_ROWS - page[i] * page_size;
        }
        look_up();
    }

    // The page ids are asked for a tile ahead.
    DEVICE void look_up() {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            id[i] = 0;
            if (token + i * PASS_ROWS < kv_end) id[i] = args.pages[page_begin + page[i]];
        }
    }

    DEVICE void load(u32 stage) {
        const u32 row = threadIdx.x / ROW_LANES, lane = threadIdx.x % ROW_LANES;
        const u32 to = stage + Order::at(row, lane);
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (T::TOKENS % PASS_ROWS != 0 && row + i * PASS_ROWS >= T::TOKENS) break;
            const bool is_there = token + i * PASS_ROWS < kv_end;
            const u32 known = args.clamp_pages ? min(id[i], num_pages - 1) : id[i];
            const u64 element = known * args.kv_block_stride + static_cast<u64>(offset[i]) * T::DIM;
            const u8* from = args.kv + element * T::ELEMENT_BYTES + lane * 16;
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                const u32 chunk = to + i * PASS_ROWS * T::ROW_BYTES + j * ROW_LANES * 16;
                if (T::CACHE != E4M3 || args.copies_16) {
                    copy_16(chunk, from + j * ROW_LANES * 16, is_there);
                } else {
                    copy_8(chunk, from + j * ROW_LANES * 16, is_there);
                    copy_8(chunk + 8, from + j * ROW_LANES * 16 + 8, is_there);
                }
            }
        }
        const u32 pages = T::TOKENS / page_size, rest = T::TOKENS - pages * page_size;
        token += T::TOKENS;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            page[i] += pages;
            offset[i] += rest;
            if (offset[i] >= page_size) {
                offset[i] -= page_size;
                page[i]++;
            }
        }
        look_up();
    }
};

// Two words of eight FP8 codes as f16: the first two of each four, then the others.
DEVICE u32 e4m3_to_f16(u16 codes) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
}

// Two neighbouring elements of a query as they are loaded, and what they are.
template <Dtype DTYPE>
struct Pair;

template <>
struct Pair<F32> {
    using Raw = float2;
    DEVICE static float2 of(Raw raw) { return raw; }
};

template <>
struct Pair<F16> {
    using Raw = u32;
    DEVICE static float2 of(Raw raw) { return make_float2(f16_to_float(static_cast<u16>(raw)), f16_to_float(static_cast<u16>(raw >> 16))); }
};

template <>
struct Pair<BF16> {
    using Raw = u32;
    DEVICE static float2 of(Raw raw) { return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xFFFF0000u)); }
};

template <>
struct Pair<E4M3> {
    using Raw = u16;
    DEVICE static float2 of(Raw raw) { return make_float2(e4m3_to_float(static_cast<u8>(raw)), e4m3_to_float(static_cast<u8>(raw >> 8))); }
};

// Query rows to shared memory as the matrices take them, two rows of a warp at a time. All loads are asked for before the first is waited for.
// An FP8 tile's columns are permuted in each 16: a lane's four codes are of two neighbouring places and of those 8 further.
template <class T, Dtype DTYPE>
DEVICE void stage_queries_of(const Args& args, const WorkItem& item, u32 to, float* scales) {
    using Order = Swizzle<T::QUERY_BYTES>;
    using Raw = typename Pair<DTYPE>::Raw;
    constexpr int PAIRS = (T::DIM + 63) / 64; // of a lane
    constexpr int BATCH = 2;
    static_assert(T::ROWS % (BATCH * T::WARPS) == 0, "whole batches");
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (u32 first_row = warp; first_row < T::ROWS; first_row += BATCH * T::WARPS) {
        Raw raw[BATCH][PAIRS] = {};
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u32 index = item.first_row + min(first_row + b * T::WARPS, item.num_rows - 1);
            const u32 token = bound_token(args, args.queries[index / args.num_heads].token), head = index % args.num_heads;
            const Raw* nope = reinterpret_cast<const Raw*>(args.q_nope) + (token * args.q_nope_token_stride + head * args.q_nope_head_stride) / 2;
            const Raw* pe = reinterpret_cast<const Raw*>(args.q_pe) + (token * args.q_pe_token_stride + head * args.q_pe_head_stride) / 2;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const u32 pair = i * 32 + lane;
                if (pair < T::LATENT / 2) {
                    raw[b][i] = nope[pair];
                } else if (pair < T::DIM / 2) {
                    raw[b][i] = pe[pair - T::LATENT / 2];
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u32 row = first_row + b * T::WARPS;
            u32 exponent = 127;
            if constexpr (T::CACHE != BF16) {
                float largest = 0.0f;
#pragma unroll
                for (int i = 0; i < PAIRS; i++) {
                    const float2 value = Pair<DTYPE>::of(raw[b][i]);
                    largest = fmaxf(largest, fmaxf(fabsf(value.x), fabsf(value.y)));
                }
#pragma unroll
                for (int lanes = 1; lanes < LANES; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
                // The largest element to just below 2^15.
                exponent = min(max(268 - static_cast<int>(__float_as_uint(largest) >> 23), 1), 253);
            }
            const float power = __uint_as_float(exponent << 23);
            if (lane == 0) scales[row] = args.logit_scale * __uint_as_float((254 - exponent) << 23);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const u32 column = (i * 32 + lane) * 2;
                if (column >= T::DIM) break;
                u32 place = column;
                if constexpr (T::CACHE == E4M3) {
                    const u32 k = column % 16;
                    place = column - k + (k / 2) % 2 * 8 + k / 4 * 2;
                }
                const float2 value = Pair<DTYPE>::of(raw[b][i]);
                float first = value.x * power, second = value.y * power;
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    u32 word;
                    if constexpr (T::CACHE == BF16) {
                        word = pack_bf16(first, second);
                        first -= __uint_as_float(word << 16);
                        second -= __uint_as_float(word & 0xFFFF0000u);
                    } else {
                        word = pack_f16(first, second);
                        first -= f16_to_float(static_cast<u16>(word));
                        second -= f16_to_float(static_cast<u16>(word >> 16));
                    }
                    const u32 at = to + part * T::ROWS * T::QUERY_BYTES + Order::at(row, place / 8) + place % 8 * 2;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
                }
            }
        }
    }
}

template <class T>
DEVICE void stage_queries(const Args& args, const WorkItem& item, u32 to, float* scales) {
    // Others than these have two parts on this cache, and the other way round.
    if constexpr (T::PARTS == 2) {
        if (T::CACHE == BF16 && args.query_dtype == F16) {
            stage_queries_of<T, F16>(args, item, to, scales);
        } else {
            stage_queries_of<T, F32>(args, item, to, scales);
        }
    } else if (args.query_dtype == BF16) {
        stage_queries_of<T, BF16>(args, item, to, scales);
    } else if (T::CACHE != BF16 && args.query_dtype == F16) {
        stage_queries_of<T, F16>(args, item, to, scales);
    } else {
        stage_queries_of<T, E4M3>(args, item, to, scales);
    }
}

template <class T>
DEVICE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (T::CACHE == BF16) {
        multiply_bf16(sum, a, b0, b1);
    } else {
        multiply_f16(sum, a, b0, b1);
    }
}

// The queries of a step, part by part: from registers, or from shared memory.
template <class T>
struct Queries {
    using Order = Swizzle<T::QUERY_BYTES>;
    u32 kept[T::KEEPS_QUERIES ? T::PARTS * T::STEPS : 1][4];
    u32 at, order, half;

    DEVICE Queries(u32 staged, u32 first_row) {
        const u32 lane = threadIdx.x % LANES, row = first_row + lane % 16;
        at = staged + row * T::QUERY_BYTES;
        order = Order::of(row);
        half = lane / 16;
    }

    DEVICE void read(u32 (&to)[4], int part, int step) const {
        load_matrices(to, at + part * T::ROWS * T::QUERY_BYTES + (((step * 2 + half) ^ order) << 4));
    }

    DEVICE void keep() {
        if constexpr (T::KEEPS_QUERIES) {
#pragma unroll
            for (int i = 0; i < T::PARTS * T::STEPS; i++) read(kept[i], i / T::STEPS, i % T::STEPS);
        }
    }

    DEVICE void get(u32 (&to)[4], int part, int step) const {
        if constexpr (T::KEEPS_QUERIES) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = kept[T::KEEPS_QUERIES ? part * T::STEPS + step : 0][i];
        } else {
            read(to, part, step);
        }
    }
};

// Scores of a warp's 16 rows and TOKEN_TILES x 8 tokens. Few tokens have several sums at a time, as a multiplication waits for the one
// before it.
template <class T>
DEVICE void score(float (&sums)[T::TOKEN_TILES][4], const Queries<T>& queries, u32 stage, u32 first_token) {
    using Order = Swizzle<T::ROW_BYTES>;
    // Where queries and a wide output leave few registers, one.
    constexpr int CHAINS = T::TOKEN_TILES == 1 ? 4 : T::TOKEN_TILES == 2 && !(T::KEEPS_QUERIES && T::ROW_TILES * T::COLUMN_TILES >= 16) ? 2 : 1;
    const u32 lane = threadIdx.x % LANES;
    float chains[CHAINS][T::TOKEN_TILES][4] = {};
    if constexpr (T::CACHE == E4M3) {
        // One chunk is the 16 columns of a step; four steps at a time, the last two twice if there are no more.
#pragma unroll
        for (int step = 0; step < T::STEPS; step += 4) {
            u32 a[T::PARTS][4][4];
#pragma unroll
            for (int part = 0; part < T::PARTS; part++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (step + i < T::STEPS) queries.get(a[part][i], part, step + i);
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
                const u32 row = first_token + j * 8 + lane % 8;
                u32 codes[4];
                load_matrices(codes, stage + Order::at(row, min(step + lane / 8, T::STEPS - 1)));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (step + i >= T::STEPS) break;
                    const u32 b0 = e4m3_to_f16(static_cast<u16>(codes[i])), b1 = e4m3_to_f16(static_cast<u16>(codes[i] >> 16));
#pragma unroll
                    for (int part = 0; part < T::PARTS; part++) multiply<T>(chains[i % CHAINS][j], a[part][i], b0, b1);
                }
            }
        }
    } else if constexpr (T::TOKEN_TILES == 1) {
        const u32 row = first_token + lane % 8;
#pragma unroll
        for (int step = 0; step < T::STEPS; step += 2) {
            u32 b[4];
            load_matrices(b, stage + Order::at(row, step * 2 + lane / 8));
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    u32 a[4];
                    queries.get(a, part, step + i);
                    multiply<T>(chains[(step + i) % CHAINS][0], a, b[2 * i], b[2 * i + 1]);
                }
            }
        }
    } else {
#pragma unroll
        for (int step = 0; step < T::STEPS; step++) {
            u32 a[T::PARTS][4];
#pragma unroll
            for (int part = 0; part < T::PARTS; part++) queries.get(a[part], part, step);
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j += 2) {
                const u32 row = first_token + j * 8 + lane % 8 + lane / 16 * 8;
                u32 b[4];
                load_matrices(b, stage + Order::at(row, step * 2 + lane / 8 % 2));
#pragma unroll
                for (int part = 0; part < T::PARTS; part++) {
                    multiply<T>(chains[step % CHAINS][j], a[part], b[0], b[1]);
                    multiply<T>(chains[step % CHAINS][j + 1 < T::TOKEN_TILES ? j + 1 : j], a[part], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < T::TOKEN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            sums[j][e] = chains[0][j][e];
#pragma unroll
            for (int c = 1; c < CHAINS; c++) sums[j][e] += chains[c][j][e];
        }
}

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
        using Order = Swizzle<T::ROW_BYTES>;
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        const u32 weight_at = weights + lane % 16 * (T::WEIGHT_PITCH * 2) + lane / 16 * 16;
#pragma unroll
        for (int step = 0; step < T::TOKENS / 16; step++) {
            u32 a[T::ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < T::ROW_TILES; r++) load_matrices(a[r], weight_at + (r * 16 * T::WEIGHT_PITCH + step * 16) * 2);
            const u32 row = step * 16 + lane % 16;
            if constexpr (T::CACHE == E4M3) {
                // A chunk is 16 columns: a tile of the even ones and a tile of the odd ones.
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 4) {
                    u32 codes[4];
                    const u32 chunk = warp * (T::COLUMN_TILES / 2) + c / 2 + (T::COLUMN_TILES >= 4 ? lane / 16 : 0);
                    load_matrices_transposed(codes, stage + Order::at(row, chunk));
#pragma unroll
                    for (int i = 0; i < 2 && c + 2 * i < T::COLUMN_TILES; i++) {
                        const u32 low = __byte_perm(codes[2 * i], 0, 0x3120), high = __byte_perm(codes[2 * i + 1], 0, 0x3120);
                        const u32 even_0 = e4m3_to_f16(static_cast<u16>(low)), odd_0 = e4m3_to_f16(static_cast<u16>(low >> 16));
                        const u32 even_1 = e4m3_to_f16(static_cast<u16>(high)), odd_1 = e4m3_to_f16(static_cast<u16>(high >> 16));
#pragma unroll
                        for (int r = 0; r < T::ROW_TILES; r++) {
                            multiply<T>(sums[r][c + 2 * i], a[r], even_0, even_1);
                            multiply<T>(sums[r][c + 2 * i + 1], a[r], odd_0, odd_1);
                        }
                    }
                }
            } else {
#pragma unroll
                for (int c = 0; c < T::COLUMN_TILES; c += 2) {
                    u32 b[4];
                    load_matrices_transposed(b, stage + Order::at(row, warp * T::COLUMN_TILES + c + lane / 16));
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
                float* partial = args.partials + (static_cast<u64>(item.slot) + row) * (T::LATENT + 4);
                auto put = [&](u32 column, float first, float second) {
                    if (item.slot == DIRECT) {
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

template <class T>
DEVICE void decode(const Args& args) {
    extern __shared__ __align__(1024) u8 shared[];
    if (blockIdx.x >= args.header->num_items) return;
    const WorkItem item = args.items[blockIdx.x];
    const u32 stages = shared_address(shared + T::STAGES_AT), weights = shared_address(shared + T::WEIGHTS_AT);
    float* maxima = reinterpret_cast<float*>(shared + T::MAXIMA_AT);
    float* factors = reinterpret_cast<float*>(shared + T::FACTORS_AT);
    float* scales = reinterpret_cast<float*>(shared + T::SCALES_AT);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 row_warp = warp / T::TOKEN_WARPS, token_warp = warp % T::TOKEN_WARPS;

    const u32 tiles = (item.kv_end - item.kv_begin + T::TOKENS - 1) / T::TOKENS;
    Loader<T> loader(args, item);
#pragma unroll
    for (int i = 0; i < T::STAGES - 1; i++) {
        if (i < tiles) loader.load(stages + i * T::STAGE_BYTES);
        end_of_group();
    }
    const u32 staged = shared_address(shared + T::QUERIES_AT);
    stage_queries<T>(args, item, staged, scales);
    __syncthreads();
    Queries<T> queries(staged, row_warp * 16);
    queries.keep();

    // A lane has rows lane / 4 and 8 further, and of each two neighbouring tokens of every eight.
    float scale[2], top[2], sum[2];
    u32 seen[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = row_warp * 16 + h * 8 + lane / 4;
        const u32 index = item.first_row + min(row, item.num_rows - 1);
        seen[h] = min(args.queries[index / args.num_heads].visible, item.kv_end);
        scale[h] = scales[row];
        top[h] = EMPTY;
        sum[h] = 0.0f;
    }
    Output<T> output;

    for (u32 tile = 0, stage = 0; tile < tiles; tile++) {
        wait_for_all_but<T::STAGES - 2>();
        __syncthreads();
        {
            const u32 free = stage == 0 ? T::STAGES - 1 : stage - 1;
            if (tile + T::STAGES - 1 < tiles) loader.load(stages + free * T::STAGE_BYTES);
            end_of_group();
        }
        const u32 rows = stages + stage * T::STAGE_BYTES;

        // 1. scores
        float logits[T::TOKEN_TILES][4];
        score<T>(logits, queries, rows, token_warp * (T::TOKEN_TILES * 8));

        // 2. softmax
        const u32 first = item.kv_begin + tile * T::TOKENS + token_warp * (T::TOKEN_TILES * 8) + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = EMPTY;
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& logit = logits[j][2 * h + e];
                    logit = first + j * 8 + e < seen[h] ? logit * scale[h] : EMPTY;
                    largest = fmaxf(largest, logit);
                }
            }
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
#pragma unroll
            for (int j = 0; j < T::TOKEN_TILES; j++) {
                float weight[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    weight[e] = first + j * 8 + e < seen[h] ? exp2_fast(logits[j][2 * h + e] - top[h]) : 0.0f;
                    sum[h] += weight[e];
                }
                const u32 word = T::CACHE == BF16 ? pack_bf16(weight[0], weight[1]) : pack_f16(weight[0], weight[1]);
                const u32 column = token_warp * (T::TOKEN_TILES * 8) + j * 8 + lane % 4 * 2;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(weights + (row * T::WEIGHT_PITCH + column) * 2), "r"(word) : "memory");
            }
            if (token_warp == 0 && lane % 4 == 0) factors[row] = factor;
        }
        __syncthreads();

        // 3. values
        bool moved = false;
#pragma unroll
        for (int r = 0; r < T::ROW_TILES * 2; r++) moved |= factors[r * 8 + lane / 4] != 1.0f;
        if (__any_sync(~0u, moved)) output.rescale(factors);
        output.add(weights, rows);
        stage = stage + 1 == T::STAGES ? 0 : stage + 1;
    }
    wait_for_all_but<0>();
    __syncthreads();

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
            const bool any = total > 0.0f;
            const float base_2 = any ? top[h] + log2_fast(total) : EMPTY;
            factors[row] = any ? 1.0f / total : 1.0f;
            if (row < item.num_rows) {
                if (item.slot == DIRECT) {
                    const u32 index = item.first_row + row;
                    store_lse(args, bound_token(args, args.queries[index / args.num_heads].token), index % args.num_heads, base_2, any);
                } else {
                    args.partials[(static_cast<u64>(item.slot) + row) * (T::LATENT + 4) + T::LATENT] = base_2;
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
    extern "C" __device__ const u32 name##_threads = Tile<__VA_ARGS__>::THREADS; \
    extern "C" __device__ const u32 name##_shared_bytes = Tile<__VA_ARGS__>::SHARED_BYTES;
