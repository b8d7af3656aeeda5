// Merges the partial results of each query row's splits: the second kernel of the split-KV decode.
//
//   out = sum_i 2^(lse_i - max) out_i / sum_i 2^(lse_i - max); lse = max + log2(sum_i 2^(lse_i - max))
//
// Partial result i belongs to group i % GROUPS. A group adds its partial results in order, then the groups are added in order. Two tiles with the
// same bits: for few rows (`few`) a block takes 32 columns of a row and 8 lanes a group; for many rows (`many`) a warp takes 128 columns of a
// row, group by group. An empty partial result weighs exactly 0, and where one alone is not empty it weighs exactly 1, so empty splits change
// no bit. A split whose keys all have the logit -inf weighs 0 too, but its NaN reaches the output; a row of such splits alone is NaN.
#include "decode/mla.cuh"

// limits: mla_merge_few_* registers=168 threads=64
// limits: mla_merge_many_* registers=64 threads=256

constexpr int GROUPS = 8;

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
    const float* first; // partial result 0 of the row's head
    const u32* partials;
    u32 count, column;

    DEVICE Partials(const Args& args, const Merge& merge, u32 head, u32 column)
        : first(args.partials + static_cast<u64>(head) * PITCH), partials(args.merge_partials + merge.begin), count(merge.end - merge.begin), column(column) {}

    DEVICE const float* at(u32 i) const { return first + static_cast<u64>(partials[i]) * PITCH; }
    DEVICE float lse(u32 i) const { return at(i)[LATENT]; }

    // Whether keys of logit -inf are among those of partial results from, from + step, ..
    DEVICE bool sees_keys(u32 from, u32 step) const {
        bool sees = false;
        for (u32 i = from; i < count; i += step) sees |= lse(i) != EMPTY;
        return sees;
    }
};

// AHEAD partial results, `step` apart, whose loads are issued together.
template <int LATENT, u32 AHEAD>
struct Batch {
    const float* at[AHEAD];
    float lse[AHEAD];
    float4 value[AHEAD];

    DEVICE void find(const Partials<LATENT>& partials, u32 from, u32 step) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) at[i] = from + i * step < partials.count ? partials.at(from + i * step) : nullptr;
    }

    DEVICE void ask(const Partials<LATENT>& partials) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            lse[i] = EMPTY;
            value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at[i] != nullptr) {
                lse[i] = at[i][LATENT];
                value[i] = *reinterpret_cast<const float4*>(at[i] + partials.column);
            }
        }
    }
};

struct Sum {
    float weight;
    float4 value;

    DEVICE void add(float lse, float4 part, float top) {
        if (lse == EMPTY) return;
        const float share = exp2_fast(lse - top);
        weight += share;
        value.x = fmaf(share, part.x, value.x);
        value.y = fmaf(share, part.y, value.y);
        value.z = fmaf(share, part.z, value.z);
        value.w = fmaf(share, part.w, value.w);
    }

    DEVICE void add(const Sum& other) {
        weight += other.weight;
        value = value + other.value;
    }

    DEVICE void write(const Args& args, u32 token, u32 head, u32 column, float top) const {
        const bool any = !(weight == 0.0f); // NaN too
        const float factor = any ? 1.0f / weight : 1.0f;
        store_out(args, token, head, column, value.x * factor, value.y * factor);
        store_out(args, token, head, column + 2, value.z * factor, value.w * factor);
        if (column == 0) store_lse(args, token, head, any ? top + log2_fast(weight) : EMPTY, any);
    }
};

