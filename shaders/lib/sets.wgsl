// What both shaders of merge_states share: parameters and weights.

// Element (set, token, head, 0) of an array is at offset + set * set_stride + token * token_stride + head * head_stride.
struct SetStrides {
    offset: u32,
    set_stride: u32,
    token_stride: u32,
    head_stride: u32,
}

struct MergeSetsParams {
    // states and the output in the shader's unit (quads or elements), LSEs in elements
    states: SetStrides,
    lse: SetStrides,
    output: SetStrides,
    output_lse: SetStrides,
    max_tokens: u32, // at least 1
    max_sets: u32, // at least 1
    num_heads: u32,
    writes_lse: u32,
    ln_base: f32, // of the base that LSEs are in: 1 or ln 2
    per_ln: f32, // its reciprocal
    // only for the shader by words: the words of the output, and how to find the row of one of its elements
    first_word: u32,
    num_words: u32,
    inner_is_token: u32,
    inner_stride: u32,
    outer_stride: u32,
    output_scale: f32,
}

const NOTHING = 0xFF800000u; // -inf, the LSE of an empty set
const LOWEST = 0xFF7FFFFFu; // the lowest finite f32

fn at(s: SetStrides, number: u32, token: u32, head: u32) -> u32 {
    return s.offset + number * s.set_stride + token * s.token_stride + head * s.head_stride;
}

// Whether an LSE, by its bits, is of a set that is not empty. WGSL lets a shader assume that no infinity and no NaN exists.
fn weighs(lse_bits: u32) -> bool {
    return (lse_bits & F32_INF) != F32_INF;
}

// base^(x - top), exactly 1 where both are equal. Halving first keeps the difference of any two finite values finite; below -200 it
// underflows to 0 in either base.
fn exp_below(x: f32, top: f32) -> f32 {
    return select(exp(params.ln_base * (2.0 * max(0.5 * x - 0.5 * top, -100.0))), 1.0, x == top);
}
