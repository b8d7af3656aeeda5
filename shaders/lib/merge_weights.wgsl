// Shared by both shaders of merge_state: parameters, LSEs and the weights of a row.

// element (token, head, 0) of an array is at offset + token * token_stride + head * head_stride
struct Strides {
    offset: u32,
    token_stride: u32,
    head_stride: u32,
    pad: u32,
}

struct MergeParams {
    // outputs in the shader's unit (elements, or 16 bytes), LSEs in elements
    prefix: Strides,
    suffix: Strides,
    output: Strides,
    prefix_lse: Strides,
    suffix_lse: Strides,
    output_lse: Strides,
    num_tokens: u32,
    num_heads: u32,
    num_items: u32, // rows, or words of the output
    writes_lse: u32,
    // only for the shader by words: how to find the row of an output element
    first_word: u32,
    inner_is_token: u32,
    inner_stride: u32,
    outer_stride: u32,
    output_scale: f32,
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

@group(0) @binding(0) var<uniform> params: MergeParams;
// LSEs are read as words: an empty side is recognised by bits, since a shader compiler may assume that there is no infinity or NaN
@group(0) @binding(4) var<storage, read> prefix_lse: array<u32>; // [heads, tokens] by default, strided
@group(0) @binding(5) var<storage, read> suffix_lse: array<u32>; // [heads, tokens] by default, strided
@group(0) @binding(6) var<storage, read_write> output_lse: array<u32>; // [heads, tokens] by default, strided; unused without writes_lse

// what both sides weigh in a row; an empty side is ignored, whatever it holds
struct Weights {
    has_prefix: bool,
    has_suffix: bool,
    is_copy: bool, // of the bits of the only side, or of zeros
    prefix: f32, // with output_scale
    suffix: f32,
    top: f32, // the larger LSE
    sum: f32, // of both sides, in units of exp(top)
}

fn at(s: Strides, token: u32, head: u32) -> u32 {
    return s.offset + token * s.token_stride + head * s.head_stride;
}

// exp(x - top). Both are halved first, so that the difference of any two finite values is finite; below -120 exp is 0 anyway.
fn exp_below(x: f32, top: f32) -> f32 {
    return exp(2.0 * max(0.5 * x - 0.5 * top, -60.0));
}

// the weights of a row, from the bits of both LSEs
fn weigh(prefix_bits: u32, suffix_bits: u32) -> Weights {
    // -inf, +inf and NaN have all bits of the exponent set: that side is empty
    let has_prefix = (prefix_bits & F32_INF) != F32_INF;
    let has_suffix = (suffix_bits & F32_INF) != F32_INF;
    let p = bitcast<f32>(select(0u, prefix_bits, has_prefix));
    let s = bitcast<f32>(select(0u, suffix_bits, has_suffix));
    let top = max(p, s);
    let below = exp_below(min(p, s), top);
    let sum = 1.0 + below; // 1 to 2
    let high = 1.0 / sum;
    let low = below * high;
    let prefix_is_top = p >= s;
    let both = has_prefix & has_suffix;
    let by = params.output_scale;
    // Alone, a side has all of the weight; an empty side is read as zeros.
    let of_prefix = select(1.0, select(low, high, prefix_is_top), both) * by;
    let of_suffix = select(1.0, select(high, low, prefix_is_top), both) * by;
    return Weights(has_prefix, has_suffix, !both & (by == 1.0), of_prefix, of_suffix, top, sum);
}

// called once a row; prefix_bits and suffix_bits are those of `weigh`
fn write_lse(token: u32, head: u32, prefix_bits: u32, suffix_bits: u32, w: Weights) {
    if params.writes_lse != 0u {
        var lse = 0xFF800000u;
        if w.has_prefix & w.has_suffix {
            lse = bitcast<u32>(w.top + log(w.sum));
        } else if w.has_prefix {
            lse = prefix_bits;
        } else if w.has_suffix {
            lse = suffix_bits;
        }
        output_lse[at(params.output_lse, token, head)] = lse;
    }
}