DEVICE Sum nothing() {
    return Sum{0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
}

// A block takes 32 columns of a row.
template <int LATENT>
DEVICE void merge_few(const Args& args) {
    constexpr u32 COLUMNS = 32, PARTS = LATENT / COLUMNS, GROUP_LANES = COLUMNS / 4, THREADS = GROUPS * GROUP_LANES;
    constexpr u32 AHEAD = 18; // 18 * GROUPS: a row with a split on each multiprocessor is loaded at once
    __shared__ float4 values[GROUPS][GROUP_LANES];
    __shared__ float weights[GROUPS];
    __shared__ float maxima[THREADS / LANES];
    const u32 row = blockIdx.x / PARTS, head = row % args.num_heads;
    const u32 group = threadIdx.x / GROUP_LANES, lane = threadIdx.x % GROUP_LANES;
    const u32 column = blockIdx.x % PARTS * COLUMNS + lane * 4;
    let_next_kernel_begin();
    if (row / args.num_heads >= args.header->num_merges) return wait_for_kernel_before();
    const Merge merge = args.merges[row / args.num_heads];
    const Partials<LATENT> partials(args, merge, head, column);
    Batch<LATENT, AHEAD> batch;
    batch.find(partials, group, GROUPS);
    wait_for_kernel_before();

    batch.ask(partials);
    float top = EMPTY;
    for (u32 i = AHEAD * GROUPS + threadIdx.x; i < partials.count; i += THREADS) top = fmaxf(top, partials.lse(i));
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) top = fmaxf(top, batch.lse[i]);
    top = largest_of_warp(top);
    if (threadIdx.x % LANES == 0) maxima[threadIdx.x / LANES] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / LANES; w++) top = fmaxf(top, maxima[w]);
    // The same in all threads.
    if (top == EMPTY && any_of_block(partials.sees_keys(threadIdx.x, THREADS))) top = NOT_A_NUMBER;

    Sum sum = nothing();
    for (u32 first = group; first < partials.count; first += AHEAD * GROUPS) {
        if (first != group) {
            batch.find(partials, first, GROUPS);
            batch.ask(partials);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) sum.add(batch.lse[i], batch.value[i], top);
    }
    values[group][lane] = sum.value;
    if (lane == 0) weights[group] = sum.weight;
    __syncthreads();
    if (group != 0) return;
    Sum total = nothing();
#pragma unroll
    for (int g = 0; g < GROUPS; g++) total.add(Sum{weights[g], values[g][lane]});
    total.write(args, bound_token(args, merge.token), head, column, top);
}

// A warp takes 128 columns of a row.
template <int LATENT>
DEVICE void merge_many(const Args& args) {
    constexpr u32 COLUMNS = 128, PARTS = LATENT / COLUMNS, AHEAD = GROUPS;
    const u32 unit = blockIdx.x * GROUPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 row = unit / PARTS, head = row % args.num_heads;
    const u32 column = unit % PARTS * COLUMNS + lane * 4;
    let_next_kernel_begin();
    if (row / args.num_heads >= args.header->num_merges) return wait_for_kernel_before();
    const Merge merge = args.merges[row / args.num_heads];
    const Partials<LATENT> partials(args, merge, head, column);
    Batch<LATENT, AHEAD> batch;
    const bool is_short = partials.count <= GROUPS;
    if (is_short) batch.find(partials, 0, 1);
    wait_for_kernel_before();

    if (is_short) batch.ask(partials);
    float top = EMPTY;
    for (u32 i = lane; i < partials.count; i += LANES) top = fmaxf(top, partials.lse(i));
    top = largest_of_warp(top);
    if (top == EMPTY && __any_sync(~0u, partials.sees_keys(lane, LANES))) top = NOT_A_NUMBER;

    Sum total = nothing();
    if (is_short) {
        // Each partial result is a group of its own.
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            Sum group = nothing();
            group.add(batch.lse[i], batch.value[i], top);
            total.add(group);
        }
    } else {
        for (u32 g = 0; g < GROUPS; g++) {
            Sum group = nothing();
            for (u32 first = g; first < partials.count; first += AHEAD * GROUPS) {
                batch.find(partials, first, GROUPS);
                batch.ask(partials);
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) group.add(batch.lse[i], batch.value[i], top);
            }
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
