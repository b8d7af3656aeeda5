// What mla_decode_coop.wgsl asks of a cache of one dtype, by its lib/key_<dtype>. `row` is a token's first unit, an oct (8 consecutive
// elements). lib/key_record.wgsl is the alternative.
alias RopeOct = KvOct;

fn load_rope(row: u32, oct: u32) -> RopeOct {
    return kv[row + LATENT_OCTS + oct];
}

fn half_rope(oct: RopeOct) -> HalfOct {
    return half_key(oct);
}

fn odd_rope(oct: RopeOct) -> u32 {
    return odd_bits(oct);
}

// An oct of a token in f32, of its latent or its rotary part.
fn float_oct(row: u32, oct: u32) -> mat2x4<f32> {
    return float_key(kv[row + oct]);
}
