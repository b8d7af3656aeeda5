// The tile of a block of mla_decode: its template parameters and shared-memory layout (Tile), the loads of the cache into pipeline stages
// (Loader), and their synchronisation (Pace). An item is a split: a tile of query rows by a range of tokens.
#pragma once

#include "decode_order.cuh"
#include "layouts.cuh"
#include "mla.cuh"
#include "tokens.cuh"
#include "lib/tma.cuh"

// The maximum that logits are relative to. 0 for a row without a visible token yet, so that masked logits weigh 0 there too.
DEVICE float base_of(float top) {
    return top == EMPTY ? 0.0f : top;
}

// The softmax weights of two consecutive tokens, packed for the tensor cores, and added to a lane's row sum.
template <class T>
DEVICE u32 weigh_two(float first, float second, float base, float& sum) {
    const float low = exp2_fast(first - base);
    sum += low;
    const float high = exp2_fast(second - base);
    sum += high;
    return T::CACHE == BF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

// Four FP8 codes to f16: exact, NaN stays NaN.
DEVICE void e4m3_to_f16(u32 codes, u32& low, u32& high) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(codes));
}

// Constants of an entry that scripts/ptx.sh reads from the PTX and writes into the manifest.
#define NUMBERS_OF(name, ...) \
    extern "C" __device__ const u32 name##_threads = __VA_ARGS__::THREADS; \
    extern "C" __device__ const u32 name##_tokens = __VA_ARGS__::TOKENS; \
    extern "C" __device__ const u32 name##_shared_bytes = __VA_ARGS__::SHARED_BYTES;

// How a tile is copied to shared memory, and how warps learn that it has arrived (full) and that a stage may be refilled (empty).
enum Copies {
    GROUPS, // cp.async of 16 bytes a thread; full and empty by cp.async.wait_group and __syncthreads
    ARRIVALS, // cp.async of 16 bytes a thread; full and empty by mbarriers
    TENSORS, // TMA boxes of 16 tokens; full by mbarriers, empty by the block's vote on the next tile's maxima
};

