// An oct is 8 consecutive elements; decoded, the two columns of a mat2x4. In f32 it already is one.
alias OctF32 = mat2x4<f32>;

fn decode_f32(oct: OctF32) -> mat2x4<f32> {
    return oct;
}
