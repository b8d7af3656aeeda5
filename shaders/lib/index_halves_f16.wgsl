// An oct (8 consecutive elements) of f16, in words of two: as it is.
const half_unit_f16 = 1.0;

fn halves_of_f16(oct: OctF16) -> vec4<u32> {
    return oct;
}
