// Stores an oct, 8 consecutive elements, of f32 as it is.
alias OutOct = mat2x4<f32>;

fn encode_out(oct: mat2x4<f32>) -> OutOct {
    return oct;
}
