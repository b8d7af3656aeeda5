// How the LANES partial dot products of a score are summed: by shuffles inside a subgroup of at least LANES lanes.
var<workgroup> scores: array<vec4<f32>, TILE_QUADS>; // [ROWS, TOKEN_QUADS], four tokens each

fn publish_scores(quad: u32, lane: u32, partial: vec4<f32>) {
    var sum = partial + subgroupShuffleXor(partial, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    sum += subgroupShuffleXor(sum, 4u);
    if (lane == 0u) {
        scores[quad] = sum;
    }
}

// After a barrier.
fn summed_scores(quad: u32) -> vec4<f32> {
    return scores[quad];
}
