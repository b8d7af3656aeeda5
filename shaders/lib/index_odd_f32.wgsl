// Whether an oct (8 consecutive elements) of f32 has an infinity or a NaN, and an element as its bits. Concatenated with: lib/oct_f32.

fn has_odd_f32(oct: OctF32) -> bool {
    let low = bitcast<vec4<u32>>(oct[0]) & vec4<u32>(0x7F800000u);
    let high = bitcast<vec4<u32>>(oct[1]) & vec4<u32>(0x7F800000u);
    let top = max(low, high);
    return max(max(top.x, top.y), max(top.z, top.w)) == 0x7F800000u;
}

fn bits_of_f32(oct: OctF32, i: u32) -> u32 {
    let quad = bitcast<vec4<u32>>(select(oct[0], oct[1], i >= 4u));
    return quad[i % 4u];
}
