// Index keys of e4m3 codes by four words, where pages begin at multiples of 16 bytes.
alias KeyUnit = vec4<u32>;

fn key_oct(at: u32, oct: u32) -> KeyOct {
    let quad = cache[at + oct / 2u];
    return select(quad.xy, quad.zw, oct % 2u == 1u);
}

fn key_scale(word: u32) -> f32 {
    return bitcast<f32>(cache[word / 4u][word % 4u]);
}
