// An oct (8 consecutive elements) of e4m3 codes as f16, in words of two: exactly 2^-8 times the codes' values, subnormals included. NaN
// codes become 480: lib/index_odd_e4m3.wgsl finds them.
const half_unit_e4m3 = 256.0; // what such an f16 is multiplied by to give the element

// Converts two codes, bits 8 to 15 and 24 to 31 of `bytes`, to a pair of f16.
fn half_pair_e4m3(bytes: u32) -> u32 {
    return (bytes & 0x80008000u) | ((bytes >> 1u) & 0x3F803F80u);
}

// The halves are in the order 0 2 1 3, 4 6 5 7 of the elements, which saves exchanging them: a score does not depend on the order, as long
// as queries have it too (in_order_of_e4m3).
fn halves_of_e4m3(oct: OctE4m3) -> vec4<u32> {
    return vec4<u32>(
        half_pair_e4m3(oct.x << 8u),
        half_pair_e4m3(oct.x),
        half_pair_e4m3(oct.y << 8u),
        half_pair_e4m3(oct.y),
    );
}

fn in_order_of_e4m3(halves: vec4<u32>) -> vec4<u32> {
    let low = halves.xz & vec2<u32>(0xFFFFu); // of elements 0 and 4
    let high = halves.yw & vec2<u32>(0xFFFF0000u); // of elements 3 and 7
    let even = low | (halves.yw << vec2<u32>(16u));
    let odd = (halves.xz >> vec2<u32>(16u)) | high;
    return vec4<u32>(even.x, odd.x, even.y, odd.y);
}
