// Merges the partial results of each query row's splits: the second kernel of the split-KV decode.
//
//   out = sum_i 2^(top_i - top) out_i / sum; sum = sum_i 2^(top_i - top) sum_i; lse = top + log2(sum)
//
// out_i is a weighted sum of latents, top_i the logit that its weights are relative to, and sum_i that of the weights; top is the largest
// top_i.
//
// Partial result i belongs to group i % GROUPS. A group adds its partial results in order, then the groups are added in order, for each RUN
// of partial results: one sum over thousands would lose digits. Two tiles with the same bits: for few rows (`few`) a block takes 32 columns
// of a row and 8 lanes a group; for many rows (`many`) a warp takes 128 columns of a row, group by group. An empty partial result weighs
// exactly 0, and where one alone is not empty its share is exactly 1, so empty splits change no bit. A split whose keys all have the logit
// -inf weighs 0 too, but its NaN reaches the output; a row of such splits alone is NaN.
#include "decode/mla.cuh"

// limits: mla_merge_few_* registers=168 threads=64
// limits: mla_merge_many_* registers=64 threads=256

constexpr int GROUPS = 8;
constexpr u32 RUN = 72 * GROUPS; // partial results that groups sum from 0

DEVICE float largest_of_warp(float x) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

DEVICE float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The partial results of a row; a lane takes four columns of each.
template <int LATENT>
struct Partials {
    static constexpr u32 PITCH = LATENT + 4;
    const Args& args;
    u32 begin, count, head, column;

    DEVICE Partials(const Args& args, const Merge& merge, u32 head, u32 column) : args(args), begin(merge.begin), count(merge.end - merge.begin), head(head), column(column) {}

    DEVICE const float* at(u32 i) const { return args.partials + (static_cast<u64>(args.merge_partials[begin + i]) + head) * PITCH; }
    DEVICE float top(u32 i) const { return at(i)[LATENT]; }

    // Whether keys of logit -inf are among those of partial results from, from + step, ..
    DEVICE bool sees_keys(u32 from, u32 step) const {
        bool sees = false;
        for (u32 i = from; i < count; i += step) sees |= top(i) != EMPTY;
        return sees;
    }
};

// A sum of partial results.
struct Sum {
    float weight = 0.0f;
    float4 value = {0.0f, 0.0f, 0.0f, 0.0f};

    DEVICE void add(const Sum& other) {
        weight += other.weight;
        value = value + other.value;
    }

    // The weight of a group: that of its lanes together, in all of them.
    DEVICE void join_weights() {
#pragma unroll
        for (int lanes = 1; lanes < GROUPS; lanes *= 2) weight += __shfl_xor_sync(~0u, weight, lanes);
    }

    DEVICE void write(const Args& args, u32 token, u32 head, u32 column, float top) const {
        const bool any = HAS_WEIGHT(weight);
        const float factor = any ? factor_of_row(weight + sink_weight(args, head, top)) : 1.0f;
        store_out(args, token, head, column, value.x * factor, value.y * factor);
        store_out(args, token, head, column + 2, value.z * factor, value.w * factor);
        if (column == 0) store_lse(args, token, head, any ? lse_of_row(top, weight) : EMPTY, any);
    }
};

// AHEAD partial results, `step` apart, whose loads are issued together. TOGETHER consecutive lanes have the same ones: each lane finds the
// weights of some of them, and passes the shares to the others. It adds up its own weights, so that one value is passed, and not two.
template <int LATENT, u32 AHEAD>
struct Batch {
    static constexpr u32 TOGETHER = GROUPS;
    static constexpr u32 OWN = (AHEAD + TOGETHER - 1) / TOGETHER;
    const float *at[AHEAD], *own_at[OWN];
    float2 own[OWN]; // what its weights are relative to, and their sum; then as `weigh` leaves it
    float4 value[AHEAD];

    u32 shift; // lane (i + shift) % TOGETHER has partial result i

