// Loads and stores of global memory by address, volatile, so that the compiler keeps the order in which they are written.
//
// read_*: ld.global.nc, for memory that no kernel writes meanwhile. store_*_once: st.global.cs, for results that are not read soon.
#pragma once

#include "order.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A pointer to an address of global memory, for loads and stores whose order the compiler may choose: constant offsets cost no instruction
// then.
template <class T>
__device__ __forceinline__ T *global_pointer(u64 at) {
    return static_cast<T *>(__cvta_global_to_generic(at));
}

__device__ __forceinline__ uint4 read_16(u64 at) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

__device__ __forceinline__ uint2 read_8(u64 at) {
    uint2 x;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(at));
    return x;
}

__device__ __forceinline__ u32 read_4(u64 at) {
    u32 x;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}

__device__ __forceinline__ u32 read_2(u64 at) {
    u16 x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(at));
    return x;
}

__device__ __forceinline__ uint4 load_16(u64 at) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ uint2 load_8(u64 at) {
    uint2 x;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ u32 load_4(u64 at) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ void store_16(u64 at, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ void store_16_once(u64 at, uint4 x) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ void store_8(u64 at, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void store_4(u64 at, u32 x) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

__device__ __forceinline__ void store_2(u64 at, u32 x) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"((u16)x) : "memory");
}
