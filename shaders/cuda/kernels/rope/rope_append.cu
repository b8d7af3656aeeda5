// rope and kv_append fused, in one launch before a decode: rotates the queries, and rotates and appends the new tokens' keys.
//
//   for token of the table: q_pe_out[token] = rotate(q_pe[token])
//                           slot = slots[token]; skip the rest if NO_SLOT
//                           kv[slot / page_size][slot % page_size] = convert(kv_c[token] ++ rotate(k_pe[token]))
//
// The rotated key is rounded to its input dtype before it is converted: the bits are those of rope followed by kv_append. A query is
// rounded once, to its input dtype or to codes.
//
// Tile: a thread takes a unit (four rotated pairs) of a query head, a unit of the key, or an oct (8 consecutive elements) of the latent.
// Each kind of a token begins at a multiple of a warp, so that warps do not diverge.
//
// The grid covers max_tokens, so that a captured launch serves every table that fits: threads past its tokens leave early.

// limits: rope_append_f16_e4m3 registers=56 threads=128
// limits: rope_append_*_e4m3 registers=48 threads=128
// limits: rope_append_*_ds* registers=48 threads=128
// limits: rope_append_* registers=40 threads=128

#include "rope.cuh"
#include "cache/append_record.cuh"
#include "lib/codes.cuh"

#define THREADS 128u
#define WARPS (THREADS / 32)

struct Args {
    RopeArgs query;
    AppendArgs append;
    u32 query_dtype; // 0 f32, 1 f16, 2 bf16
    u32 query_items; // units of all heads, rounded up to whole warps
    u32 key_items; // units of the key, rounded up to whole warps
    u32 token_items; // threads of a token, of all three kinds
    Divisor by_token_items;
    u32 query_is_coded; // 1: q_pe_out is e4m3
    u32 reserved;
    CodeScale query_scale; // of these codes
    Guard query_guard; // of them; without a row where they are not counted
};

// 8 codes, exact for every input; the slow path.
template <class In>
__device__ __forceinline__ uint2 e4m3_exact(const u32 *words, float k_scale) {
    u32 bits[8];
    In::widen(words, bits);
    u64 codes = 0;
#pragma unroll 1
    for (u32 i = 0; i < 8; i++) {
        u32 x = bits[0];
        // Selects bits[i] without indexing, which would move the array out of registers.
#pragma unroll
        for (u32 j = 1; j < 8; j++) {
            x = i == j ? bits[j] : x;
        }
        codes |= (u64)e4m3_quotient(x, k_scale) << 8 * i;
    }
    return make_uint2((u32)codes, (u32)(codes >> 32));
}

// Converts 8 elements to the cache's dtype.
template <class In, class Out>
__device__ __forceinline__ void convert(const AppendArgs &args, const u32 *words, u32 *codes) {
    if constexpr (Same<Out, E4m3>::VALUE) {
        uint2 fast;
        if (!e4m3_oct<In>(words, args.scale, fast)) {
            fast = e4m3_exact<In>(words, args.scale.k_scale);
        }
        codes[0] = fast.x, codes[1] = fast.y;
    } else if constexpr (Same<In, Out>::VALUE) {
#pragma unroll
        for (u32 i = 0; i < 2 * Out::BYTES; i++) {
            codes[i] = words[i];
        }
    } else {
        u32 bits[8];
        In::widen(words, bits);
        Out::narrow(bits, codes);
    }
}

// Loads an oct of the latent.
template <class In>
__device__ __forceinline__ void load_latent(const AppendArgs &append, u32 token, u32 oct, u32 *words) {
    u64 from = append.kv_c + token * append.kv_c_stride + oct * (8 * In::BYTES);
    if (In::BYTES == 4 || append.is_wide) {
        load_oct<In, true>(from, words);
    } else {
        load_oct<In, false>(from, words);
    }
}

// A unit of the key, rotated and rounded to In.
template <class In>
__device__ __forceinline__ void rotated_key(const Args &args, u32 token, u32 position, u32 unit, u32 *words) {
    const AppendArgs &append = args.append;
    rotated<In>(args.query, append.k_pe + token * append.k_pe_stride, unit, angles_of(args.query, position, unit), words);
}

// Rows of elements of one dtype. `part` counts the threads of a token behind those of its queries.
template <class In, class Out>
struct PlainRow {
    static __device__ __forceinline__ void append(const Args &args, u32 token, u32 position, u32 part, u32 slot, Lost &lost) {
        const AppendArgs &append = args.append;
        u32 words[2 * In::BYTES], codes[2 * Out::BYTES];
        bool is_key = part < args.key_items;
        u32 oct = is_key ? append.latent_octs : part - args.key_items;
        if (is_key) {
            if (part >= args.query.units) {
                return;
            }
            rotated_key<In>(args, token, position, part, words);
        } else {
            load_latent<In>(append, token, oct, words);
        }
        if (append.guard.row) {
            note_oct<In>(lost, words, append.guard);
        }
        convert<In, Out>(append, words, codes);
        u64 to = target<Out>(append, slot, oct);
        if (is_key) {
            store_quad<Out>(to, first_quad(args.query, part), codes);
            store_quad<Out>(to, second_quad(args.query, part), codes + Out::BYTES);
        } else if constexpr (Out::BYTES == 1) {
            store_8(to, make_uint2(codes[0], codes[1]));
        } else {
            store_oct<Out>(to, codes);
        }
    }
};

