// Merges the partial results of one query row: out = sum 2^(lse_i - max) out_i / sum 2^(lse_i - max).
//
// A block takes 128 columns of a row. Warp w adds up partials w, w + WARPS, .. in order, then the warps are added up in order. An empty partial weighs
// exactly 0 and a single one that is not empty exactly 1, so how often a row was split around it changes no bit.
#include "mla.cuh"

constexpr int WARPS = 8, COLUMNS = 128;
constexpr u32 AHEAD = 4; // partials that a warp asks for at a time

DEVICE float largest_of_warp(float x) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

template <int LATENT>
DEVICE void merge(const Args& args) {
    __shared__ float4 values[WARPS][LANES];
    __shared__ float sums[WARPS];
    __shared__ float maxima[WARPS];
    constexpr u32 PARTS = LATENT / COLUMNS, PITCH = LATENT + 4;
    const u32 row = blockIdx.x / PARTS, head = row % args.num_heads;
    const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 column = blockIdx.x % PARTS * COLUMNS + lane * 4;
    if (row / args.num_heads >= args.header->num_merges) return;
    const Merge item = args.merges[row / args.num_heads];
    const u32* slots = args.merge_slots + item.begin;
    const u32 count = item.end - item.begin;
    auto partial = [&](u32 i) { return args.partials + (static_cast<u64>(slots[i]) + head) * PITCH; };

    float top = EMPTY;
    for (u32 i = threadIdx.x; i < count; i += WARPS * LANES) top = fmaxf(top, partial(i)[LATENT]);
    top = largest_of_warp(top);
    if (lane == 0) maxima[warp] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, maxima[w]);

    float sum = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (u32 first = warp; first < count; first += AHEAD * WARPS) {
        float lse[AHEAD];
        float4 part[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const float* from = partial(min(first + i * WARPS, count - 1));
            lse[i] = first + i * WARPS < count ? from[LATENT] : EMPTY;
            part[i] = *reinterpret_cast<const float4*>(from + column);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (lse[i] <= EMPTY) continue;
            const float weight = exp2_fast(lse[i] - top);
            sum += weight;
            value.x = fmaf(weight, part[i].x, value.x);
            value.y = fmaf(weight, part[i].y, value.y);
            value.z = fmaf(weight, part[i].z, value.z);
            value.w = fmaf(weight, part[i].w, value.w);
        }
    }
    values[warp][lane] = value;
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp != 0) return;
    sum = 0.0f;
    value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        sum += sums[w];
        value.x += values[w][lane].x;
        value.y += values[w][lane].y;
        value.z += values[w][lane].z;
        value.w += values[w][lane].w;
    }
    const bool any = sum > 0.0f;
    const float factor = any ? 1.0f / sum : 1.0f;
    const u32 token = bound_token(args, item.token);
    store_out(args, token, head, column, value.x * factor, value.y * factor);
    store_out(args, token, head, column + 2, value.z * factor, value.w * factor);
    if (column == 0) store_lse(args, token, head, any ? top + log2_fast(sum) : EMPTY, any);
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) mla_merge_512(const __grid_constant__ Args args) {
    merge<512>(args);
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) mla_merge_256(const __grid_constant__ Args args) {
    merge<256>(args);
}
