// Compensated summation.
#pragma once

// Adds x to a sum, and what that rounds away to its `rest` (2Sum, Knuth): many terms cost no digits. By intrinsics, so that no addition is
// fused with a multiplication before it.
__device__ __forceinline__ void add_compensated(float &sum, float &rest, float x) {
    const float total = __fadd_rn(sum, x), added = __fsub_rn(total, sum);
    rest = __fadd_rn(rest, __fadd_rn(__fsub_rn(sum, __fsub_rn(total, added)), __fsub_rn(x, added)));
    sum = total;
}

// Sum and rest. An infinite sum has no rest: it would be NaN.
__device__ __forceinline__ float compensated(float sum, float rest) {
    return fabsf(sum) <= 0x1.fffffep127f ? __fadd_rn(sum, rest) : sum;
}

__device__ __forceinline__ void add_compensated(float4 &sum, float4 &rest, float4 x) {
    add_compensated(sum.x, rest.x, x.x);
    add_compensated(sum.y, rest.y, x.y);
    add_compensated(sum.z, rest.z, x.z);
    add_compensated(sum.w, rest.w, x.w);
}

__device__ __forceinline__ float4 compensated(float4 sum, float4 rest) {
    return make_float4(compensated(sum.x, rest.x), compensated(sum.y, rest.y), compensated(sum.z, rest.z), compensated(sum.w, rest.w));
}

// A sum with its rest.
struct Compensated {
    float sum = 0.0f, rest = 0.0f;

    __device__ __forceinline__ void add(float x) { add_compensated(sum, rest, x); }

    __device__ __forceinline__ void scale(float factor) {
        sum = __fmul_rn(sum, factor);
        rest = __fmul_rn(rest, factor);
    }

    __device__ __forceinline__ float value() const { return compensated(sum, rest); }
};
