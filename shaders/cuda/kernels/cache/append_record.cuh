// How appends write a record: scales as FlashMLA's quantiser has them, codes, and the rotary part in bf16.
//
//   for each GROUP elements of the latent: scale = 2^ceil(log2(max(amax / 448, 1e-4))), code = e4m3(x / scale)
//
// The scale is found by integer arithmetic on bits, whose order for x >= 0 is that of the numbers. Infinities and NaNs are above all
// numbers: their group's scale is 2^120.
#pragma once

#include "append.cuh"
#include "record.cuh"

static_assert(Ds656::GROUP_OCTS == 16 && Ds528::GROUP_OCTS == 16, "a half of a warp has the octs of a group");

// The largest |x| of an oct, as f32 bits.
template <class In>
__device__ __forceinline__ u32 largest_of(const u32 *words) {
    u32 x[8], largest = 0;
    In::magnitudes(words, x);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        largest = max(largest, x[i]);
    }
    return largest;
}

// The largest of a half of a warp, whose 16 lanes all call it.
__device__ __forceinline__ u32 largest_of_group(u32 largest) {
    const u32 half = 0xFFFFu << (threadIdx.x & 16u);
#pragma unroll
    for (u32 by = 8; by > 0; by /= 2) {
        largest = max(largest, __shfl_xor_sync(half, largest, by));
    }
    return largest;
}

// The biased exponent of a group's scale. 448 is 1.75 * 2^8, so the exponent of amax is 8 more, or 7 where its mantissa is past 1.75; 1e-4
// is between 2^-14 and 2^-13, whose biased exponent is 114.
__device__ __forceinline__ u32 scale_exponent(u32 largest) {
    return max(min(largest, F32_INF) + 0x1FFFFFu >> 23, 122u) - 8u;
}

// 8 codes of x / 2^(exponent - 127). No number saturates. An infinity is +-448, a NaN 0x7F.
template <class In>
__device__ __forceinline__ uint2 record_codes(const u32 *words, u32 exponent) {
    float inverse = __uint_as_float((261u - exponent) << 23); // 128 / scale, a normal number
    E4m3Scale scale = {0.0f, inverse, inverse, 0u};
    u32 x[8], code[8], doubt = 0;
    In::magnitudes(words, x);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 finite = e4m3_fast(x[i], scale, doubt);
        code[i] = x[i] < F32_INF ? finite : x[i] == F32_INF ? 0x7Eu : 0x7Fu;
    }
    // Gathers the lowest bytes.
    uint2 codes;
    codes.x = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
    codes.y = __byte_perm(__byte_perm(code[4], code[5], 0x0040), __byte_perm(code[6], code[7], 0x0040), 0x5410);
    // Signs, but for NaNs: only 0x7F carries into the sign bit.
    codes.x |= In::signs(words, 0) & ~(codes.x + 0x01010101u);
    codes.y |= In::signs(words, 1) & ~(codes.y + 0x01010101u);
    return codes;
}

// The address of the token in a slot of the slab.
template <class Record>
__device__ __forceinline__ u64 record_of(const AppendArgs &args, u32 slot) {
    u32 page = divide(slot, args.by_page_size);
    u32 row = slot - page * args.page_size;
    return args.kv + page * args.block_stride + (u64)(row * Record::BYTES);
}

// The guard of a record's latent, whose scales are made from it: no number is past them.
__device__ __forceinline__ Guard latent_guard(const Guard &guard) { return Guard{guard.row, 0, F32_INF - 1}; }

// An oct of the latent, and the scale of the group that it begins.
template <class Record, class In>
__device__ __forceinline__ void store_latent(u64 record, u32 oct, const u32 *words, u32 exponent) {
    store_8(record + Record::latent_at(oct), record_codes<In>(words, exponent));
    if (oct % Record::GROUP_OCTS == 0) {
        store_4(record + Record::scale_at(oct), exponent << 23);
    }
}

// 8 elements of the rotary part in bf16, copied bit for bit if they are bf16.
template <class In>
__device__ __forceinline__ void rope_words(const u32 *words, u32 *halves) {
    if constexpr (Same<In, Bf16>::VALUE) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            halves[i] = words[i];
        }
    } else {
        u32 bits[8];
        In::widen(words, bits);
        Bf16::narrow(bits, halves);
    }
}
