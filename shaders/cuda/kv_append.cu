// Scatters new rows into the paged cache.
//
//   for token of the table: slot = slots[token]; skip if there is none
//     kv[slot / page_size][slot % page_size] = convert(kv_c[token] ++ k_pe[token])
//
// An oct is 8 elements of one row. L and R are multiples of 8, and the cache's offset and strides too; the inputs' are
// multiples of 4. An item is the same oct of TOKENS_PER_THREAD tokens: all are loaded before the first is converted.
//
// A grid is for max_tokens, so that a captured one serves every table that fits: threads past its tokens leave early.

// limits: kv_append_f32_f32 registers=48 threads=256
// limits: kv_append_f32_f16 registers=48 threads=256
// limits: kv_append_f32_bf16 registers=48 threads=256
// limits: kv_append_f32_e4m3 registers=64 threads=256
// limits: kv_append_f16_f32 registers=40 threads=256
// limits: kv_append_f16_f16 registers=40 threads=256
// limits: kv_append_f16_bf16 registers=40 threads=256
// limits: kv_append_f16_e4m3 registers=48 threads=256
// limits: kv_append_bf16_f32 registers=40 threads=256
// limits: kv_append_bf16_f16 registers=40 threads=256
// limits: kv_append_bf16_bf16 registers=40 threads=256
// limits: kv_append_bf16_e4m3 registers=48 threads=256

#include "divisor.cuh"
#include "global.cuh"
#include "round.cuh"

#define THREADS 256u
#define TOKENS_PER_THREAD 4u

struct Args {
    u64 kv_c;  // address of token 0's row
    u64 k_pe;  // address of token 0's row
    u64 kv;    // address of the layer's first page
    u64 table; // u32: the number of tokens, then the slot of each
    u64 kv_c_stride; // bytes, as the others
    u64 k_pe_stride;
    u64 block_stride;
    u32 max_tokens; // for which table and inputs have room
    u32 num_slots;
    u32 page_size;
    u32 latent_octs;
    u32 row_octs;
    u32 is_wide; // rows of inputs begin at multiples of 16 bytes
    Divisor by_row_octs;
    Divisor by_page_size;
    E4m3Scale scale;
};

// How octs of a dtype are converted from and to f32 bits. `magnitudes` and `signs` are for e4m3: |x| of 8 elements, whatever NaN for
// a NaN, and the signs of 4 where a word of codes has them.
struct F32 {
    static const u32 BYTES = 4;
    static __device__ __forceinline__ u32 element(u64 at) { return read_4(at); }
    static __device__ __forceinline__ void widen(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            bits[i] = words[i];
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            words[i] = f32_quiet(bits[i]);
        }
    }
    static __device__ __forceinline__ void magnitudes(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            bits[i] = words[i] & 0x7FFFFFFFu;
        }
    }
    static __device__ __forceinline__ u32 signs(const u32 *words, u32 half) {
        const u32 *x = words + 4 * half;
        u32 bytes = __byte_perm(__byte_perm(x[0], x[1], 0x0073), __byte_perm(x[2], x[3], 0x0073), 0x5410);
        return bytes & 0x80808080u;
    }
};

struct F16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ u32 element(u64 at) { return f32_bits_of_f16(read_2(at)); }
    static __device__ __forceinline__ void widen(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = f32_bits_of_f16(words[i] & 0xFFFFu);
            bits[2 * i + 1] = f32_bits_of_f16(words[i] >> 16);
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = f16_bits(bits[2 * i]) | f16_bits(bits[2 * i + 1]) << 16;
        }
    }
    static __device__ __forceinline__ void magnitudes(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = __float_as_uint(f32_of_f16(words[i] & 0x7FFFu));
            bits[2 * i + 1] = __float_as_uint(f32_of_f16(words[i] >> 16 & 0x7FFFu));
        }
    }
    static __device__ __forceinline__ u32 signs(const u32 *words, u32 half) {
        return __byte_perm(words[2 * half], words[2 * half + 1], 0x7531) & 0x80808080u;
    }
};

// A signalling NaN stays one in f32: `narrow` of the cache's dtype makes it quiet.
struct Bf16 {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ u32 element(u64 at) { return read_2(at) << 16; }
    static __device__ __forceinline__ void widen(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = words[i] << 16;
            bits[2 * i + 1] = words[i] & 0xFFFF0000u;
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = bf16_bits(bits[2 * i]) | bf16_bits(bits[2 * i + 1]) << 16;
        }
    }
    static __device__ __forceinline__ void magnitudes(const u32 *words, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[2 * i] = words[i] << 16 & 0x7FFF0000u;
            bits[2 * i + 1] = words[i] & 0x7FFF0000u;
        }
    }
    static __device__ __forceinline__ u32 signs(const u32 *words, u32 half) { return F16::signs(words, half); }
};

struct E4m3 {
    static const u32 BYTES = 1;
};

template <class A, class B> struct Same { static const bool VALUE = false; };
template <class A> struct Same<A, A> { static const bool VALUE = true; };

template <class In, bool IS_WIDE>
__device__ __forceinline__ void load_oct(u64 at, u32 *words) {
#pragma unroll
    for (u32 i = 0; i < 2 * In::BYTES; i += 4) {
        uint4 x;
        if (IS_WIDE) {
            x = read_16(at + 4 * i);
        } else {
            uint2 low = read_8(at + 4 * i), high = read_8(at + 4 * i + 8);
            x = make_uint4(low.x, low.y, high.x, high.y);
        }
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
    }
}

