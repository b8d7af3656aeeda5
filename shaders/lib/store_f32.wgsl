// How eight neighbouring output elements are stored: as they are.
alias OutOct = mat2x4<f32>;

fn encode_out(oct: mat2x4<f32>) -> OutOct {
    return oct;
}
