// Sums the LANES partial dot products of a score by shuffles in a subgroup of at least LANES lanes: variant `subgroup`. A quad is four
// tokens.
var<workgroup> scores: array<f32, TILE_TOKENS>; // [ROWS, TOKENS]

// A transposing reduction over eight lanes: each lane gives half of its four tokens away, then half of the rest, so 4 shuffles do the work
// of 12. Every token is summed in the same order.
fn publish_scores(quad: u32, lane: u32, partial: vec4<f32>) {
    let second = (lane & 1u) != 0u;
    let two = select(partial.xy, partial.zw, second)
        + subgroupShuffleXor(select(partial.zw, partial.xy, second), 1u);
    let odd = (lane & 2u) != 0u;
    let one = select(two.x, two.y, odd) + subgroupShuffleXor(select(two.y, two.x, odd), 2u);
    let sum = one + subgroupShuffleXor(one, 4u);
    if (lane < 4u) {
        scores[quad * 4u + (lane & 1u) * 2u + (lane >> 1u)] = sum;
    }
}

// Four tokens' scores of a row; the caller has had a barrier since publish_scores.
fn summed_scores(quad: u32) -> vec4<f32> {
    let at = quad * 4u;
    return vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]);
}
