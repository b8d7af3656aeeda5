// How a cooperative matrix gets its keys: FP8 e4m3fn bytes, four a word, made binary16.
//
// Both have their exponent above the mantissa, so a byte moved to bits 7 to 13 of a half, sign apart, is the same number but for the
// bias: 2^-8 of it. Subnormals too, as matrices take those of f16 for what they are. The two NaN codes are looked for.
alias KvOct = vec2<u32>;

const KEY_UNIT = 256.0; // what a staged key has to be multiplied with
const KEYS_MAY_OVERFLOW = false;

// Two bytes, in the upper halves of the word's halves.
fn half_pair(bytes: u32) -> u32 {
    return (bytes & 0x80008000u) | ((bytes >> 1u) & 0x3F803F80u);
}

fn half_word(word: u32) -> vec4<f16> {
    let odd = half_pair(word); // elements 1 and 3
    let even = half_pair(word << 8u); // elements 0 and 2
    var pairs = vec2<u32>((even & 0xFFFFu) | (odd << 16u), (even >> 16u) | (odd & 0xFFFF0000u));
    if ((((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0u) {
        let is_nan = (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(0x7Fu)) == vec4<u32>(0x7Fu);
        let nans = select(vec4<u32>(0u), vec4<u32>(0x7E00u, 0x7E000000u, 0x7E00u, 0x7E000000u), is_nan);
        pairs |= vec2<u32>(nans.x | nans.y, nans.z | nans.w);
    }
    // Each half a u16: naga has no bitcast from u32 to halves.
    let bits = vec4<u32>(pairs.x & 0xFFFFu, pairs.x >> 16u, pairs.y & 0xFFFFu, pairs.y >> 16u);
    return bitcast<vec4<f16>>(vec4<u16>(bits));
}

fn half_key(oct: KvOct) -> HalfOct {
    return HalfOct(half_word(oct.x), half_word(oct.y));
}

fn largest_half(half: HalfOct) -> vec4<f16> {
    return vec4<f16>();
}

fn wide_rows(first_row: u32, num_rows: u32, page_begin: u32, kv_begin: u32, kv_end: u32, slot: u32, subgroup: u32, lane: u32) {}
