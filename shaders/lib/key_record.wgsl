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

const SCALES_AT = 32u;
const ROPE_AT = 33u;

// The result has a bit of ODD set if a code is NaN.
fn odd_codes(codes: vec4<u32>) -> u32 {
    return odd_bits(codes.xy) | odd_bits(codes.zw);
}

// The bits of a token's four scales.
fn load_scales(row: u32) -> vec4<u32> {
    return kv[row / 2u + SCALES_AT];
}

// The result has bits of ODD if a scale is subnormal or 0, negative, infinite, NaN, or 2^118 and more, where products would overflow.
fn odd_scales(bits: vec4<u32>) -> u32 {
    return select(0u, ODD, any(bits - vec4<u32>(0x00800000u) >= vec4<u32>(0x7A000000u)));
}

fn load_rope(row: u32, oct: u32) -> RopeOct {
    return kv[row / 2u + ROPE_AT + oct];
}

fn half_rope(oct: RopeOct) -> HalfOct {
    let key = decode_bf16(oct);
    return HalfOct(vec4<f16>(key[0]), vec4<f16>(key[1]));
}

fn odd_rope(oct: RopeOct) -> u32 {
    return 0u;
}

// An oct of a token in f32, of its latent or its rotary part.
fn float_oct(row: u32, oct: u32) -> mat2x4<f32> {
    if (oct >= LATENT_OCTS) {
        return decode_bf16(load_rope(row, oct - LATENT_OCTS));
    }
    let codes = kv[row / 2u + oct / 2u];
    let scale = bitcast<f32>(load_scales(row)[oct / 16u]) * SCALE_E4M3;
    return scale * decode_e4m3(select(codes.xy, codes.zw, oct % 2u == 1u));
}
