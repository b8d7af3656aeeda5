// What kv_gather reads of a record, and its conversion: code * scale in f32, then rounded to the output's dtype, to nearest even; the
// rotary part from bf16. lib/gather_plain.wgsl is the alternative.
// Concatenated with: lib/round, lib/in_e4m3, lib/out_*, lib/record. Constants: LATENT_QUADS.

struct Stored {
    words: vec2<u32>, // a word of codes, or two words of bf16
    scale: u32, // f32 bits
    is_latent: bool,
}

fn stored_quad(record: u32, quad: u32) -> Stored {
    if quad < LATENT_QUADS {
        return Stored(vec2<u32>(kv[record + latent_word(quad)], 0u), kv[record + scale_word(quad)], true);
    }
    let at = record + rope_word(quad - LATENT_QUADS);
    return Stored(vec2<u32>(kv[at], kv[at + 1u]), 0u, false);
}

fn convert(q: Stored, scale: E4m3Scale) -> OutQuad {
    if q.is_latent {
        return out_quad(times_scale(q.words.x, q.scale), scale);
    }
    let rope = vec4<u32>(q.words.x << 16u, q.words.x & 0xFFFF0000u, q.words.y << 16u, q.words.y & 0xFFFF0000u);
    return out_quad(rope, scale);
}

// 4 codes times an f32 above 0, subnormal or not, by its bits; NaN for a scale that is not finite.
fn times_scale(codes: u32, scale: u32) -> vec4<u32> {
    let magnitude = scale & 0x7FFFFFFFu;
    if magnitude >= F32_INF {
        return vec4<u32>(0x7FC00000u);
    }
    let top = firstLeadingBit(max(magnitude, 1u));
    let is_normal = magnitude >= 0x800000u;
    let exponent = select(i32(top) - 149, i32(magnitude >> 23u) - 127, is_normal);
    let mantissa = select(magnitude << (23u - min(top, 23u)), (magnitude & 0x7FFFFFu) | 0x800000u, is_normal);
    return in_bits4_scaled(codes, E4m3Scale(1.0, exponent, mantissa, 0u, 0.0, 0.0, 0.0, 0u));
}
