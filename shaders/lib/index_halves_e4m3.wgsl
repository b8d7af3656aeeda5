// An oct (8 consecutive elements) of e4m3 codes as f16, in words of two: exactly 2^-8 times the codes' values, subnormals included. NaN
// codes become 480: lib/index_odd_e4m3.wgsl finds them.
const half_unit_e4m3 = 256.0; // what such an f16 is multiplied by to give the element

// Converts two codes, bits 8 to 15 and 24 to 31 of `bytes`, to a pair of f16.
fn half_pair_e4m3(bytes: u32) -> u32 {
    return (bytes & 0x80008000u) | ((bytes >> 1u) & 0x3F803F80u);
}

fn halves_of_word_e4m3(word: u32) -> vec2<u32> {
    let even = half_pair_e4m3(word << 8u); // of elements 0 and 2
    let odd = half_pair_e4m3(word); // of elements 1 and 3
    return vec2<u32>((even & 0xFFFFu) | (odd << 16u), (even >> 16u) | (odd & 0xFFFF0000u));
}

fn halves_of_e4m3(oct: OctE4m3) -> vec4<u32> {
    return vec4<u32>(halves_of_word_e4m3(oct.x), halves_of_word_e4m3(oct.y));
}
