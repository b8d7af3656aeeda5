// Sums the LANES partial dot products of a score through workgroup memory, on any device: variant `shared`. A quad is four tokens.
var<workgroup> scores: array<vec4<f32>, SCORE_PARTIALS>; // [LANES, ROWS, TOKEN_QUADS], four tokens each

fn publish_scores(quad: u32, lane: u32, partial: vec4<f32>) {
    scores[lane * TILE_QUADS + quad] = partial;
}

// Four tokens' scores of a row; the caller has had a barrier since publish_scores.
fn summed_scores(quad: u32) -> vec4<f32> {
    var sum = scores[quad];
    for (var lane = 1u; lane < LANES; lane++) {
        sum += scores[lane * TILE_QUADS + quad];
    }
    return sum;
}
