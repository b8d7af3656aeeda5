// Gathers tokens of the paged cache into a contiguous workspace (vLLM's gather_and_maybe_dequant_cache), with conversion.
//
//   for (slot, out_row, tokens) of the table, each inside one page: for t < tokens:
//     out[out_row + t] = convert(kv[slot / page_size][slot % page_size + t])
//
// A quad is 4 consecutive elements; L + R and all offsets and strides are multiples of it. Each piece has page_size places, one for each
// token that it could have.
//
// Tile: one quad of PLACES_PER_THREAD places a thread; all loads are issued before the first conversion.
// The grid covers max_pieces, so that a captured launch serves every table that fits: threads past its pieces leave early.

// limits: kv_gather_* registers=64 threads=256

#include "lib/divisor.cuh"
#include "lib/global.cuh"
#include "lib/round.cuh"
#include "record.cuh"

#define THREADS 256u
#define PLACES_PER_THREAD 8u
#define NO_ROW 0xFFFFFFFFu

struct Args {
    u64 kv;    // [num_pages, page_size, L + R], the layer's first page, pages strided
    u64 out;   // [max_rows, L + R], strided
    u64 table; // u32 [1 + 3 * max_pieces] num_pieces, then (slot, out_row, tokens) of each
    u64 block_stride; // bytes, as the other stride
    u64 out_stride;
    u32 max_rows;   // rows that the output holds
    u32 max_pieces; // pieces that the table holds
    u32 num_slots; // of the slab that is read
    u32 first_slot; // of that slab; 0 where it is the whole pool
    u32 reserved_0;
    u32 page_size;
    u32 row_quads;
    float k_scale;
    Divisor by_row_quads;
    Divisor by_page_size;
};

// For each dtype: a quad, which is BYTES words, is loaded, widened to f32 bits, narrowed from them and stored. `round` narrows numbers that
// are no NaN.
struct F32 {
    static const u32 BYTES = 4;
    static __device__ __forceinline__ void load(u64 at, u32 *words) {
        uint4 x = read_16(at);
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    }
    static __device__ __forceinline__ void store(u64 at, const u32 *words) {
        store_16(at, make_uint4(words[0], words[1], words[2], words[3]));
    }
    static __device__ __forceinline__ void round(const float *x, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = __float_as_uint(x[i]);
        }
    }
    static __device__ __forceinline__ void widen(const u32 *words, float, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[i] = words[i];
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = f32_quiet(bits[i]);
        }
    }
};

struct Half {
    static const u32 BYTES = 2;
    static __device__ __forceinline__ void load(u64 at, u32 *words) {
        uint2 x = read_8(at);
        words[0] = x.x, words[1] = x.y;
    }
    static __device__ __forceinline__ void store(u64 at, const u32 *words) { store_8(at, make_uint2(words[0], words[1])); }
};

struct F16 : Half {
    static __device__ __forceinline__ void round(const float *x, u32 *words) { words[0] = f16_pair(x[0], x[1]), words[1] = f16_pair(x[2], x[3]); }
    static __device__ __forceinline__ void widen(const u32 *words, float, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[i] = f32_bits_of_f16(words[i / 2] >> 16 * (i % 2) & 0xFFFFu);
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
        words[0] = f16_bits(bits[0]) | f16_bits(bits[1]) << 16;
        words[1] = f16_bits(bits[2]) | f16_bits(bits[3]) << 16;
    }
};

// A signalling NaN stays one in f32; `narrow` of the output's dtype makes it quiet.
struct Bf16 : Half {
    static __device__ __forceinline__ void round(const float *x, u32 *words) { words[0] = bf16_pair(x[0], x[1]), words[1] = bf16_pair(x[2], x[3]); }
    static __device__ __forceinline__ void widen(const u32 *words, float, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bits[i] = words[i / 2] >> 16 * (i % 2) << 16;
        }
    }
    static __device__ __forceinline__ void narrow(const u32 *bits, u32 *words) {
        words[0] = bf16_bits(bits[0]) | bf16_bits(bits[1]) << 16;
        words[1] = bf16_bits(bits[2]) | bf16_bits(bits[3]) << 16;
    }
};