// The tile's parameters, the same for a whole kernel.
template <int LATENT_, int ROPE_, Dtype CACHE_, int ROWS_, int TOKENS_, int WARPS_, int STAGES_, int PARTS_, int SHARERS_, int KEPT_, Copies COPIES_ = GROUPS, class Layout_ = Plain<LATENT_, ROPE_, CACHE_>>
struct Tile {
    static constexpr int LATENT = LATENT_, DIM = LATENT_ + ROPE_, ROWS = ROWS_, TOKENS = TOKENS_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int PARTS = PARTS_; // a query is split into
    static constexpr Dtype CACHE = CACHE_;
    using Layout = Layout_;
    // Warps that split the columns of a dot product: each multiplies its share for the rows of all sharers, and the sums are exchanged.
    // Four sharers are the warps of two row tiles and of twice a warp's tokens, and keep at least a part of their queries in registers.
    static constexpr int SHARERS = SHARERS_;
    static constexpr int SCORE_ROWS = SHARERS == 1 ? 1 : 2; // row tiles that a warp multiplies
    static constexpr int KEPT = KEPT_; // steps whose query fragments stay in registers; the others are read from shared memory for each tile
    static constexpr Copies COPIES = COPIES_;
    static constexpr bool PACED = COPIES == ARRIVALS, BOXED = COPIES == TENSORS;
    static constexpr bool LISTS = !BOXED; // whether tokens may be listed by slots
    static constexpr int THREADS = WARPS * LANES;
    static constexpr int ROW_WARPS = ROWS / 16, TOKEN_WARPS = WARPS / ROW_WARPS;
    static constexpr int TOKEN_TILES = TOKENS / TOKEN_WARPS / 8; // of a warp's scores, 8 tokens each
    static constexpr int ROW_TILES = ROWS / 16, COLUMN_TILES = LATENT / WARPS / 8; // of a warp's output
    static constexpr int STEPS = DIM / 16, WARP_STEPS = STEPS / SHARERS; // of k = 16: of a dot product, of a warp's share of it
    static constexpr int SCORE_STEPS = SHARERS == 4 ? WARP_STEPS * TOKEN_TILES : WARP_STEPS; // between which cp.async are interleaved
    static constexpr int RUN = CACHE == E4M3 && SHARERS == 2 ? 2 : 1; // consecutive steps of a sharer
    static constexpr int ELEMENT_BYTES = bytes_of(CACHE), ROW_BYTES = Layout::ELEMENTS * ELEMENT_BYTES, QUERY_BYTES = DIM * 2;
    static constexpr int WEIGHT_BYTES = TOKEN_TILES * 16, WEIGHTS_BYTES = 16 * WEIGHT_BYTES; // of a row, of a warp's 16 rows
    static constexpr int UNROLL_BY_8 = 1; // of the loop that copies 8 bytes at a time: it is rarely taken
    using PlainOrder = typename Either<BOXED, BoxOrder<ROW_BYTES>, Swizzle<ROW_BYTES>>::Type;
    using Order = typename Either<Layout::IS_RECORD, RecordOrder<ROW_BYTES>, PlainOrder>::Type; // layout of a stage
    using QueryOrder = Swizzle<QUERY_BYTES>;
    static constexpr int STAGE_BYTES = TOKENS * ROW_BYTES, QUERIES_BYTES = PARTS * ROWS * QUERY_BYTES;
    // Queries kept in registers are staged in the last pipeline stage, STAGED_ROWS at a time; steps that do not fit registers go to
    // REST_AT, in the order of fragments.
    static constexpr int QUERY_BATCH = 2, QUERY_UNROLL = 1; // rows of a warp that are loaded together; that are stored without a loop
    static constexpr int STAGED_ROWS = KEPT == 0 || QUERIES_BYTES <= STAGE_BYTES ? ROWS : STAGE_BYTES / (PARTS * QUERY_BYTES) / 16 * 16;
    static constexpr int STAGES_AT = KEPT > 0 ? 0 : QUERIES_BYTES;
    static constexpr int QUERIES_AT = KEPT > 0 ? (STAGES - 1) * STAGE_BYTES : 0;
    // With four sharers, the sums from the three others are written over the warp's weights.
    static constexpr int PIECE_BYTES = TOKEN_TILES * LANES * 16, WEIGHTS_STRIDE = SHARERS == 4 ? 3 * PIECE_BYTES : WEIGHTS_BYTES;
    static constexpr int WEIGHTS_AT = STAGES_AT + STAGES * STAGE_BYTES;
    // Without a barrier of the block between two tiles (BOXED), weights are double-buffered.
    static constexpr int WEIGHTS_TURN = WARPS * WEIGHTS_STRIDE;
    static constexpr int MAXIMA_AT = WEIGHTS_AT + WEIGHTS_TURN * (BOXED ? 2 : 1); // [TOKEN_WARPS, ROWS]
    static constexpr int FACTORS_AT = MAXIMA_AT + TOKEN_WARPS * ROWS * 4; // [ROWS]
    static constexpr int SCALES_AT = FACTORS_AT + ROWS * 4; // [ROWS]
    static constexpr int SEEN_AT = SCALES_AT + ROWS * 4; // [ROWS]
    static constexpr int BARRIERS_AT = SEEN_AT + ROWS * 4; // [STAGES + 1] mbarriers
    static constexpr int REST_AT = BARRIERS_AT + (COPIES == GROUPS ? 0 : (STAGES + 2) / 2 * 16); // [REST_WARPS, PARTS, SCORE_ROWS, WARP_STEPS - KEPT, LANES, 4 words]
    static constexpr int REST_WARPS = SHARERS == 4 ? WARPS : ROW_WARPS;
    static constexpr int ENTRIES_AT = REST_AT + (KEPT > 0 ? REST_WARPS * PARTS * SCORE_ROWS * (WARP_STEPS - KEPT) * LANES * 16 : 0); // [STAGES, TOKENS] entries of lists
    static constexpr int SHARED_BYTES = ENTRIES_AT + (LISTS ? STAGES * TOKENS * 4 : 0);
    static_assert(TOKEN_TILES >= 1 && COLUMN_TILES % 2 == 0 && TOKENS % 16 == 0 && DIM % 32 == 0, "shape");
    static_assert(STAGED_ROWS > 0 && ROWS % STAGED_ROWS == 0, "queries pass through a stage");
    static_assert(SHARERS != 2 || (TOKEN_TILES % 2 == 0 && STEPS % (SHARERS * RUN) == 0), "two sharers");
    static_assert(SHARERS != 4 || (TOKEN_WARPS % 2 == 0 && ROW_WARPS % 2 == 0 && PARTS == 1 && KEPT > 0 && STEPS % 4 == 0), "four sharers");
    static_assert(STAGES >= 2, "one tile is used, the others are on their way");
};

