// What mla_decode_coop.wgsl asks of a cache of records: an oct (8 consecutive elements) in f16, the latent's times their scale. That is
// exact for scales that are powers of two. Others have bits of ODD, and elements beyond f16's range become infinite, which shows in the
// scores: the item is then recomputed in f32 (lib/wide_rows.wgsl). lib/key_plain.wgsl is the alternative. Concatenated with:
// lib/cache_record and what that is.
alias KvOct = vec2<u32>;
alias RopeOct = vec4<u32>;

const KEY_UNIT = 1.0; // scale of a staged key
const ODD = 0x007FFFFFu; // of a scale: its mantissa

fn half_of(x: mat2x4<f32>) -> HalfOct {
    return HalfOct(vec4<f16>(x[0]), vec4<f16>(x[1]));
}

fn scaled_key(oct: KvOct, scale: f32) -> HalfOct {
    return half_of(scale * decode_e4m3(oct));
}

fn load_rope(row: u32, oct: u32) -> RopeOct {
    return vec4<u32>(kv[row + ROPE_AT + 2u * oct], kv[row + ROPE_AT + 2u * oct + 1u]);
}

fn half_rope(oct: RopeOct) -> HalfOct {
    return half_of(decode_bf16(oct));
}

fn odd_rope(oct: RopeOct) -> u32 {
    return 0u;
}

// An oct of a token in f32, of its latent or its rotary part.
fn float_oct(row: u32, oct: u32) -> mat2x4<f32> {
    if (oct < LATENT_OCTS) {
        return latent_key(row, oct);
    }
    return rope_key(row, oct - LATENT_OCTS);
}
