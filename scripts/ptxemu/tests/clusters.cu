// A kernel of clusters of two blocks, for the interpreter's own tests.

using u32 = unsigned;
using u64 = unsigned long long;
using u16 = unsigned short;

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Args {
    float* out;
    int tiles;
};

constexpr int STAGES = 2, HALF = 1024, TILE = 2 * HALF, READERS = 2;

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 at_block(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// The blocks share the loads: each copies its half of every tile to both. Warp 0 loads, the others read: the sum of all tiles, each times
// its number, and the block's rank.
__device__ __forceinline__ void share(const Args& a, const TensorMap& map) {
    __shared__ __align__(1024) unsigned char stages[STAGES * TILE];
    __shared__ u64 full[STAGES], empty[STAGES];
    const u32 rank = rank_in_cluster(), stage = (u32)__cvta_generic_to_shared(stages), fulls = (u32)__cvta_generic_to_shared(full), empties = (u32)__cvta_generic_to_shared(empty);
    const u32 warp = threadIdx.x / 32, reader = threadIdx.x - 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(fulls + i * 8) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empties + i * 8), "n"(2 * READERS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_barrier();
    if (warp == 0) {
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int tile = 0; tile < a.tiles; tile++) {
                const u32 at = tile % STAGES, row = (blockIdx.x / 2 * a.tiles + tile) * 16 + rank * 8;
                wait(empties + at * 8, (tile / STAGES + 1) % 2);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(fulls + at * 8), "r"(TILE) : "memory");
                asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                                 stage + at * TILE + rank * HALF),
                             "l"(&map), "r"(0), "r"(row), "r"(fulls + at * 8), "h"((u16)3)
                             : "memory");
            }
        }
    } else {
        float sums[8] = {};
#pragma unroll 1
        for (int tile = 0; tile < a.tiles; tile++) {
            const u32 at = tile % STAGES;
            wait(fulls + at * 8, tile / STAGES % 2);
            for (int i = 0; i < 8; i++) {
                const u32 place = (reader * 8 + i) * 4;
                sums[i] += (tile + 1) * *(const volatile float*)(stages + at * TILE + (place ^ (place >> 7) % 8 << 4));
            }
            __syncwarp();
            if (threadIdx.x % 32 < 2)
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(at_block(empties + at * 8, threadIdx.x % 32)) : "memory");
        }
        for (int i = 0; i < 8; i++) a.out[(blockIdx.x * 64 + reader) * 8 + i] = sums[i] + rank;
    }
    __syncwarp();
    cluster_barrier();
}

extern "C" __global__ void __launch_bounds__(96) share_tiles(const Args a, const __grid_constant__ TensorMap map) { share(a, map); }

// The same with the size of its clusters.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(96) share_tiles_of_two(const Args a, const __grid_constant__ TensorMap map) { share(a, map); }
