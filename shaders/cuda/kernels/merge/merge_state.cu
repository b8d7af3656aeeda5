// Merges two attention states (FlashInfer's merge_state).
//
//   lse = ln(exp(prefix_lse) + exp(suffix_lse)); output = exp(prefix_lse - lse) * prefix + exp(suffix_lse - lse) * suffix
//   a side whose LSE is -inf, +inf or NaN is empty: the result is the bits of the other side, or 0 and -inf
//   an output_scale other than 1 multiplies all outputs, also those of one side
//
// Two variants. `units`: an item is 16 bytes of a row; head_size and all offsets and strides of the outputs are multiples of that.
// `elements`: an item is an element; any head_size, offset and stride. A row is a (token, head), heads first; consecutive threads take
// consecutive items, so accesses coalesce.
//
// Tile: a thread of `units` takes ITEMS items, a block apart; all loads are issued before the first is used.

// limits: merge_state_units1_f32 registers=32 threads=256
// limits: merge_state_units1_f16 registers=40 threads=256
// limits: merge_state_units1_bf16 registers=40 threads=256
// limits: merge_state_units2_f32 registers=40 threads=256
// limits: merge_state_units2_f16 registers=40 threads=256
// limits: merge_state_units2_bf16 registers=40 threads=256
// limits: merge_state_elements_f32 registers=24 threads=256
// limits: merge_state_elements_f16 registers=24 threads=256
// limits: merge_state_elements_bf16 registers=24 threads=256

#include "lib/divisor.cuh"
#include "lib/global.cuh"
#include "lib/round.cuh"

// The most threads of a block: a launch may take fewer, so that few items spread over more multiprocessors.
#define THREADS 256

// Row (token, head) of an array is at token * token_stride + head * head_stride, in items for outputs and in elements for LSEs.
template <class Stride> struct Rows {
    u64 address;
    Stride token_stride;
    Stride head_stride;
};

template <class Stride> struct Args {
    u32 num_items;
    u32 row_items;
    u32 num_heads;
    float output_scale;
    Divisor by_row_items;
    Divisor by_num_heads;
    Rows<Stride> prefix_lse; // f32 [tokens, heads], as the other LSEs, strided
    Rows<Stride> suffix_lse;
    Rows<Stride> prefix_output; // [tokens, heads, row_items], as the other outputs, strided
    Rows<Stride> suffix_output;
    Rows<Stride> output;
    Rows<Stride> output_lse; // address 0: not written
};

template <class Stride>
__device__ __forceinline__ u64 row_of(Rows<Stride> rows, u32 token, u32 head) {
    return (u64)token * rows.token_stride + (u64)head * rows.head_stride;
}

struct Weights {
    bool has_prefix;
    bool has_suffix;
    bool is_copy; // of the bits of the only side, or of zeros
    float prefix; // with output_scale, as the next
    float suffix;
    float top; // the larger LSE
    float sum; // of both sides, in units of exp(top): 1 to 2
};

// Weights from the bits of both LSEs. `top` and `sum` are valid only where both sides have keys; where one has, its weight is `prefix`.
__device__ __forceinline__ Weights weigh(u32 prefix_bits, u32 suffix_bits, float output_scale) {
    Weights w;
    // -inf, +inf and NaN have all bits of the exponent set.
    w.has_prefix = (prefix_bits & F32_INF) != F32_INF;
    w.has_suffix = (suffix_bits & F32_INF) != F32_INF;
    float prefix = __uint_as_float(prefix_bits), suffix = __uint_as_float(suffix_bits);
    w.top = fmaxf(prefix, suffix);
    // A difference that overflows is -inf, and exp(-inf) = 0.
    float below, high;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(below) : "f"((fminf(prefix, suffix) - w.top) * 1.4426950408889634f));
    w.sum = 1.0f + below;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(high) : "f"(w.sum));
    high *= output_scale;
    float low = below * high;
    const bool both = w.has_prefix & w.has_suffix;
    w.prefix = !both ? output_scale : prefix >= suffix ? high : low;
    w.suffix = !both ? 0.0f : prefix >= suffix ? low : high;
    w.is_copy = !both & (output_scale == 1.0f);
    return w;
}

__device__ __forceinline__ u32 merged_lse(u32 prefix_bits, u32 suffix_bits, const Weights &w) {
    if (w.has_prefix & w.has_suffix) {
        float log2_sum;
        asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2_sum) : "f"(w.sum));
        return __float_as_uint(fmaf(log2_sum, 0.6931471805599453f, w.top));
    }
    return w.has_prefix ? prefix_bits : w.has_suffix ? suffix_bits : 0xFF800000u;
}

// For each dtype: the weighted sum of two words (`word`), and the load and store of an element.
struct F32 {
    static const u32 BYTES = 4;
    static __device__ __forceinline__ u32 word(u32 p, u32 s, const Weights &w) {
        return __float_as_uint(w.prefix * __uint_as_float(p) + w.suffix * __uint_as_float(s));
    }
    static __device__ __forceinline__ u32 load(u64 at) { return read_4(at); }
    static __device__ __forceinline__ void store(u64 at, u32 x) { store_4(at, x); }
};

struct F16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ u32 word(u32 p, u32 s, const Weights &w) {
        return f16_pair(w.prefix * f32_of_f16(p & 0xFFFFu) + w.suffix * f32_of_f16(s & 0xFFFFu),
                        w.prefix * f32_of_f16(p >> 16) + w.suffix * f32_of_f16(s >> 16));
    }
    static __device__ __forceinline__ u32 load(u64 at) { return read_2(at); }
    static __device__ __forceinline__ void store(u64 at, u32 x) { store_2(at, x); }
};

