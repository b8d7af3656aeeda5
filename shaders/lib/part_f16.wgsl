// How a cooperative matrix gets binary16: as it is, so that nothing is scaled. Needs oct_f16.wgsl and half_oct.wgsl.

// The bits, as f32, of a magnitude that is at least each of the oct's: here one whose factor is 1.
fn top_f16(oct: OctF16) -> u32 {
    return 0x46800000u;
}

fn part_f16(oct: OctF16, part: u32, factor: f32) -> HalfOct {
    return half_oct(oct);
}