template <class Out>
__device__ __forceinline__ void store_oct(u64 at, const u32 *words) {
#pragma unroll
    for (u32 i = 0; i < 2 * Out::BYTES; i += 4) {
        store_16(at + 4 * i, make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
}

// 8 codes; false where some of them are not to be trusted
template <class In>
__device__ __forceinline__ bool e4m3_oct(const u32 *words, const E4m3Scale &scale, uint2 &codes) {
    u32 x[8], code[8], doubt = 0, largest = 0;
    In::magnitudes(words, x);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        code[i] = e4m3_fast(x[i], scale, doubt);
        largest = max(largest, x[i]);
    }
    // the lowest bytes
    codes.x = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
    codes.y = __byte_perm(__byte_perm(code[4], code[5], 0x0040), __byte_perm(code[6], code[7], 0x0040), 0x5410);
    codes.x |= In::signs(words, 0);
    codes.y |= In::signs(words, 1);
    return doubt == 0 && largest <= scale.max_bits;
}

// The same of any numbers, slowly: 8 elements at an address.
template <class In>
__device__ __forceinline__ uint2 e4m3_oct_exact(u64 at, float k_scale) {
    u64 codes = 0;
#pragma unroll 1
    for (u32 i = 0; i < 8; i++) {
        codes |= (u64)e4m3_quotient(In::element(at + i * In::BYTES), k_scale) << 8 * i;
    }
    return make_uint2((u32)codes, (u32)(codes >> 32));
}

__device__ __forceinline__ u32 slot_of(const Args &args, u32 token) { return read_4(args.table + 4ull + 4ull * token); }

// Where an oct of a slot's row is.
template <class Out>
__device__ __forceinline__ u64 target(const Args &args, u32 slot, u32 oct) {
    u32 page = divide(slot, args.by_page_size);
    u32 row = slot - page * args.page_size;
    return args.kv + page * args.block_stride + (u64)(row * args.row_octs + oct) * (8 * Out::BYTES);
}

template <class In, class Out>
__device__ __forceinline__ void append(const Args &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 block = divide(item, args.by_row_octs);
    u32 oct = item - block * args.row_octs;
    u32 first = block * TOKENS_PER_THREAD;
    if (first >= args.max_tokens) {
        return;
    }
    // The slots are asked for before it is known how many there are; past the room for them it is the last one again.
    u32 num_tokens = min(read_4(args.table), args.max_tokens);
    u32 slots[TOKENS_PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
        slots[i] = slot_of(args, min(first + i, args.max_tokens - 1));
    }
    if (first >= num_tokens) {
        return;
    }
    u32 last = min(num_tokens - first, TOKENS_PER_THREAD) - 1;
    bool is_latent = oct < args.latent_octs;
    u64 stride = is_latent ? args.kv_c_stride : args.k_pe_stride;
    u32 column = is_latent ? oct : oct - args.latent_octs;
    u64 from = (is_latent ? args.kv_c : args.k_pe) + first * stride + column * (8 * In::BYTES);

    // Past the last token it is read again, and not written.
    u32 words[TOKENS_PER_THREAD][2 * In::BYTES];
    if (In::BYTES == 4 || args.is_wide) {
#pragma unroll
        for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
            load_oct<In, true>(from + min(i, last) * stride, words[i]);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
            load_oct<In, false>(from + min(i, last) * stride, words[i]);
        }
    }
    u32 unsure = 0; // a bit a token
#pragma unroll
    for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
        // A skipped token has none. The host proved the others; the bound keeps a wild table harmless too.
        if (i <= last && slots[i] < args.num_slots) {
            u64 to = target<Out>(args, slots[i], oct);
            if constexpr (Same<Out, E4m3>::VALUE) {
                uint2 codes;
                unsure |= e4m3_oct<In>(words[i], args.scale, codes) ? 0u : 1u << i;
                store_8(to, codes);
            } else if constexpr (Same<In, Out>::VALUE) {
                store_oct<Out>(to, words[i]);
            } else {
                u32 bits[8], codes[2 * Out::BYTES];
                In::widen(words[i], bits);
                Out::narrow(bits, codes);
                store_oct<Out>(to, codes);
            }
        }
    }
    if constexpr (Same<Out, E4m3>::VALUE) {
        // Rare, so it is one loop, and what it needs is loaded again.
#pragma unroll 1
        for (u32 i = 0; unsure != 0; i++, unsure >>= 1) {
            if (unsure & 1u) {
                store_8(target<Out>(args, slot_of(args, first + i), oct), e4m3_oct_exact<In>(from + i * stride, args.scale.k_scale));
            }
        }
    }
}

#define KV_APPEND(NAME, IN, OUT) \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_append_##NAME(const Args args) { append<IN, OUT>(args); }

// Equal dtypes are copied bit for bit, signalling NaNs included.
KV_APPEND(f32_f32, F32, F32)
KV_APPEND(f32_f16, F32, F16)
KV_APPEND(f32_bf16, F32, Bf16)
KV_APPEND(f32_e4m3, F32, E4m3)
KV_APPEND(f16_f32, F16, F32)
KV_APPEND(f16_f16, F16, F16)
KV_APPEND(f16_bf16, F16, Bf16)
KV_APPEND(f16_e4m3, F16, E4m3)
KV_APPEND(bf16_f32, Bf16, F32)
KV_APPEND(bf16_f16, Bf16, F16)
KV_APPEND(bf16_bf16, Bf16, Bf16)
KV_APPEND(bf16_e4m3, Bf16, E4m3)