struct Bf16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ u32 word(u32 p, u32 s, const Weights &w) {
        const u32 high = 0xFFFF0000u;
        return bf16_pair(w.prefix * __uint_as_float(p << 16) + w.suffix * __uint_as_float(s << 16),
                         w.prefix * __uint_as_float(p & high) + w.suffix * __uint_as_float(s & high));
    }
    static __device__ __forceinline__ u32 load(u64 at) { return read_2(at); }
    static __device__ __forceinline__ void store(u64 at, u32 x) { store_2(at, x); }
};

// The merged word. Where one side has keys, it stands for the prefix, and zeros for the suffix.
template <class Dtype>
__device__ __forceinline__ u32 merged(u32 p, u32 s, const Weights &w) {
    const u32 first = w.has_prefix ? p : w.has_suffix ? s : 0u;
    return w.is_copy ? first : Dtype::word(first, w.has_prefix & w.has_suffix ? s : 0u, w);
}

template <class Dtype>
__device__ __forceinline__ uint4 merged(const uint4 &p, const uint4 &s, const Weights &w) {
    return make_uint4(merged<Dtype>(p.x, s.x, w), merged<Dtype>(p.y, s.y, w), merged<Dtype>(p.z, s.z, w), merged<Dtype>(p.w, s.w, w));
}

template <class Dtype, u32 ITEMS>
__device__ __forceinline__ void merge_units(const Args<u32> &args) {
    griddep_launch();
    griddep_wait();
    u32 first = blockIdx.x * (blockDim.x * ITEMS) + threadIdx.x;
    u32 token[ITEMS], head[ITEMS], unit[ITEMS], lse[ITEMS][2];
    uint4 prefix[ITEMS], suffix[ITEMS];
#pragma unroll
    for (u32 i = 0; i < ITEMS; i++) {
        // Items past the end read the last one and are not written.
        u32 item = min(first + i * blockDim.x, args.num_items - 1u);
        u32 row = divide(item, args.by_row_items);
        unit[i] = item - row * args.row_items;
        token[i] = divide(row, args.by_num_heads);
        head[i] = row - token[i] * args.num_heads;
        lse[i][0] = read_4(args.prefix_lse.address + 4ull * row_of(args.prefix_lse, token[i], head[i]));
        lse[i][1] = read_4(args.suffix_lse.address + 4ull * row_of(args.suffix_lse, token[i], head[i]));
        u64 at_prefix = row_of(args.prefix_output, token[i], head[i]) + unit[i];
        u64 at_suffix = row_of(args.suffix_output, token[i], head[i]) + unit[i];
        prefix[i] = read_16(args.prefix_output.address + 16ull * at_prefix);
        suffix[i] = read_16(args.suffix_output.address + 16ull * at_suffix);
    }
#pragma unroll
    for (u32 i = 0; i < ITEMS; i++) {
        if (first + i * blockDim.x < args.num_items) {
            Weights w = weigh(lse[i][0], lse[i][1], args.output_scale);
            u64 at = row_of(args.output, token[i], head[i]) + unit[i];
            store_16_once(args.output.address + 16ull * at, merged<Dtype>(prefix[i], suffix[i], w));
            if (unit[i] == 0 && args.output_lse.address != 0) {
                at = row_of(args.output_lse, token[i], head[i]);
                store_4(args.output_lse.address + 4ull * at, merged_lse(lse[i][0], lse[i][1], w));
            }
        }
    }
}

template <class Dtype>
__device__ __forceinline__ void merge_elements(const Args<u64> &args) {
    griddep_launch();
    griddep_wait();
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    u32 item = min(index, args.num_items - 1u);
    u32 row = divide(item, args.by_row_items);
    u32 d = item - row * args.row_items;
    u32 token = divide(row, args.by_num_heads);
    u32 head = row - token * args.num_heads;
    u32 prefix_bits = read_4(args.prefix_lse.address + 4ull * row_of(args.prefix_lse, token, head));
    u32 suffix_bits = read_4(args.suffix_lse.address + 4ull * row_of(args.suffix_lse, token, head));
    u64 at_prefix = row_of(args.prefix_output, token, head) + d;
    u64 at_suffix = row_of(args.suffix_output, token, head) + d;
    u32 p = Dtype::load(args.prefix_output.address + Dtype::BYTES * at_prefix);
    u32 s = Dtype::load(args.suffix_output.address + Dtype::BYTES * at_suffix);
    Weights w = weigh(prefix_bits, suffix_bits, args.output_scale);
    u32 x = merged<Dtype>(p, s, w);
    if (index < args.num_items) {
        u64 at = row_of(args.output, token, head) + d;
        Dtype::store(args.output.address + Dtype::BYTES * at, x);
        if (d == 0 && args.output_lse.address != 0) {
            at = row_of(args.output_lse, token, head);
            store_4(args.output_lse.address + 4ull * at, merged_lse(prefix_bits, suffix_bits, w));
        }
    }
}

#define UNITS(NAME, DTYPE, ITEMS) \
    extern "C" __global__ void __launch_bounds__(THREADS) merge_state_##NAME(const Args<u32> args) { \
        merge_units<DTYPE, ITEMS>(args); \
    }

#define ELEMENTS(NAME, DTYPE) \
    extern "C" __global__ void __launch_bounds__(THREADS) merge_state_##NAME(const Args<u64> args) { \
        merge_elements<DTYPE>(args); \
    }

UNITS(units1_f32, F32, 1)
UNITS(units1_f16, F16, 1)
UNITS(units1_bf16, Bf16, 1)
UNITS(units2_f32, F32, 2)
UNITS(units2_f16, F16, 2)
UNITS(units2_bf16, Bf16, 2)
ELEMENTS(elements_f32, F32)
ELEMENTS(elements_f16, F16)
ELEMENTS(elements_bf16, Bf16)