struct E4m3 {
    static const u32 BYTES = 1;
    static __device__ __forceinline__ void load(u64 at, u32 *words) { words[0] = read_4(at); }
    static __device__ __forceinline__ void store(u64 at, const u32 *words) { store_4(at, words[0]); }
    // Whether one of the 4 codes is a NaN.
    static __device__ __forceinline__ bool any_nan(u32 codes) { return ((codes & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) != 0; }
    // 4 codes times k_scale, rounded once: read as f16, a code is 2^-8 of its value, and the product with 2^8 is exact. For codes without
    // NaN.
    static __device__ __forceinline__ void scaled(u32 codes, float k_scale, float *x) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            // Codes i and i + 2, in the upper bytes of the halves.
            u32 tops = i == 0 ? codes << 8 : codes;
            u32 halves = (tops & 0x80008000u) | (tops >> 1 & 0x3F803F80u);
            x[i] = __fmul_rn(f32_of_f16(halves & 0xFFFFu) * 256.0f, k_scale);
            x[i + 2] = __fmul_rn(f32_of_f16(halves >> 16) * 256.0f, k_scale);
        }
    }
    // The same one by one, for NaN codes too.
    static __device__ __forceinline__ void widen(const u32 *words, float k_scale, u32 *bits) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 code = words[0] >> 8 * i;
            float value = f32_of_f16((code & 0x7Fu) << 7) * 256.0f;
            u32 magnitude = (code & 0x7Fu) == 0x7Fu ? 0x7FC00000u : __float_as_uint(__fmul_rn(value, k_scale));
            bits[i] = magnitude | (code & 0x80u) << 24;
        }
    }
};

template <class A, class B> struct Same { static const bool VALUE = false; };
template <class A> struct Same<A, A> { static const bool VALUE = true; };

template <class In, class Out>
__device__ __forceinline__ void convert(const u32 *words, float k_scale, u32 *codes) {
    u32 bits[4];
    In::widen(words, k_scale, bits);
    Out::narrow(bits, codes);
}

// The output row of a place, or NO_ROW, and where its token is: a row of a page. The host checked the slots; the bounds also cover a table
// made for a larger pool. Other slabs' tokens are left to their launch.
__device__ __forceinline__ void find(const Args &args, u32 place, u32 num_places, u32 &out_row, u32 &page, u32 &row) {
    u32 bounded = min(place, num_places - 1);
    u32 piece = divide(bounded, args.by_page_size);
    u32 t = bounded - piece * args.page_size;
    u64 at = args.table + 4ull + 12ull * piece;
    u32 in_slab = read_4(at) + t - args.first_slot;
    u32 slot = min(in_slab, args.num_slots - 1);
    bool is_used = place < num_places && t < read_4(at + 8) && in_slab == slot;
    out_row = is_used ? read_4(at + 4) + t : NO_ROW;
    page = divide(slot, args.by_page_size);
    row = slot - page * args.page_size;
}

// The address of a quad of a place's token, whose elements are of one dtype.
template <class In>
__device__ __forceinline__ u64 locate(const Args &args, u32 place, u32 num_places, u32 quad, u32 &out_row) {
    u32 page, row;
    find(args, place, num_places, out_row, page, row);
    return args.kv + page * args.block_stride + (u64)(row * args.row_quads + quad) * (4 * In::BYTES);
}

// The address of a place's record.
template <class Record>
__device__ __forceinline__ u64 locate_record(const Args &args, u32 place, u32 num_places, u32 &out_row) {
    u32 page, row;
    find(args, place, num_places, out_row, page, row);
    return args.kv + page * args.block_stride + (u64)(row * Record::BYTES);
}

template <class In, class Out>
__device__ __forceinline__ void gather(const Args &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 block = divide(item, args.by_row_quads);
    u32 quad = item - block * args.row_quads;
    u32 first = block * PLACES_PER_THREAD;
    if (first >= args.max_pieces * args.page_size) {
        return;
    }
    u32 num_places = min(read_4(args.table), args.max_pieces) * args.page_size;
    if (first >= num_places) {
        return;
    }
    u32 rows[PLACES_PER_THREAD];
    u32 unsure = 0; // of an e4m3 cache, a bit for each place that has a NaN
    u32 words[PLACES_PER_THREAD][In::BYTES];
#pragma unroll
    for (u32 i = 0; i < PLACES_PER_THREAD; i++) {
        In::load(locate<In>(args, first + i, num_places, quad, rows[i]), words[i]);
    }
#pragma unroll
    for (u32 i = 0; i < PLACES_PER_THREAD; i++) {
        if (rows[i] < args.max_rows) {
            u64 to = args.out + rows[i] * args.out_stride + (u64)quad * (4 * Out::BYTES);
            if constexpr (Same<In, Out>::VALUE) {
                Out::store(to, words[i]);
            } else {
                u32 codes[Out::BYTES];
                if constexpr (Same<In, E4m3>::VALUE) {
                    // The common case, with a fifth of the instructions.
                    float x[4];
                    E4m3::scaled(words[i][0], args.k_scale, x);
                    Out::round(x, codes);
                    unsure |= E4m3::any_nan(words[i][0]) ? 1u << i : 0u;
                } else {
                    convert<In, Out>(words[i], args.k_scale, codes);
                }
                Out::store(to, codes);
            }
        }
    }
    if constexpr (Same<In, E4m3>::VALUE && !Same<In, Out>::VALUE) {
        // NaNs are rare: one rolled loop that loads its operands again, to save registers.
#pragma unroll 1
        for (u32 place = first; unsure != 0; place++, unsure >>= 1) {
            if (unsure & 1u) {
                u32 row, word[1], codes[Out::BYTES];
                In::load(locate<In>(args, place, num_places, quad, row), word);
                convert<In, Out>(word, args.k_scale, codes);
                Out::store(args.out + row * args.out_stride + (u64)quad * (4 * Out::BYTES), codes);
            }
        }
    }
}

