// Decodes an oct, 8 consecutive elements, of f16 (two a word) to f32. Needs no SHADER_F16.
alias OctF16 = vec4<u32>;

fn decode_f16(oct: OctF16) -> mat2x4<f32> {
    return mat2x4<f32>(
        vec4<f32>(unpack2x16float(oct.x), unpack2x16float(oct.y)),
        vec4<f32>(unpack2x16float(oct.z), unpack2x16float(oct.w)),
    );
}
