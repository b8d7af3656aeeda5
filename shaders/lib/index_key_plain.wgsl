// Index keys of f32, f16 or bf16, by octs (8 consecutive elements): they have no scales.
alias KeyUnit = KeyOct;

fn key_oct(at: u32, oct: u32) -> KeyOct {
    return cache[at + oct];
}

fn key_scale(word: u32) -> f32 {
    return 1.0;
}
