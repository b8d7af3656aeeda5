// How the LANES partial dot products of a score are summed: by shuffles inside a subgroup of at least LANES lanes.
var<workgroup> scores: array<f32, TILE_TOKENS>; // [ROWS, TOKENS]

// Eight lanes have four sums to share: each gives half of its tokens away, then half of the rest, so that 4 shuffles do
// the work of 12. Every token is summed in the same order.
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

// After a barrier.
fn summed_scores(quad: u32) -> vec4<f32> {
    let at = quad * 4u;
    return vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]);
}
