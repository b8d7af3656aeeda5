// One query row of an item in f32, by one warp, without tensor cores: all of the variant `simple`, and what the variants on tensor cores do
// with an item whose logits are not all finite.
//
//   for token of the item that the row sees: logit = scale * q . kv[token]; online softmax; out += weight * kv[token][:L]
//
// Masked tokens are not read, so that what they hold has no influence. IEEE arithmetic gives the rest of the pattern in docs/numbers.md: a
// logit of NaN or +inf makes the row's sum NaN; one of -inf weighs 0, and 0 times an infinite element is NaN in that column.
//
// An f32 cache is promised 1e-5, however many tokens there are: blocks of 32 tokens are summed from 0, and added up with compensation.
// The running maximum moves only when it grows by more than LAZY, since each move rounds the sums.
#pragma once

#include "layouts.cuh"
#include "lib/sum.cuh"
#include "query_pairs.cuh"
#include "tokens.cuh"

// False for NaN and infinities.
DEVICE bool is_finite(float x) {
    return fabsf(x) <= 0x1.fffffep127f;
}

static_assert(LANES == 32, "tokens of a block of an f32 cache");
constexpr int F32_THREADS = 256; // of a block with an f32 cache

// The sums of a lane of an f32 cache: of each of its columns, and of the weights.
__host__ __device__ constexpr int sums_of_lane(int latent) {
    return latent / LANES + 1;
}

// A lane's sums of weights times latents, and of the weights.
template <int PAIRS, bool IS_EXACT>
struct RowSums {
    float weight = 0.0f;
    float2 out[PAIRS] = {};

    DEVICE RowSums(Compensated* = nullptr) {}

    DEVICE void add(float by, const float2* latent) {
        weight += by;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) out[i] = make_float2(fmaf(by, latent[i].x, out[i].x), fmaf(by, latent[i].y, out[i].y));
    }

    DEVICE void scale(float factor) {
        weight *= factor;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) out[i] = make_float2(out[i].x * factor, out[i].y * factor);
    }

    DEVICE void end() {}
};

// Totals lie in shared memory, since registers are short: [sums_of_lane, F32_THREADS], of which `totals` is the thread's first.
template <int PAIRS>
struct RowSums<PAIRS, true> {
    static constexpr int SUMS = sums_of_lane(PAIRS * 64);
    RowSums<PAIRS, false> block;
    Compensated* totals;
    float weight;
    float2 out[PAIRS];

    DEVICE RowSums(Compensated* totals) : totals(totals) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) totals[i * F32_THREADS] = Compensated();
    }

    DEVICE void add(float by, const float2* latent) { block.add(by, latent); }

    DEVICE void scale(float factor) {
        block.scale(factor);
#pragma unroll 1
        for (int i = 0; i < SUMS; i++) totals[i * F32_THREADS].scale(factor);
    }

    DEVICE void end_block() {
        auto add = [&](int i, float x) { totals[i * F32_THREADS].add(x); };
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            add(2 * i, block.out[i].x);
            add(2 * i + 1, block.out[i].y);
        }
        add(2 * PAIRS, block.weight);
        block = RowSums<PAIRS, false>();
    }

    DEVICE void end() {
        auto total = [&](int i) { return totals[i * F32_THREADS].value(); };
#pragma unroll
        for (int i = 0; i < PAIRS; i++) out[i] = make_float2(total(2 * i), total(2 * i + 1));
        weight = total(2 * PAIRS);
    }
};