    // `before` are in the batches before this one: the n-th of a group is the lane's n % TOGETHER, in batches of any size.
    DEVICE void find(const Partials<LATENT>& partials, u32 from, u32 step, u32 before) {
        shift = before % TOGETHER;
        auto find_one = [&](u32 i) { return i < AHEAD && from + i * step < partials.count ? partials.at(from + i * step) : nullptr; };
#pragma unroll
        for (u32 i = 0; i < OWN; i++) own_at[i] = find_one(i * TOGETHER + (threadIdx.x - shift) % TOGETHER);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) at[i] = find_one(i);
    }

    DEVICE void ask(const Partials<LATENT>& partials) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            own[i] = make_float2(EMPTY, 0.0f);
            if (own_at[i] != nullptr) own[i] = *reinterpret_cast<const float2*>(own_at[i] + LATENT);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at[i] != nullptr) value[i] = *reinterpret_cast<const float4*>(at[i] + partials.column);
        }
    }

    // The largest of a lane's own; the largest over all lanes is the batch's.
    DEVICE float top() const {
        float top = EMPTY;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) top = fmaxf(top, own[i].x);
        return top;
    }

    // Makes of each weight the share of the latents, negative for a partial result that is empty, and of the sum.
    DEVICE void weigh(float top) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const float share = exp2_fast(own[i].x - top);
            own[i] = own[i].x == EMPTY ? make_float2(-1.0f, 0.0f) : make_float2(share, share * own[i].y);
        }
    }

    // Adds all: the latents to every lane's value, and the weights to the lane that has them. All lanes of the warp call it.
    DEVICE void add_to(Sum& sum) const {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) sum.weight += own[i].y;
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) add_value(sum, i);
    }

    // Adds partial result `i` alone. All lanes of the warp call it.
    DEVICE void add_to(Sum& sum, u32 i) const {
        sum.weight += __shfl_sync(~0u, own[i / TOGETHER].y, i % TOGETHER + shift, TOGETHER);
        add_value(sum, i);
    }

    DEVICE void add_value(Sum& sum, u32 i) const {
        const float share = __shfl_sync(~0u, own[i / TOGETHER].x, i % TOGETHER + shift, TOGETHER);
        if (share < 0.0f) return;
        sum.value.x = fmaf(share, value[i].x, sum.value.x);
        sum.value.y = fmaf(share, value[i].y, sum.value.y);
        sum.value.z = fmaf(share, value[i].z, sum.value.z);
        sum.value.w = fmaf(share, value[i].w, sum.value.w);
    }
};

