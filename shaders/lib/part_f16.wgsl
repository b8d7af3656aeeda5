// f16 operands of head_project_coop.wgsl: used as they are, with a scale of 1. Concatenated with: lib/oct_f16, lib/half_oct.

// The f32 bits of 2^14, for which exponent_for gives a scale of 1.
fn top_f16(oct: OctF16) -> u32 {
    return 0x46800000u;
}

fn part_f16(oct: OctF16, part: u32, factor: f32) -> HalfOct {
    return half_oct(oct);
}
