// The elements of a token in f32, of a cache of one dtype: the latent's octs (8 consecutive elements), then the rotary part's. `row` is the
// token's first unit, an oct. lib/cache_record.wgsl is the alternative, for records.

fn latent_key(row: u32, oct: u32) -> mat2x4<f32> {
    return decode_kv(kv[row + oct]);
}

fn rope_key(row: u32, oct: u32) -> mat2x4<f32> {
    return decode_kv(kv[row + LATENT_OCTS + oct]);
}

fn latent_value(row: u32, oct: u32) -> mat2x4<f32> {
    return decode_value(kv[row + oct]);
}