// Offset of a warp's weights. Two sharers are adjacent and swapped, so that the sums one gives are stored where the other's weights will
// be.
template <class T>
DEVICE u32 weights_of(u32 row_warp, u32 token_warp) {
    if (T::SHARERS != 2) return (row_warp * T::TOKEN_WARPS + token_warp) * T::WEIGHTS_STRIDE;
    return ((row_warp / T::SHARERS * T::TOKEN_WARPS + token_warp) * T::SHARERS + (T::SHARERS - 1 - row_warp % T::SHARERS)) * T::WEIGHTS_BYTES;
}

// Shared address of the entries of a stage's tokens.
template <class T>
DEVICE u32 entries_at(u32 stage) {
    extern __shared__ __align__(1024) u8 shared[];
    return shared_address(shared + T::ENTRIES_AT) + stage * (T::TOKENS * 4);
}

// Loads tiles by cp.async, in passes of PASS_ROWS tokens, ROW_LANES threads a token. Its state is that of the next tile to load.
template <class T>
struct Loader {
    using Order = typename T::Order;
    static constexpr int ROW_LANES = Order::GROUP, PASS_ROWS = T::THREADS / ROW_LANES;
    static constexpr int PASSES = (T::TOKENS + PASS_ROWS - 1) / PASS_ROWS;
    static constexpr int ROW_CHUNKS = T::ROW_BYTES / 16; // chunks of 16 bytes in a token
    static constexpr int CHUNKS = (ROW_CHUNKS + ROW_LANES - 1) / ROW_LANES; // those of a thread, of which the last may not be there
    // All passes share a swizzle: their tokens are a multiple of 8 apart.
    static_assert(PASSES == 1 || PASS_ROWS % 8 == 0, "order");

    const Args& args;
    int left; // tokens of the item from the first pass's on
    u32 page[PASSES], offset[PASSES], id[PASSES];
    u32 to; // shared address of this thread's first chunk
    const u8* from; // global address of the pass's token
    bool is_there;

    DEVICE Loader(const Args& args, const WorkItem& item) : args(args) {
        const u32 token = item.kv_begin + threadIdx.x / ROW_LANES;
        left = item.kv_end - token;
#pragma unroll
        for (int i = 0; i < PASSES; i++) find_token(args, item, token + i * PASS_ROWS, page[i], offset[i]);
        look_up();
    }

