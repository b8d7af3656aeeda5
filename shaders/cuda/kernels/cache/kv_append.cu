// Appends new tokens to the paged cache (vLLM's concat_and_cache_mla): a scatter by slot, with conversion to the cache's dtype.
//
//   for token of the table: slot = slots[token]; skip if NO_SLOT
//     kv[slot / page_size][slot % page_size] = convert(kv_c[token] ++ k_pe[token])
//
// Tile: one oct (8 consecutive elements) of TOKENS_PER_THREAD tokens a thread; all loads are issued before the first conversion.
//
// The threads of a record are rounded up to whole groups of octs that share a scale, so that a half of a warp has a group.
//
// The grid covers max_tokens, so that a captured launch serves every table that fits: threads past its tokens leave early.

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
// limits: kv_append_*_ds* registers=64 threads=256

#include "append.cuh"
#include "append_record.cuh"

#define THREADS 256u
#define TOKENS_PER_THREAD 4u

// Counts what rounding an oct of each appended token loses, AT_ONCE tokens at a time. It loads them again, to save the registers of
// launches that do not count.
template <class In, u32 AT_ONCE>
__device__ __forceinline__ void count_octs(const AppendArgs &args, const Guard &guard, u64 from, u64 stride, u32 first, u32 last) {
    Lost lost;
#pragma unroll 1
    for (u32 token = 0; token <= last; token += AT_ONCE) {
        u32 words[AT_ONCE][2 * In::BYTES];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            load_oct<In, false>(from + min(token + i, last) * stride, words[i]);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (token + i <= last && slot_of(args, first + token + i) < args.num_slots) {
                note_oct<In>(lost, words[i], guard);
            }
        }
    }
    lost.add_to(guard);
}

template <class In, class Out>
__device__ __forceinline__ void append(const AppendArgs &args) {
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 block = divide(item, args.by_row_octs);
    u32 oct = item - block * args.row_octs;
    u32 first = block * TOKENS_PER_THREAD;
    if (first >= args.max_tokens) {
        return;
    }
    // The slots are loaded before num_tokens is known, to overlap their latency; past the table they repeat its last one.
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

    // Tokens past the end read the last one and are not written.
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
    u32 unsure = 0; // a bit for each token that needs the exact path
#pragma unroll
    for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
        // NO_SLOT and slots of other slabs fail this test too. The host checked the slots; the bound also covers a table made for a larger
        // pool.
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
        // The exact path is rare: one rolled loop that loads its operands again, to save registers.
#pragma unroll 1
        for (u32 i = 0; unsure != 0; i++, unsure >>= 1) {
            if (unsure & 1u) {
                store_8(target<Out>(args, slot_of(args, first + i), oct), e4m3_oct_exact<In>(from + i * stride, args.scale.k_scale));
            }
        }
    }
    if (args.guard.row) {
        count_octs<In, Same<Out, E4m3>::VALUE ? TOKENS_PER_THREAD : 1>(args, args.guard, from, stride, first, last);
    }
}

// A token of a record: scales are found here.
template <class In, class Record>
__device__ __forceinline__ void append_records(const AppendArgs &args) {
    constexpr u32 ROW_OCTS = Record::LATENT_OCTS + Record::ROPE_OCTS;
    constexpr u32 ROW_ITEMS = (ROW_OCTS + Record::GROUP_OCTS - 1) / Record::GROUP_OCTS * Record::GROUP_OCTS;
    static_assert(THREADS % Record::GROUP_OCTS == 0 && ROW_ITEMS % Record::GROUP_OCTS == 0, "groups do not cross blocks");
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 block = item / ROW_ITEMS;
    u32 oct = item - block * ROW_ITEMS;
    u32 first = block * TOKENS_PER_THREAD;
    if (first >= args.max_tokens) {
        return;
    }
    u32 num_tokens = min(read_4(args.table), args.max_tokens);
    u32 slots[TOKENS_PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
        slots[i] = slot_of(args, min(first + i, args.max_tokens - 1));
    }
    // All returns are those of whole groups, but for threads past the rotary part.
    if (first >= num_tokens || oct >= ROW_OCTS) {
        return;
    }
    u32 last = min(num_tokens - first, TOKENS_PER_THREAD) - 1;
    bool is_latent = oct < Record::LATENT_OCTS;
    u64 stride = is_latent ? args.kv_c_stride : args.k_pe_stride;
    u32 column = is_latent ? oct : oct - Record::LATENT_OCTS;
    u64 from = (is_latent ? args.kv_c : args.k_pe) + first * stride + column * (8 * In::BYTES);

    // Tokens past the end read the last one and are not written.
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
    // NO_SLOT and slots of other slabs fail the test of a slot too. The host checked the slots; the bound also covers a table made for a
    // larger pool.
    if (is_latent) {
#pragma unroll
        for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
            u32 exponent = scale_exponent(largest_of_group(largest_of<In>(words[i])));
            if (slots[i] < args.num_slots && i <= last) {
                store_latent<Record, In>(record_of<Record>(args, slots[i]), oct, words[i], exponent);
            }
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < TOKENS_PER_THREAD; i++) {
            if (slots[i] < args.num_slots && i <= last) {
                u32 halves[4];
                rope_words<In>(words[i], halves);
                store_oct<Bf16>(record_of<Record>(args, slots[i]) + Record::rope_at(column), halves);
            }
        }
    }
    if (args.guard.row) {
        count_octs<In, 1>(args, is_latent ? latent_guard(args.guard) : args.guard, from, stride, first, last);
    }
}

#define KV_APPEND(NAME, IN, OUT) \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_append_##NAME(const AppendArgs args) { append<IN, OUT>(args); }

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

#define KV_APPEND_RECORDS(LAYOUT, RECORD, INPUT, IN) \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_append_##INPUT##_##LAYOUT(const AppendArgs args) { append_records<IN, RECORD>(args); }

RECORDS(KV_APPEND_RECORDS, f32, F32)
RECORDS(KV_APPEND_RECORDS, f16, F16)
RECORDS(KV_APPEND_RECORDS, bf16, Bf16)
