// Tensor copies (TMA), which cards since Hopper have: one thread asks for a box of a tensor.
#pragma once

#include "ptx.cuh"

// A tensor in global memory, as the host's driver describes it. A parameter of a kernel.
struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box of a map of [pages, groups, tokens, columns] that begins at a token of a page; its bytes arrive at a barrier.
DEVICE void copy_box(u32 to, const TensorMap& map, u32 token, u32 page, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], [%5];" ::"r"(to), "l"(&map), "r"(0),
                 "r"(token), "r"(page), "r"(barrier)
                 : "memory");
}

// The same where nobody reads it again soon: what else is in the L2 cache, such as partial results, stays there.
DEVICE void copy_box_once(u32 to, const TensorMap& map, u32 token, u32 page, u32 barrier) {
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(to), "l"(&map), "r"(0),
                 "r"(token), "r"(page), "r"(barrier), "l"(once)
                 : "memory");
}

// An arrival at a barrier, whose phase is not over before so many more bytes have arrived.
DEVICE void arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(barrier), "r"(bytes) : "memory");
}

// Orders what this thread did in shared memory before tensor copies that are asked for after a barrier.
DEVICE void before_tensor_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
