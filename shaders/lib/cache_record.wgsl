// The elements of a token in f32, of a cache of records (KvLayout::Ds656, Ds528). `row` is the token's first unit of 8 bytes.
//
//   units [0, 64) 512 e4m3 codes    [64, 66) four f32 scales, of 128 codes each    [66, 82) 64 bf16 rotary elements
//
// lib/cache_plain.wgsl is the alternative. Concatenated with: lib/oct_e4m3 or oct_e4m3_f16, lib/oct_bf16.

const SCALES_AT = 64u;
const ROPE_AT = 66u;

// The factor of a decoded oct of the latent.
fn latent_scale(row: u32, oct: u32) -> f32 {
    let pair = kv[row + SCALES_AT + oct / 32u];
    return bitcast<f32>(select(pair.x, pair.y, oct / 16u % 2u == 1u)) * SCALE_E4M3;
}

fn latent_key(row: u32, oct: u32) -> mat2x4<f32> {
    return latent_scale(row, oct) * decode_e4m3(kv[row + oct]);
}

fn rope_key(row: u32, oct: u32) -> mat2x4<f32> {
    let low = kv[row + ROPE_AT + 2u * oct];
    let high = kv[row + ROPE_AT + 2u * oct + 1u];
    return decode_bf16(vec4<u32>(low, high));
}

fn latent_value(row: u32, oct: u32) -> mat2x4<f32> {
    return latent_scale(row, oct) * decode_finite_e4m3(kv[row + oct]);
}
