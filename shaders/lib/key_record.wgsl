// What mla_decode_coop.wgsl asks of a cache of records (KvLayout::Ds656, Ds528), beside lib/key_e4m3.wgsl for their codes, which are staged
// without their scales. Rotary elements beyond f16's range become infinite, which shows in the scores: the item is then recomputed in f32
// (lib/wide_rows.wgsl). lib/key_plain.wgsl is the alternative. Concatenated with: lib/key_e4m3, lib/oct_e4m3 or oct_e4m3_f16,
// lib/oct_bf16.
//
// The cache is read in units of 16 bytes; `row` is a token's first unit of 8 bytes, as in other kernels of records, an even number:
//
//   units [0, 32) 512 e4m3 codes    32: four f32 scales, of 128 codes each    [33, 41) 64 bf16 rotary elements
alias KvOct = vec4<u32>;
alias RopeOct = vec4<u32>;

// What is behind the codes is loaded alike: unit 0 of it are the scales.
const SCALES_AT = 32u;
const ROPE_AT = 33u;

// The result has a bit of ODD set if a code is NaN.
fn odd_codes(codes: vec4<u32>) -> u32 {
    return odd_bits(codes.xy) | odd_bits(codes.zw);
}

// Unit `i` of a thread behind the codes: of which token, and which one there. First come all rotary octs of a block, then the scales: so a
// subgroup has one kind. Past the end it is the last one again.
fn unit_token(thread: u32, i: u32) -> u32 {
    let at = i * THREADS + thread;
    if (ROPE_OCTS > 0u && (i + 1u) * THREADS <= TOKENS * ROPE_OCTS) {
        return at / max(ROPE_OCTS, 1u);
    }
    if (i * THREADS >= TOKENS * ROPE_OCTS) {
        return min(at - TOKENS * ROPE_OCTS, TOKENS - 1u);
    }
    return select(min(at - TOKENS * ROPE_OCTS, TOKENS - 1u), at / max(ROPE_OCTS, 1u), at < TOKENS * ROPE_OCTS);
}

fn unit_part(thread: u32, i: u32) -> u32 {
    let at = i * THREADS + thread;
    if (ROPE_OCTS > 0u && (i + 1u) * THREADS <= TOKENS * ROPE_OCTS) {
        return 1u + at % max(ROPE_OCTS, 1u);
    }
    if (i * THREADS >= TOKENS * ROPE_OCTS) {
        return 0u;
    }
    return select(0u, 1u + at % max(ROPE_OCTS, 1u), at < TOKENS * ROPE_OCTS);
}

// A unit behind the codes: the bits of the scales, or an oct of the rotary part.
fn load_rope(row: u32, unit: u32) -> RopeOct {
    return kv[row / 2u + SCALES_AT + unit];
}

// The result has bits of ODD if it is a unit of scales and one is subnormal or 0, negative, infinite, NaN, or 2^118 and more, where
// products would overflow.
fn odd_unit(bits: vec4<u32>, unit: u32) -> u32 {
    return select(0u, ODD, unit == 0u && any(bits - vec4<u32>(0x00800000u) >= vec4<u32>(0x7A000000u)));
}

// A rotary oct in f16.
fn half_rope(oct: RopeOct) -> HalfOct {
    let key = decode_bf16(oct);
    return HalfOct(vec4<f16>(key[0]), vec4<f16>(key[1]));
}

// An oct of a token in f32, of its latent or its rotary part.
fn float_oct(row: u32, oct: u32) -> mat2x4<f32> {
    if (oct >= LATENT_OCTS) {
        return decode_bf16(kv[row / 2u + ROPE_AT + oct - LATENT_OCTS]);
    }
    let codes = kv[row / 2u + oct / 2u];
    let scale = bitcast<f32>(kv[row / 2u + SCALES_AT][oct / 16u]) * SCALE_E4M3;
    return scale * decode_e4m3(select(codes.xy, codes.zw, oct % 2u == 1u));
}
