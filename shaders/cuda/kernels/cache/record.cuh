// The layouts of a token that has f32 scales of its own, as traits: bytes, and where each section begins.
//
//   BYTES       of a token, a multiple of 16, as each section's begin
//   LATENT_AT   LATENT e4m3 codes
//   SCALES_AT   f32 scales, one for each GROUP codes: latent = code * scale
//   ROPE_AT     ROPE bf16 elements
//
// An oct is 8 consecutive elements; LATENT, ROPE and GROUP are multiples of it. KvLayout::token of src/cache/layout.rs is the same table.
#pragma once

template <unsigned ROPE_ELEMS>
struct ScaledRecord {
    static constexpr unsigned LATENT = 512, ROPE = ROPE_ELEMS, GROUP = 128;
    static constexpr unsigned LATENT_AT = 0, SCALES_AT = 512, ROPE_AT = 528, BYTES = ROPE_AT + 2 * ROPE;
    static constexpr unsigned LATENT_OCTS = LATENT / 8, ROPE_OCTS = ROPE / 8, GROUP_OCTS = GROUP / 8;

    // Bytes from a token to an oct of its latent, to the oct's scale, and to an oct of its rotary part.
    static __device__ __forceinline__ unsigned latent_at(unsigned oct) { return LATENT_AT + 8 * oct; }
    static __device__ __forceinline__ unsigned scale_at(unsigned oct) { return SCALES_AT + 4 * (oct / GROUP_OCTS); }
    static __device__ __forceinline__ unsigned rope_at(unsigned oct) { return ROPE_AT + 16 * oct; }
};

// vLLM's fp8_ds_mla, FlashMLA's V3.2: dims 512/64.
using Ds656 = ScaledRecord<64>;
// The same without a rotary part: dims 512/0.
using Ds528 = ScaledRecord<0>;

// ENTRY(name, trait, ..) for each layout, and for each that has a rotary part: what a .cu declares entries by.
#define RECORDS_WITH_ROPE(ENTRY, ...) ENTRY(ds656, Ds656, __VA_ARGS__)
#define RECORDS(ENTRY, ...) RECORDS_WITH_ROPE(ENTRY, __VA_ARGS__) ENTRY(ds528, Ds528, __VA_ARGS__)