    // Page ids are loaded a tile ahead, to hide their latency.
    DEVICE void look_up() {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            id[i] = 0;
            if (left > i * PASS_ROWS) id[i] = args.pages[page[i]];
        }
    }

    // A tile is COPIES copies of a thread, so that they can be interleaved with multiplications.
    static constexpr int COPIES = PASSES * CHUNKS;

    DEVICE void begin(u32 stage) { to = stage + Order::at(threadIdx.x / ROW_LANES, threadIdx.x % ROW_LANES); }

    // Where tokens are listed, ids are entries of a list: makes page ids and offsets of those of the tile, and NO_SLOT of others.
    static constexpr u32 NO_SLOT = ~0u;
    DEVICE void find_slots() {
        if constexpr (T::LISTS) {
            if (!args.is_listed) return;
#pragma unroll
            for (int i = 0; i < PASSES; i++) id[i] = is_slot(args, id[i]) ? page_of_slot(args, id[i], offset[i]) : NO_SLOT;
        }
    }

    // Copies the tile's entries, by which its tokens are masked.
    DEVICE void copy_entries(u32 stage) {
        if (threadIdx.x % ROW_LANES > 0) return;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const u32 row = threadIdx.x / ROW_LANES + i * PASS_ROWS;
            if (has_row(i)) copy_4(entries_at<T>(stage) + row * 4, args.pages + page[i], left > i * PASS_ROWS);
        }
    }

    // Issues copy `i`, or only if `wanted`; calls are in order.
    template <class... Wanted>
    DEVICE void copy(int i, Wanted... wanted) {
        const int pass = i / CHUNKS, chunk = i % CHUNKS;
        if (chunk == 0) begin_pass(pass);
        if (!has_row(pass) || !has_chunk(chunk)) return;
        copy_16(Order::rows(to, pass * PASS_ROWS) + Order::groups(chunk), from + chunk * ROW_LANES * 16, is_there, wanted...);
    }

    DEVICE void begin_pass(int pass) {
        is_there = left > pass * PASS_ROWS && (!T::LISTS || id[pass] != NO_SLOT);
        const u32 known = bound_page(args, id[pass]);
        const u64 element = known * args.kv_block_stride + static_cast<u64>(offset[pass]) * T::Layout::ELEMENTS;
        from = args.kv + element * T::ELEMENT_BYTES + threadIdx.x % ROW_LANES * 16;
    }

    // Whether this thread has a token of the tile in a pass.
    DEVICE static bool has_row(int pass) { return T::TOKENS % PASS_ROWS == 0 || threadIdx.x / ROW_LANES + pass * PASS_ROWS < T::TOKENS; }

    // Whether a token has a chunk of this thread.
    DEVICE static bool has_chunk(int chunk) { return ROW_CHUNKS % ROW_LANES == 0 || chunk * ROW_LANES + threadIdx.x % ROW_LANES < ROW_CHUNKS; }

    // Issues the copies that follow a step of the scores, in bursts: ptxas puts three idle loads between a load of shared memory and a
    // copy.
    static constexpr int BURST = 3;
    DEVICE void copies_of(int step, bool wanted) {
        constexpr int EVERY = T::SCORE_STEPS * BURST / COPIES; // steps
        static_assert(EVERY >= 1, "all are asked for");
        if (step % EVERY == 0) {
#pragma unroll
            for (int i = 0; i < BURST; i++)
                if (step / EVERY * BURST + i < COPIES) copy(step / EVERY * BURST + i, wanted);
        }
    }

    // Advances to the next tile, of one whose stage is given.
    DEVICE void end(u32 stage) {
        if constexpr (T::LISTS) {
            if (args.is_listed) {
                copy_entries(stage);
#pragma unroll
                for (int i = 0; i < PASSES; i++) offset[i] = 0;
            }
        }
        left -= T::TOKENS;
#pragma unroll
        for (int i = 0; i < PASSES; i++) advance_by_tile(args, page[i], offset[i]);
        look_up();
    }

    // Tokens of an FP8 cache may be aligned to 8 bytes only.
    DEVICE bool by_8() const { return T::CACHE == E4M3 && args.copies == CHUNKS_8; }

    DEVICE void load(u32 to, u32 stage) {
        begin(to);
        find_slots();
        if (by_8()) {
            copy_all_by_8();
        } else {
#pragma unroll
            for (int i = 0; i < COPIES; i++) copy(i);
        }
        end(stage);
    }

    DEVICE void copy_all_by_8() {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            begin_pass(pass);
            if (!has_row(pass)) return;
            u32 place = Order::rows(to, pass * PASS_ROWS);
#pragma unroll T::UNROLL_BY_8
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                if (!has_chunk(chunk)) break;
                copy_8(place, from, is_there);
                copy_8(place + 8, from + 8, is_there);
                place += Order::groups(1);
                from += ROW_LANES * 16;
            }
        }
    }
};

// Full and empty of the pipeline's stages: see Copies.
template <class T>
struct Pace {
    u32 copied, done; // mbarriers: full, one for each stage; empty, one for all
    u32 parity = 0, done_parity = 1; // phases of the next waits

    // The caller has a barrier of the block before the first copy.
    DEVICE Pace(u32 barriers) : copied(barriers), done(barriers + T::STAGES * 8) {
        if constexpr (T::COPIES != GROUPS) {
            if (threadIdx.x != 0) return;
#pragma unroll
            for (int i = 0; i < T::STAGES; i++) mbarrier_init(copied + i * 8, T::BOXED ? T::TOKENS / 16 : T::THREADS);
            if constexpr (T::PACED) mbarrier_init(done, T::WARPS);
            if constexpr (T::BOXED) fence_proxy_async();
        }
    }

    // All copies of a tile are issued, or it has none.
    DEVICE void asked(u32 stage, bool any) {
        if constexpr (T::PACED) {
            if (any) cp_async_mbarrier_arrive(copied + stage * 8);
        } else if constexpr (T::COPIES == GROUPS) {
            cp_async_commit();
        }
    }

    DEVICE void wait(u32 stage) {
        if constexpr (T::PACED) {
            mbarrier_wait(copied + stage * 8, parity);
            mbarrier_wait(done, done_parity);
            done_parity ^= 1;
        } else if constexpr (T::BOXED) {
            mbarrier_wait(copied + stage * 8, parity);
        } else {
            cp_async_wait<T::STAGES - 2>();
            __syncthreads();
        }
        if (T::COPIES != GROUPS && stage == T::STAGES - 1) parity ^= 1;
    }

    DEVICE void done_with_tile() {
        if constexpr (T::PACED) {
            __syncwarp();
            if (threadIdx.x % LANES == 0) arrive(done);
        }
    }
};
