// How a cooperative matrix gets its keys: FP8 e4m3fn bytes, four a word, made binary16.
//
// Both have their exponent above the mantissa, so a byte moved to bits 7 to 13 of a half, sign apart, is the same number but for the
// bias: 2^-8 of it. Subnormals too, as matrices take those of f16 for what they are. The two NaN codes are looked for.
alias KvOct = vec2<u32>;

const KEY_UNIT = 256.0; // what a staged key has to be multiplied with
const KEYS_MAY_OVERFLOW = false;

// Two bytes, in the upper halves of the word's halves. One more in the last place carries a NaN code, and no other, into the
// exponent's top bit: with the bits below set it is a NaN of f16.
fn half_pair(bytes: u32) -> u32 {
    let magnitude = (bytes >> 1u) & 0x3F803F80u;
    let nan = (magnitude + 0x00800080u) & 0x40004000u;
    return (bytes & 0x80008000u) | magnitude | nan;
}

fn half_word(word: u32) -> vec2<u32> {
    let odd = half_pair(word); // elements 1 and 3
    let even = half_pair(word << 8u); // elements 0 and 2
    return vec2<u32>((even & 0xFFFFu) | (odd << 16u), (even >> 16u) | (odd & 0xFFFF0000u));
}

fn half_key(oct: KvOct) -> HalfOct {
    return half_oct(vec4<u32>(half_word(oct.x), half_word(oct.y)));
}

fn wide_rows(first_row: u32, num_rows: u32, page_begin: u32, kv_begin: u32, kv_end: u32, slot: u32, subgroup: u32, lane: u32) {}
