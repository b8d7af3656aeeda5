// An oct is eight neighbouring elements of a row; decoded, the two columns of a mat2x4. Here it already is one.
alias OctF32 = mat2x4<f32>;

fn decode_f32(oct: OctF32) -> mat2x4<f32> {
    return oct;
}