// A block takes 32 columns of a row.
template <int LATENT>
DEVICE void merge_few(const Args& args) {
    constexpr u32 COLUMNS = 32, PARTS = LATENT / COLUMNS, GROUP_LANES = COLUMNS / 4, THREADS = GROUPS * GROUP_LANES;
    constexpr u32 AHEAD = 18; // 18 * GROUPS: a row with a split on each multiprocessor is loaded at once
    static_assert(RUN % (AHEAD * GROUPS) == 0 && GROUP_LANES == GROUPS, "whole batches");
    __shared__ float4 values[GROUPS][GROUP_LANES];
    __shared__ float weights[GROUPS];
    __shared__ float maxima[THREADS / LANES];
    const u32 row = blockIdx.x / PARTS, head = row % args.num_heads;
    const u32 group = threadIdx.x / GROUP_LANES, lane = threadIdx.x % GROUP_LANES;
    const u32 column = blockIdx.x % PARTS * COLUMNS + lane * 4;
    griddep_launch();
    if (row / args.num_heads >= args.header->num_merges) return griddep_wait();
    const Merge merge = args.merges[row / args.num_heads];
    const Partials<LATENT> partials(args, merge, head, column);
    Batch<LATENT, AHEAD> batch;
    batch.find(partials, group, GROUPS, 0);
    griddep_wait();

    batch.ask(partials);
    float top = batch.top();
    for (u32 i = AHEAD * GROUPS + threadIdx.x; i < partials.count; i += THREADS) top = fmaxf(top, partials.top(i));
    top = largest_of_warp(top);
    if (threadIdx.x % LANES == 0) maxima[threadIdx.x / LANES] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / LANES; w++) top = fmaxf(top, maxima[w]);
    // The same in all threads.
    if (top == EMPTY && any_of_block(partials.sees_keys(threadIdx.x, THREADS))) top = NOT_A_NUMBER;

    Sum total; // of the threads of the first group
    for (u32 first = 0; first < partials.count;) {
        if (first > 0) __syncthreads();
        Sum sum;
        // The loop runs equally often in all groups, since a warp's lanes exchange weights.
        for (const u32 end = min(first + RUN, partials.count); first < end; first += AHEAD * GROUPS) {
            if (first > 0) {
                batch.find(partials, first + group, GROUPS, first / GROUPS);
                batch.ask(partials);
            }
            batch.weigh(top);
            batch.add_to(sum);
        }
        sum.join_weights();
        values[group][lane] = sum.value;
        if (lane == 0) weights[group] = sum.weight;
        __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++) total.add(Sum{weights[g], values[g][lane]});
        }
    }
    if (group == 0) total.write(args, bound_token(args, merge.token), head, column, top);
}

// A warp takes 128 columns of a row.
template <int LATENT>
DEVICE void merge_many(const Args& args) {
    constexpr u32 COLUMNS = 128, PARTS = LATENT / COLUMNS, AHEAD = GROUPS;
    static_assert(RUN % (AHEAD * GROUPS) == 0, "whole batches");
    const u32 unit = blockIdx.x * GROUPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 row = unit / PARTS, head = row % args.num_heads;
    const u32 column = unit % PARTS * COLUMNS + lane * 4;
    griddep_launch();
    if (row / args.num_heads >= args.header->num_merges) return griddep_wait();
    const Merge merge = args.merges[row / args.num_heads];
    const Partials<LATENT> partials(args, merge, head, column);
    Batch<LATENT, AHEAD> batch;
    const bool is_short = partials.count <= GROUPS;
    if (is_short) batch.find(partials, 0, 1, 0);
    griddep_wait();

    if (is_short) batch.ask(partials);
    float top = EMPTY;
    for (u32 i = lane; i < partials.count; i += LANES) top = fmaxf(top, partials.top(i));
    top = largest_of_warp(top);
    if (top == EMPTY && __any_sync(~0u, partials.sees_keys(lane, LANES))) top = NOT_A_NUMBER;

    Sum total;
    if (is_short) {
        // Each partial result is a group of its own.
        batch.weigh(top);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            Sum group;
            batch.add_to(group, i);
            total.add(group);
        }
    } else {
        // A group of a run after the other.
        for (u32 g = 0; g / GROUPS * RUN < partials.count; g++) {
            const u32 begin = g / GROUPS * RUN, end = min(begin + RUN, partials.count);
            Sum group;
            for (u32 first = begin + g % GROUPS; first < end; first += AHEAD * GROUPS) {
                batch.find(partials, first, GROUPS, 0); // of whole TOGETHER
                batch.ask(partials);
                batch.weigh(top);
                batch.add_to(group);
            }
            group.join_weights();
            total.add(group);
        }
    }
    total.write(args, bound_token(args, merge.token), head, column, top);
}

#define MERGE(name, LATENT) \
    extern "C" __global__ void __launch_bounds__(GROUPS * 8) mla_merge_few_##name(const __grid_constant__ Args args) { merge_few<LATENT>(args); } \
    extern "C" __global__ void __launch_bounds__(GROUPS * LANES) mla_merge_many_##name(const __grid_constant__ Args args) { merge_many<LATENT>(args); }

MERGE(512, 512)
MERGE(256, 256)