// A lane has two consecutive columns of every 64. `totals` is that of RowSums, of an f32 cache.
template <class Layout>
DEVICE void decode_row(const Args& args, const WorkItem& item, u32 row, Compensated* totals = nullptr) {
    constexpr Dtype CACHE = Layout::CACHE;
    constexpr int LATENT = Layout::LATENT, DIM = Layout::DIM, PAIRS = pairs_of_lane(DIM), VALUE_PAIRS = LATENT / 64;
    const u32 lane = threadIdx.x % LANES, index = item.first_row + row, head = index % args.num_heads;
    const QueryToken query = args.queries[index / args.num_heads];
    const u32 token = bound_token(args, query.token);
#if UNROLLED
    const u32 query_bytes = args.query_dtype == F32 ? 4 : args.query_dtype == E4M3 ? 1 : 2;
    const u8* nope = args.q_nope + (token * args.q_nope_token_stride + head * args.q_nope_head_stride) * query_bytes;
    const u8* pe = args.q_pe + (token * args.q_pe_token_stride + head * args.q_pe_head_stride) * query_bytes;
    float2 q[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const u32 column = i * 64 + lane * 2;
        q[i] = make_float2(0.0f, 0.0f);
        if (column >= DIM) break;
        const u8* part = column < LATENT ? nope : pe;
        const u32 at = column < LATENT ? column : column - LATENT;
        q[i] = make_float2(element(part, args.query_dtype, at), element(part, args.query_dtype, at + 1));
    }
#else
    float2 q[PAIRS];
    load_row<LATENT, DIM>(q, args, token * args.q_nope_token_stride + head * args.q_nope_head_stride, token * args.q_pe_token_stride + head * args.q_pe_head_stride);
#endif
    // Together again: the last columns are of some lanes only.
    if (DIM % 64 != 0) __syncwarp();

    const u32 end = min(query.visible, item.kv_end);
    float top = EMPTY;
    RowSums<VALUE_PAIRS, CACHE == F32> sums(totals);
    auto add_token = [&](u64 first) {
        const u8* key = args.kv + first * bytes_of(CACHE);
        float2 k[PAIRS];
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const u32 column = i * 64 + lane * 2;
            k[i] = make_float2(0.0f, 0.0f);
            if (column >= DIM) break;
            k[i] = Layout::pair(key, column);
            logit = fmaf(q[i].x, k[i].x, fmaf(q[i].y, k[i].y, logit));
        }
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) logit += __shfl_xor_sync(~0u, logit, lanes);
        logit *= args.logit_scale;
        if (logit > top + (CACHE == F32 ? LAZY : 0.0f)) {
            sums.scale(exp2_fast(top - logit));
            top = logit;
        }
        sums.add(exp2_fast(logit - top), k);
    };
    bool sees_keys = false;
    // Each lane finds the place of one of a block's tokens; entries of a list that are no slot are left out.
    for (u32 begin = item.kv_begin; begin < end; begin += LANES) {
        const u64 place = begin + lane < end ? row_of_token<Layout::ELEMENTS>(args, item, begin + lane) : NOWHERE;
        u32 there = __ballot_sync(~0u, place != NOWHERE);
        sees_keys |= there != 0;
        for (; there != 0; there &= there - 1) add_token(__shfl_sync(~0u, place, __ffs(there) - 1));
        if constexpr (CACHE == F32) sums.end_block();
    }
    sums.end();
    const float sum = sums.weight;

    // The sum is 0 where the row sees no key, or only keys of logit -inf: then the whole row is NaN, but a split of it only has no weight.
    const bool any = HAS_WEIGHT(sum);
    const bool is_direct = item.partial == DIRECT;
    const float factor = !is_direct ? 1.0f : any ? factor_of_row(sum + sink_weight(args, head, top)) : sees_keys ? NOT_A_NUMBER : 1.0f;
#if UNROLLED
    float* partial = args.partials + (static_cast<u64>(item.partial) + row) * (LATENT + 4);
#pragma unroll
    for (int i = 0; i < VALUE_PAIRS; i++) {
        const float2 out = sums.out[i];
        const u32 column = i * 64 + lane * 2;
        if (is_direct) {
            store_out(args, token, head, column, out.x * factor, out.y * factor);
        } else {
            *reinterpret_cast<float2*>(partial + column) = make_float2(out.x * factor, out.y * factor);
        }
    }
#else
    const Destination destination(args, item);
    u8* to = destination.row<LATENT>(args, item, row, token, head);
    rolled(sums.out, [&](int i, float2 out) {
        destination.store(to, i * 64 + lane * 2, out.x * factor, out.y * factor);
        return out;
    });
    float* partial = reinterpret_cast<float*>(to);
#endif
    if (lane == 0) {
        if (is_direct) {
            store_lse(args, token, head, any ? lse_of_row(top, sum) : NOT_A_NUMBER, sees_keys);
        } else {
            store_weight(partial, LATENT, top, sum);
            if (!any && sees_keys) partial[LATENT] = NO_WEIGHT;
        }
    }
}

// The item of a block on tensor cores again, by WARPS warps: where some logit, a masked one too, is NaN or infinite. On tensor cores a
// masked token weighs 0, and 0 times NaN would reach rows that do not see it. The item is read again, so that the main loop keeps no
// register for it.
template <class T>
DEVICE void decode_rows(const Args& args, u32 warp) {
    const WorkItem item = item_of_block(args);
#pragma unroll 1
    for (u32 row = warp; row < item.num_rows; row += T::WARPS) decode_row<typename T::Layout>(args, item, row);
}
