// Shared memory handed from some warps of a block to others, by each way that the kernels have: what does racecheck report? A block has 4
// warps; `out` has 128 words. The first five kernels and elected_arrival are ordered, the last two are not.
// Result: docs/verification.md. Run: scripts/racecheck.sh.
typedef unsigned u32;
typedef unsigned long long u64;

static __device__ u32 address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
static __device__ void bar_sync(u32 barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }
static __device__ void bar_sync_of_all(u32 barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }
static __device__ void bar_arrive_of_all(u32 barrier) { asm volatile("bar.arrive %0, 128;" ::"r"(barrier) : "memory"); }
static __device__ void mbarrier_init(u64* barrier, u32 arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory"); }
static __device__ void mbarrier_arrive(u64* barrier) { asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(address(barrier)) : "memory"); }
static __device__ void mbarrier_wait(u64* barrier, u32 parity) {
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}" ::"r"(address(barrier)), "r"(parity) : "memory");
}

// Pairs of warps write and read each other's words; `Before` and `After` reading order them.
template <class Before, class After>
static __device__ void pairs(u32* out, Before before, After after) {
    __shared__ u32 words[128];
    const u32 t = threadIdx.x, barrier = 1 + t / 64;
    for (u32 i = 0; i < 4; i++) {
        words[t] = t + i;
        before(barrier);
        out[t] += words[t ^ 32];
        after(barrier);
    }
}
extern "C" __global__ void block_barrier(u32* out) { pairs(out, [](u32) { __syncthreads(); }, [](u32) { __syncthreads(); }); }
extern "C" __global__ void named_barrier(u32* out) { pairs(out, bar_sync, bar_sync); }
extern "C" __global__ void named_vote(u32* out) {
    pairs(out, [](u32 barrier) { asm volatile("{.reg .pred p; bar.red.or.pred p, %0, 64, 1;}" ::"r"(barrier) : "memory"); }, bar_sync);
}
extern "C" __global__ void no_barrier(u32* out) { pairs(out, [](u32) {}, bar_sync); }

// Two warps write, two read: who waits for a named barrier is not who arrives at it.
extern "C" __global__ void arrive_and_sync(u32* out) {
    __shared__ u32 words[64];
    const u32 t = threadIdx.x;
    if (t >= 64) bar_arrive_of_all(2);
    for (u32 i = 0; i < 4; i++) {
        if (t < 64) {
            bar_sync_of_all(2);
            words[t] = t + i;
            bar_arrive_of_all(1);
        } else {
            bar_sync_of_all(1);
            out[t] += words[t - 64];
            if (i < 3) bar_arrive_of_all(2);
        }
    }
}

// The same by mbarriers. `Arrive` arrives for a warp's 32 threads, `arrivals` times.
template <class Arrive>
static __device__ void by_mbarriers(u32* out, u32 arrivals, Arrive arrive) {
    __shared__ u32 words[64];
    __shared__ u64 full, empty;
    const u32 t = threadIdx.x;
    if (t == 0) mbarrier_init(&full, 2 * arrivals), mbarrier_init(&empty, 2 * arrivals);
    __syncthreads();
    for (u32 i = 0; i < 4; i++) {
        if (t < 64) {
            if (i > 0) mbarrier_wait(&empty, (i - 1) % 2);
            words[t] = t + i;
            arrive(&full);
        } else {
            mbarrier_wait(&full, i % 2);
            out[t] += words[t - 64];
            arrive(&empty);
        }
    }
}
extern "C" __global__ void every_thread_arrives(u32* out) { by_mbarriers(out, 32, mbarrier_arrive); }
// Pace::done_with_tile of shaders/cuda/kernels/decode/decode_tile.cuh does this: __syncwarp orders the warp's accesses before the arrival.
extern "C" __global__ void elected_arrival(u32* out) {
    by_mbarriers(out, 1, [](u64* barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    });
}
// Without it they are not ordered.
extern "C" __global__ void elected_arrival_without_syncwarp(u32* out) {
    by_mbarriers(out, 1, [](u64* barrier) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    });
}
