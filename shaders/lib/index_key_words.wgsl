// Index keys of e4m3 codes by words, wherever pages begin: a page of 7 keys is 924 bytes.
alias KeyUnit = u32;

fn key_oct(at: u32, oct: u32) -> KeyOct {
    return vec2<u32>(cache[at + 2u * oct], cache[at + 2u * oct + 1u]);
}

fn key_scale(word: u32) -> f32 {
    return bitcast<f32>(cache[word]);
}
