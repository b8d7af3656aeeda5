// TMA (cp.async.bulk.tensor), for compute capability 9.0 and later: one thread issues the copy of a box of a tensor to shared memory.
#pragma once

#include "ptx.cuh"

// CUtensorMap: a tensor in global memory, encoded by the driver. A kernel's parameter (__grid_constant__).
struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box that begins at a token of a page, of a map of [pages, groups, tokens, columns]; its bytes complete on an mbarrier.
DEVICE void copy_box(u32 to, const TensorMap& map, u32 token, u32 page, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], [%5];" ::"r"(to), "l"(&map), "r"(0),
                 "r"(token), "r"(page), "r"(barrier)
                 : "memory");
}

// The same of a map whose boxes have fewer lines: the box that begins at a line, a token and a head of [heads, lines, tokens, 64 elements].
DEVICE void copy_lines(u32 to, const TensorMap& map, u32 token, u32 line, u32 head, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(&map), "r"(0),
                 "r"(token), "r"(line), "r"(head), "r"(barrier)
                 : "memory");
}

// The same as `copy_box` with the L2 hint evict_first, for a cache that is read once: it does not displace partial results in L2.
DEVICE void copy_box_once(u32 to, const TensorMap& map, u32 token, u32 page, u32 barrier) {
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(to), "l"(&map), "r"(0),
                 "r"(token), "r"(page), "r"(barrier), "l"(once)
                 : "memory");
}

// cp.async.bulk of bytes from global to shared memory, all of them and both addresses multiples of 16; they complete on an mbarrier.
DEVICE void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The same with the L2 hint evict_first.
DEVICE void copy_bytes_once(u32 to, const void* from, u32 bytes, u32 barrier) {
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier),
                 "l"(once)
                 : "memory");
}

// mbarrier.expect_tx: the phase then also waits for `bytes` more bytes.
DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at an mbarrier, whose phase then also waits for `bytes` more bytes.
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(barrier), "r"(bytes) : "memory");
}

// Proxy fence: orders this thread's accesses to shared memory, and initialised mbarriers, before those of the async proxy (TMA, wgmma)
// that are issued after a barrier.
DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
