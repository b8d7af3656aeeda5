// How a cooperative matrix gets its keys: FP8 e4m3fn bytes, four a word, made binary16.
//
// Both have their exponent above the mantissa, so a byte moved to bits 7 to 13 of a half, sign apart, is the same number but for the
// bias: 2^-8 of it. Subnormals too, as matrices take those of f16 for what they are. The two NaN codes are looked for apart.
alias KvOct = vec2<u32>;

const KEY_UNIT = 256.0; // what a staged key has to be multiplied with
const KEYS_MAY_OVERFLOW = false;
const CODES_OF_NAN = true; // whether NaN needs looking for

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

// A byte's top bit is set if it is NaN: 0x7F or 0xFF, whose signs alone change if one is added. (So may that of the byte above.)
fn nan_bits(oct: KvOct) -> u32 {
    let next = oct + vec2<u32>(0x01010101u);
    return (next.x ^ oct.x) | (next.y ^ oct.y);
}

// As `half_pair`, but such codes become NaN: the carry reaches the exponent's top bit, and the bits below are set.
fn half_pair_or_nan(bytes: u32) -> u32 {
    let magnitude = (bytes >> 1u) & 0x3F803F80u;
    let nan = (magnitude + 0x00800080u) & 0x40004000u;
    return (bytes & 0x80008000u) | magnitude | nan;
}

fn half_word_or_nan(word: u32) -> vec2<u32> {
    return in_order(half_pair_or_nan(word << 8u), half_pair_or_nan(word));
}

fn half_key_or_nan(oct: KvOct) -> HalfOct {
    return half_oct(vec4<u32>(half_word_or_nan(oct.x), half_word_or_nan(oct.y)));
}

fn wide_rows(first_row: u32, num_rows: u32, page_begin: u32, kv_begin: u32, kv_end: u32, slot: u32, subgroup: u32, lane: u32) {}