// Records: code * scale in f32, then rounded to Out; the rotary part from bf16.
template <class Record, class Out>
__device__ __forceinline__ void gather_records(const Args &args) {
    constexpr u32 LATENT_QUADS = Record::LATENT / 4, ROW_QUADS = LATENT_QUADS + Record::ROPE / 4;
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 block = item / ROW_QUADS;
    u32 quad = item - block * ROW_QUADS;
    u32 first = block * PLACES_PER_THREAD;
    if (first >= args.max_pieces * args.page_size) {
        return;
    }
    u32 num_places = min(read_4(args.table), args.max_pieces) * args.page_size;
    if (first >= num_places) {
        return;
    }
    bool is_latent = quad < LATENT_QUADS;
    u32 rows[PLACES_PER_THREAD], words[PLACES_PER_THREAD][2]; // a word of codes and a scale, or 4 bf16
#pragma unroll
    for (u32 i = 0; i < PLACES_PER_THREAD; i++) {
        u64 token = locate_record<Record>(args, first + i, num_places, rows[i]);
        if (is_latent) {
            words[i][0] = read_4(token + Record::LATENT_AT + 4 * quad);
            words[i][1] = read_4(token + Record::scale_at(quad / 2));
        } else {
            Half::load(token + Record::ROPE_AT + 8 * (quad - LATENT_QUADS), words[i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < PLACES_PER_THREAD; i++) {
        if (rows[i] < args.max_rows) {
            u32 codes[Out::BYTES];
            if (!is_latent) {
                convert<Bf16, Out>(words[i], 0.0f, codes);
            } else if (E4m3::any_nan(words[i][0])) {
                convert<E4m3, Out>(words[i], __uint_as_float(words[i][1]), codes);
            } else {
                float x[4];
                E4m3::scaled(words[i][0], __uint_as_float(words[i][1]), x);
                Out::round(x, codes);
            }
            Out::store(args.out + rows[i] * args.out_stride + (u64)quad * (4 * Out::BYTES), codes);
        }
    }
}

#define KV_GATHER(NAME, IN, OUT) \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_gather_##NAME(const Args args) { gather<IN, OUT>(args); }

// Equal dtypes are copied bit for bit, signalling NaNs included.
KV_GATHER(f32_f32, F32, F32)
KV_GATHER(f32_f16, F32, F16)
KV_GATHER(f32_bf16, F32, Bf16)
KV_GATHER(f16_f32, F16, F32)
KV_GATHER(f16_f16, F16, F16)
KV_GATHER(f16_bf16, F16, Bf16)
KV_GATHER(bf16_f32, Bf16, F32)
KV_GATHER(bf16_f16, Bf16, F16)
KV_GATHER(bf16_bf16, Bf16, Bf16)
KV_GATHER(e4m3_f32, E4m3, F32)
KV_GATHER(e4m3_f16, E4m3, F16)
KV_GATHER(e4m3_bf16, E4m3, Bf16)
KV_GATHER(e4m3_e4m3, E4m3, E4m3)

#define KV_GATHER_RECORDS(LAYOUT, RECORD, OUTPUT, OUT) \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_gather_##LAYOUT##_##OUTPUT(const Args args) { gather_records<RECORD, OUT>(args); }

RECORDS(KV_GATHER_RECORDS, f32, F32)
RECORDS(KV_GATHER_RECORDS, f16, F16)
RECORDS(KV_GATHER_RECORDS, bf16, Bf16)
