// The bindings of every variant of head_project but the output and the scales of weights. An oct is 8 consecutive elements; a WOct may be
// something else: see the lib/weight_* that is concatenated.
// Concatenated with: lib/round. Constants: aliases XOct, WOct.

struct ProjectParams {
    x_base: u32, // octs, as all bases and strides but where said
    x_token_stride: u32,
    x_head_stride: u32,
    y_base: u32,
    y_token_stride: u32,
    y_head_stride: u32,
    w_base: u32, // as w_head_stride and w_row_stride in the unit of the weights' format
    w_head_stride: u32,
    w_row_stride: u32,
    max_tokens: u32,
    scale: f32, // of the products
    limit: f32, // the largest magnitude that a finite product is stored with
    head_scale_base: u32, // f32 elements, where weights have scales
    head_scale_stride: u32,
    guard_row: u32, // as the next two where it counts what is lost: see lib/guard
    guard_flushed: u32,
    guard_top: u32,
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
    out_scale: E4m3Scale, // of an output in codes
}

struct TokenRange {
    first: u32,
    count: u32,
    reserved_0: u32,
    reserved_1: u32,
}

@group(0) @binding(0) var<uniform> range: TokenRange;
@group(1) @binding(0) var<uniform> params: ProjectParams;
@group(1) @binding(1) var<storage, read> x: array<XOct>; // [tokens, H, k / 8], strided
@group(1) @binding(2) var<storage, read> weight: array<WOct>; // [H, k, n / 8] or [H, n, k / 8], strided; or words of blocks

// Begin and end of the step's tokens. A step prepared again after this was recorded may have more than the binding's buffers hold.
fn step_tokens() -> vec2<u32> {
    let begin = min(range.first, params.max_tokens);
    return vec2<u32>(begin, begin + min(range.count, params.max_tokens - begin));
}

// A product's bits, as it is before it saturates.
fn product_bits(sum: vec4<f32>) -> vec4<u32> { // guarded
    return bitcast<vec4<u32>>(sum * params.scale); // guarded
} // guarded

// Scales and saturates a sum, as it is stored. Infinities and NaN are detected by their bits, and stay. A branch is cheapest, since few
// products are past the limit.
fn scaled(sum: vec4<f32>) -> vec4<f32> {
    let product = sum * params.scale;
    if !any(abs(product) > vec4<f32>(params.limit)) {
        return product;
    }
    let is_number = (bitcast<vec4<u32>>(product) & vec4<u32>(0x7F800000u)) != vec4<u32>(0x7F800000u);
    let limit = vec4<f32>(params.limit);
    return bitcast<vec4<f32>>(select(bitcast<vec4<u32>>(product), bitcast<vec4<u32>>(clamp(product, -limit, limit)), is_number));
}
