// Keys for cooperative matrices from an FP8 e4m3fn cache: an oct (8 consecutive elements, four a word) converted to f16.
//
// An e4m3 code's exponent and mantissa, moved to bits 7 to 13 of an f16, are the same number but for the exponent's bias: exactly 2^-8
// times the code's value. That holds for subnormals too, since tensor cores keep f16 subnormals. The two NaN codes would become 480, so
// they are detected (`odd_bits`), and the work item is computed again in f32 (lib/wide_rows.wgsl). Serves the codes of records too
// (lib/key_record.wgsl).
alias KvOct = vec2<u32>; // one dtype

const KEY_UNIT = 256.0; // what a staged f16 is multiplied by to give the key

// Converts two codes, bits 8 to 15 and 24 to 31 of `bytes`, to a pair of f16.
fn half_pair(bytes: u32) -> u32 {
    return (bytes & 0x80008000u) | ((bytes >> 1u) & 0x3F803F80u);
}

// From a pair of f16 of elements 0 and 2 (`even`) and one of elements 1 and 3 (`odd`), makes a pair of elements 0 and 1 and one of 2 and 3.
fn in_order(even: u32, odd: u32) -> vec2<u32> {
    return vec2<u32>((even & 0xFFFFu) | (odd << 16u), (even >> 16u) | (odd & 0xFFFF0000u));
}

fn half_word(word: u32) -> vec2<u32> {
    return in_order(half_pair(word << 8u), half_pair(word));
}

fn half_key(oct: vec2<u32>) -> HalfOct {
    return half_oct(vec4<u32>(half_word(oct.x), half_word(oct.y)));
}

// The result has a bit of ODD set if and only if a code is NaN, 0x7F or 0xFF. Adding 1 to a byte flips its top bit only if the byte is 0x7F
// or 0xFF. Adding to four bytes at once, a carry out of 0xFF may flip the byte above too, but then there was a NaN already.
fn odd_bits(oct: vec2<u32>) -> u32 {
    let next = oct + vec2<u32>(0x01010101u);
    return (next.x ^ oct.x) | (next.y ^ oct.y);
}

const ODD = 0x80808080u;

// Like `half_pair`, but a NaN code becomes an f16 NaN: adding 1 in the last place of its seven bits, all ones, carries into the exponent's
// top bit, and the exponent is then all ones.
fn half_pair_or_nan(bytes: u32) -> u32 {
    let magnitude = (bytes >> 1u) & 0x3F803F80u;
    let nan = (magnitude + 0x00800080u) & 0x40004000u;
    return (bytes & 0x80008000u) | magnitude | nan;
}

fn float_word(word: u32) -> vec4<f32> {
    let halves = in_order(half_pair_or_nan(word << 8u), half_pair_or_nan(word));
    return KEY_UNIT * vec4<f32>(unpack2x16float(halves.x), unpack2x16float(halves.y));
}

fn float_key(oct: vec2<u32>) -> mat2x4<f32> {
    return mat2x4<f32>(float_word(oct.x), float_word(oct.y));
}
