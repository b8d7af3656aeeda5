// What both bodies of merge_attn_states share: parameters, LSEs and the weights of a row.

// element (token, head, 0) of an array is at offset + token * token_stride + head * head_stride
struct Strides {
    offset: u32,
    token_stride: u32,
    head_stride: u32,
    pad: u32,
}

struct MergeParams {
    // outputs in the body's unit (elements or quads), LSEs in elements
    prefix: Strides,
    suffix: Strides,
    output: Strides,
    prefix_lse: Strides,
    suffix_lse: Strides,
    output_lse: Strides,
    num_tokens: u32,
    num_heads: u32,
    num_items: u32,
    writes_lse: u32,
    // only read by the words body: how an output element is traced back to its row
    first_word: u32,
    inner_is_token: u32,
    inner_stride: u32,
    outer_stride: u32,
}

@group(0) @binding(0) var<uniform> params: MergeParams;
// LSEs are words: only their bits tell an empty side, as a shader may assume that no infinity and no NaN exists
@group(0) @binding(4) var<storage, read> prefix_lse: array<u32>; // [heads, tokens] by default, strided
@group(0) @binding(5) var<storage, read> suffix_lse: array<u32>; // [heads, tokens] by default, strided
@group(0) @binding(6) var<storage, read_write> output_lse: array<u32>; // [heads, tokens] by default, strided; unused without writes_lse

const TAKE_NONE = 0u;
const TAKE_PREFIX = 1u;
const TAKE_SUFFIX = 2u;
const TAKE_BOTH = 3u;

struct Weights {
    sides: u32,
    prefix: f32,
    suffix: f32,
    lse_bits: u32,
}

fn at(s: Strides, token: u32, head: u32) -> u32 {
    return s.offset + token * s.token_stride + head * s.head_stride;
}

// Halves first, so that the difference of any two finite values is finite; under -120 exp is 0 in any case.
fn exp_below(x: f32, top: f32) -> f32 {
    return exp(2.0 * max(0.5 * x - 0.5 * top, -60.0));
}

fn weigh(token: u32, head: u32) -> Weights {
    let p = prefix_lse[at(params.prefix_lse, token, head)];
    let s = suffix_lse[at(params.suffix_lse, token, head)];
    // -inf, +inf and NaN have all bits of the exponent set: that side is empty
    let has_prefix = (p & F32_INF) != F32_INF;
    let has_suffix = (s & F32_INF) != F32_INF;
    if has_prefix && has_suffix {
        let top = max(bitcast<f32>(p), bitcast<f32>(s));
        let ep = exp_below(bitcast<f32>(p), top);
        let es = exp_below(bitcast<f32>(s), top);
        let sum = ep + es; // 1 to 2
        return Weights(TAKE_BOTH, ep / sum, es / sum, bitcast<u32>(top + log(sum)));
    }
    if has_prefix {
        return Weights(TAKE_PREFIX, 1.0, 0.0, p);
    }
    if has_suffix {
        return Weights(TAKE_SUFFIX, 0.0, 1.0, s);
    }
    return Weights(TAKE_NONE, 0.0, 0.0, 0xFF800000u);
}

fn write_lse(token: u32, head: u32, lse_bits: u32) {
    if params.writes_lse != 0u {
        output_lse[at(params.output_lse, token, head)] = lse_bits;
    }
}
