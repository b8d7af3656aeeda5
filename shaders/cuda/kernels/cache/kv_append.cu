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

#define WARPS (THREADS / 32)

// The extent of what is appended; of nothing where it is not counted.
template <class In>
__device__ __forceinline__ Extent extent_of(const AppendArgs &args, const u32 (&words)[TOKENS_PER_THREAD][2 * In::BYTES], const u32 (&slots)[TOKENS_PER_THREAD], u32 last) {
    Extent extent;
    if (args.guard.row) {
#pragma unroll
        for (u32 token = 0; token < TOKENS_PER_THREAD; token++) {
            if (slots[token] < args.num_slots && token <= last) {
                extend_by_oct<In>(extent, words[token]);
            }
        }
    }
    return extent;
}

// Counts one by one what rounding an oct of each appended token loses. It loads them again, to save registers: few threads come here.
template <class In>
__device__ __forceinline__ void count_octs(const AppendArgs &args, const Guard &guard, u64 from, u64 stride, u32 first, u32 last, Lost &lost) {
#pragma unroll 1
    for (u32 token = 0; token <= last; token++) {
        if (slot_of(args, first + token) < args.num_slots) {
            u32 words[2 * In::BYTES];
            load_oct<In, false>(from + token * stride, words);
            note_oct<In>(lost, words, guard);
        }
    }
}

template <class In, class Out>
__device__ __forceinline__ void append(const AppendArgs &args, Lost &lost) {
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
    // f32, and 16 bits that are converted to others, leave no registers for it: there all are counted by loading them again.
    constexpr bool HAS_ROOM = In::BYTES == 2 && (Same<In, Out>::VALUE || Same<Out, E4m3>::VALUE);
    Extent extent;
    if constexpr (HAS_ROOM) {
        extent = extent_of<In>(args, words, slots, last);
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
        if (!HAS_ROOM || extent.loses(args.guard)) {
            count_octs<In>(args, args.guard, from, stride, first, last, lost);
        } else {
            lost.amax = extent.largest;
        }
    }
}

// A token of a record: scales are found here.
template <class In, class Record>
__device__ __forceinline__ void append_records(const AppendArgs &args, Lost &lost) {
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
    const Extent extent = extent_of<In>(args, words, slots, last);
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
        const Guard guard = is_latent ? latent_guard(args.guard) : args.guard;
        if (extent.loses(guard)) {
            count_octs<In>(args, guard, from, stride, first, last, lost);
        } else {
            lost.amax = extent.largest;
        }
    }
}

// Appends, and adds what the block has counted.
template <class Append>
__device__ __forceinline__ void append_counted(const AppendArgs &args, Append &&append) {
    __shared__ WarpLost warps[WARPS];
    const u32 seen = seen_by(args.guard.row);
    Lost lost;
    append(lost);
    if (args.guard.row) {
        lost.add_of_block<WARPS>(args.guard.row, seen, warps);
    }
}

// A multiprocessor must have room for BLOCKS: with the guard's code, which few launches run, the compiler takes more registers by itself.
#define KV_APPEND(NAME, IN, OUT, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kv_append_##NAME(const AppendArgs args) { \
        append_counted(args, [&](Lost &lost) { append<IN, OUT>(args, lost); }); \
    }

// Equal dtypes are copied bit for bit, signalling NaNs included.
KV_APPEND(f32_f32, F32, F32, 5)
KV_APPEND(f32_f16, F32, F16, 5)
KV_APPEND(f32_bf16, F32, Bf16, 5)
KV_APPEND(f32_e4m3, F32, E4m3, 4)
KV_APPEND(f16_f32, F16, F32, 6)
KV_APPEND(f16_f16, F16, F16, 6)
KV_APPEND(f16_bf16, F16, Bf16, 6)
KV_APPEND(f16_e4m3, F16, E4m3, 5)
KV_APPEND(bf16_f32, Bf16, F32, 6)
KV_APPEND(bf16_f16, Bf16, F16, 6)
KV_APPEND(bf16_bf16, Bf16, Bf16, 6)
KV_APPEND(bf16_e4m3, Bf16, E4m3, 5)

#define KV_APPEND_RECORDS(LAYOUT, RECORD, INPUT, IN) \
    extern "C" __global__ void __launch_bounds__(THREADS) kv_append_##INPUT##_##LAYOUT(const AppendArgs args) { \
        append_counted(args, [&](Lost &lost) { append_records<IN, RECORD>(args, lost); }); \
    }

RECORDS(KV_APPEND_RECORDS, f32, F32)
RECORDS(KV_APPEND_RECORDS, f16, F16)
RECORDS(KV_APPEND_RECORDS, bf16, Bf16)
