// Attention sinks: a logit for each head that takes part in the softmax and has no value. lib/no_sinks.wgsl is the alternative.
const SINKS = true;

@group(0) @binding(8) var<uniform> sinks: array<vec4<f32>, 32>; // [H], in base 2; -1e38 for -inf and 1e38 for +inf

// The share of a finished row's weight that its keys have: 1 / (1 + 2^(sink - lse)), with the row's LSE in base 2.
fn share_of_keys(head: u32, lse: f32) -> f32 {
    let above = sinks[head / 4u][head % 4u] - lse;
    // Without infinities; exactly 1 where the sink weighs nothing, and 0 where it is all.
    let weight = exp2(clamp(above, -126.0, 126.0));
    return select(select(1.0 / (1.0 + weight), 1.0, above < -60.0), 0.0, above > 126.0);
}
