// How a cooperative matrix gets its keys: FP8 e4m3fn bytes, four a word, made binary16.
//
// Both have their exponent above the mantissa, so a byte moved to bits 7 to 13 of a half, sign apart, is the same number but for the
// bias: 2^-8 of it. Subnormals too, as matrices take those of f16 for what they are. The two NaN codes, which would become 480, are
// noticed: see wide_rows.wgsl.
alias KvOct = vec2<u32>;

const KEY_UNIT = 256.0; // what a staged key has to be multiplied with

// Two bytes, in the upper halves of the word's halves.
fn half_pair(bytes: u32) -> u32 {
    return (bytes & 0x80008000u) | ((bytes >> 1u) & 0x3F803F80u);
}

// Four bytes, given two pairs of halves: elements 0 and 2, 1 and 3.
fn in_order(even: u32, odd: u32) -> vec2<u32> {
    return vec2<u32>((even & 0xFFFFu) | (odd << 16u), (even >> 16u) | (odd & 0xFFFF0000u));
}

fn half_word(word: u32) -> vec2<u32> {
    return in_order(half_pair(word << 8u), half_pair(word));
}

fn half_key(oct: KvOct) -> HalfOct {
    return half_oct(vec4<u32>(half_word(oct.x), half_word(oct.y)));
}

// Not 0 under ODD if a code is NaN: 0x7F or 0xFF, whose signs alone change if one is added. (So may that of the byte above.)
fn odd_bits(oct: KvOct) -> u32 {
    let next = oct + vec2<u32>(0x01010101u);
    return (next.x ^ oct.x) | (next.y ^ oct.y);
}

const ODD = 0x80808080u;

// As `half_pair`, but a NaN code becomes NaN: one more in the last place carries into the exponent's top bit, and the bits below are
// set.
fn half_pair_or_nan(bytes: u32) -> u32 {
    let magnitude = (bytes >> 1u) & 0x3F803F80u;
    let nan = (magnitude + 0x00800080u) & 0x40004000u;
    return (bytes & 0x80008000u) | magnitude | nan;
}

fn float_word(word: u32) -> vec4<f32> {
    let halves = in_order(half_pair_or_nan(word << 8u), half_pair_or_nan(word));
    return KEY_UNIT * vec4<f32>(unpack2x16float(halves.x), unpack2x16float(halves.y));
}

fn float_key(oct: KvOct) -> mat2x4<f32> {
    return mat2x4<f32>(float_word(oct.x), float_word(oct.y));
}
