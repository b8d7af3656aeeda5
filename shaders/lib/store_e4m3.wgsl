// Rounds an oct, 8 consecutive elements, from f32 to e4m3 codes, four a word. Concatenated with: lib/round, lib/code_e4m3, lib/project.
alias OutOct = vec2<u32>;

fn encode_out(oct: mat2x4<f32>) -> OutOct {
    return vec2<u32>(
        code_quad(bitcast<vec4<u32>>(oct[0]), params.out_scale),
        code_quad(bitcast<vec4<u32>>(oct[1]), params.out_scale),
    );
}