// Records: a half of a warp has the octs of the latent that share a scale.
template <class In, class Record>
struct RecordRow {
    static __device__ __forceinline__ void append(const Args &args, u32 token, u32 position, u32 part, u32 slot, Lost &lost) {
        u32 words[2 * In::BYTES];
        u64 record = record_of<Record>(args.append, slot);
        if (part >= args.key_items) {
            u32 oct = part - args.key_items;
            load_latent<In>(args.append, token, oct, words);
            if (args.append.guard.row) {
                note_oct<In>(lost, words, latent_guard(args.append.guard));
            }
            store_latent<Record, In>(record, oct, words, scale_exponent(largest_of_group(largest_of<In>(words))));
        } else if (part < args.query.units) {
            u32 halves[4];
            rotated_key<In>(args, token, position, part, words);
            if (args.append.guard.row) {
                note_oct<In>(lost, words, args.append.guard);
            }
            rope_words<In>(words, halves);
            store_quad<Bf16>(record + Record::ROPE_AT, first_quad(args.query, part), halves);
            store_quad<Bf16>(record + Record::ROPE_AT, second_quad(args.query, part), halves + 2);
        }
    }
};

// Rotates a unit of the queries.
__device__ __forceinline__ void rotate_query(const Args &args, u32 token, u32 position, u32 unit, Lost &lost) {
    rotate_unit_into(args.query, args.query_dtype, token, position, unit, [&](u64 row, u32 first, u32 second, const u32 *bits) {
        if (args.query_is_coded) {
            if (args.query_guard.row) {
                note_oct<F32>(lost, bits, args.query_guard);
            }
            float x[8];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                x[i] = __uint_as_float(bits[i]);
            }
            u32 words[2];
            e4m3_codes(x, args.query_scale, words);
            store_4(row + first * 4, words[0]);
            store_4(row + second * 4, words[1]);
        } else {
            store_unit(args.query_dtype, row, first, second, bits);
        }
    });
}

template <class Row>
__device__ __forceinline__ void rope_append_part(const Args &args, u32 token, u32 part, Lost &lost) {
    const AppendArgs &append = args.append;
    if (token >= append.max_tokens) {
        return;
    }
    // Slot and position are loaded before num_tokens is known, to overlap their latency.
    u32 num_tokens = read_4(append.table);
    u32 slot = slot_of(append, token);
    u32 position = position_of(args.query, token);
    if (token >= num_tokens) {
        return;
    }
    if (part < args.query_items) {
        // Only the launch for the first slab of a pool rotates the queries: twice in place would be wrong.
        if (part < args.query.head_units && append.first_slot == 0) {
            rotate_query(args, token, position, part, lost);
        }
        return;
    }
    // NO_SLOT and slots of other slabs fail this test too. The host checked the slots; the bound also covers a table made for a larger
    // pool.
    if (slot >= append.num_slots) {
        return;
    }
    Row::append(args, token, position, part - args.query_items, slot, lost);
}

template <class Row>
__device__ __forceinline__ void rope_append(const Args &args) {
    __shared__ WarpLost warps[WARPS];
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 token = divide(item, args.by_token_items);
    u32 part = item - token * args.token_items;
    griddep_launch();
    griddep_wait();
    // The same in a warp.
    const u64 row = part < args.query_items ? args.query_guard.row : args.append.guard.row;
    const u32 seen = seen_by(row);
    Lost lost;
    rope_append_part<Row>(args, token, part, lost);
    // Queries are counted only where keys are.
    if (args.append.guard.row) {
        lost.add_of_block<WARPS>(row, seen, warps);
    }
}

#define ROPE_APPEND(NAME, IN, OUT) \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_append_##NAME(const Args args) { rope_append<PlainRow<IN, OUT>>(args); }

// Equal dtypes are copied bit for bit, signalling NaNs included.
ROPE_APPEND(f32_f32, F32, F32)
ROPE_APPEND(f32_f16, F32, F16)
ROPE_APPEND(f32_bf16, F32, Bf16)
ROPE_APPEND(f32_e4m3, F32, E4m3)
ROPE_APPEND(f16_f32, F16, F32)
ROPE_APPEND(f16_f16, F16, F16)
ROPE_APPEND(f16_bf16, F16, Bf16)
ROPE_APPEND(f16_e4m3, F16, E4m3)
ROPE_APPEND(bf16_f32, Bf16, F32)
ROPE_APPEND(bf16_f16, Bf16, F16)
ROPE_APPEND(bf16_bf16, Bf16, Bf16)
ROPE_APPEND(bf16_e4m3, Bf16, E4m3)

#define ROPE_APPEND_RECORDS(LAYOUT, RECORD, INPUT, IN) \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_append_##INPUT##_##LAYOUT(const Args args) { rope_append<RecordRow<IN, RECORD>>(args); }

RECORDS_WITH_ROPE(ROPE_APPEND_RECORDS, f32, F32)
RECORDS_WITH_ROPE(ROPE_APPEND_RECORDS, f16, F16)
RECORDS_WITH_ROPE(ROPE_APPEND_RECORDS, bf16, Bf16)
