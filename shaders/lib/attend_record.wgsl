// Scores, softmax and values of mla_decode_coop.wgsl for a cache of records: e4m3 codes, with an f32 scale for each group of a token's
// columns. lib/attend_plain.wgsl is the alternative, for a cache of one dtype.
//
// Codes are staged as f16 without their scales, which is exact, and scales are applied in f32, whatever they are:
//   scores   a share of the columns is SHARE_GROUPS groups, each with a partial score, so that one has one scale: score = rope + sum_g
//            scale_g * score_g. The rotary columns have none; their scores are a plane of their own, by one share of each band of rows
//   values   a subgroup owns columns of one group, and takes weights that are multiplied by that group's scales
// f16 holds such products from 2^-24 to 65504, so they are divided by 2^reference: a row's reference is an exponent that is at least
// that of each scale which the row has seen. Where a scale exceeds it, the output is rescaled and the block repeated, as where a maximum
// moves. It is a row's own, as the maximum is, so that no bit of a row depends on the others. A weight below 2^LAZY times less than 2 is
// below 2^15; one of a token whose scales are 2^-20 of the largest loses what is below 2^-22 of the largest latent.
//
// The weights lie where the rotary columns of the keys were, [16 rows, GROUPS, TOKENS], and those of rows past 16 in `weights`. So a
// block that is repeated has no rotary columns: its plane of their scores, which nothing overwrites, is taken again.
//
// Concatenated with: lib/key_record, lib/row_lanes, lib/decode_queries, mla_decode_coop. Constants: src/gpu/kernels/decode/coop.rs.

var<workgroup> scales: array<vec4<f32>, TOKENS>; // [TOKENS, GROUPS]; 0 where there is no token

const REFERENCE_SLACK = 2u; // how far above the largest scale a reference is set, so that it is seldom moved
const LEAST_REFERENCE = 32u; // so that the factor of a finished row is a normal number

// Stages a unit of 16 codes, as two octs. Half of the threads have the second one first: else every other oct is stored at a time, and
// banks conflict.
fn stage_codes(thread: u32, at: u32, codes: vec4<u32>) {
    let second = thread / 4u % 2u;
    let octs = select(codes, codes.zwxy, second == 1u);
    keys[at + second] = half_key(octs.xy);
    keys[at + 1u - second] = half_key(octs.zw);
}

// Stages a unit of what is behind a token's codes: its scales, or an oct of its rotary part.
fn stage_unit(token: u32, unit: u32, bits: RopeOct) {
    if (unit == 0u) {
        scales[token] = bitcast<vec4<f32>>(bits);
    } else {
        keys[token * KEY_PITCH + LATENT_OCTS + unit - 1u] = half_rope(bits);
    }
}

// Whether a subgroup has the rotary columns of its rows: in each band of rows one share does, another one in the next, so that no
// scheduler of a multiprocessor has them all.
fn has_rotary_columns(subgroup: u32) -> bool {
    return ROPE_OCTS > 0u && subgroup % KEY_SPLIT == subgroup / KEY_SPLIT * KEY_SPLIT / 4u % KEY_SPLIT;
}

// 1. The subgroup's partial scores.
fn score(queries: ptr<function, array<MatrixA, QUERY_TILES>>, worker: Worker, has_rope: bool) {
    for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
        let first_key = t * TILE * KEY_PITCH;
        let first_quad = worker.score_row * SCORE_QUADS + t * TILE_OCTS * 2u;
        for (var g = 0u; g < SHARE_GROUPS; g++) { // unroll
            var sums = array<MatrixC, SCORE_CHAINS>();
            for (var k = 0u; k < GROUP_TILES; k++) { // unroll
                let key = coopLoad<MatrixB>(&keys[first_key + key_oct(worker.key_share, g * GROUP_TILES + k)].low, KEY_PITCH * 2u);
                for (var r = 0u; r < QUERY_ROWS; r++) { // unroll
                    sums[r % SCORE_ROW_TILES] = coopMultiplyAdd((*queries)[r * KEY_TILES + g * GROUP_TILES + k], key, sums[r % SCORE_ROW_TILES]);
                }
            }
            for (var r = 0u; r < SCORE_ROW_TILES; r++) { // unroll
                let at = first_quad + ((worker.key_share * SHARE_GROUPS + g) * ROWS + r * TILE) * SCORE_QUADS;
                coopStoreT(sums[r], &scores[at], SCORE_QUADS);
            }
        }
        if (has_rope) {
            var sums = array<MatrixC, SCORE_CHAINS>();
            for (var k = 0u; k < ROPE_KEY_TILES; k++) { // unroll
                let key = coopLoad<MatrixB>(&keys[first_key + key_oct(0u, LATENT_KEY_TILES + k)].low, KEY_PITCH * 2u);
                for (var r = 0u; r < QUERY_ROWS; r++) { // unroll
                    sums[r % SCORE_ROW_TILES] = coopMultiplyAdd((*queries)[r * KEY_TILES + LATENT_KEY_TILES + k], key, sums[r % SCORE_ROW_TILES]);
                }
            }
            for (var r = 0u; r < SCORE_ROW_TILES; r++) { // unroll
                let at = first_quad + (GROUPS * ROWS + r * TILE) * SCORE_QUADS;
                coopStoreT(sums[r], &scores[at], SCORE_QUADS);
            }
        }
    }
}

// 2. This lane's weights of a block, and their sum. The lane has SOFTMAX_QUADS quads, of 4 consecutive tokens; of the lanes of a row, those
// from QUAD_LANES on have none.
fn weigh(softmax: ptr<function, Softmax>, worker: Worker, block: u32) -> f32 {
    let column = min(worker.column, QUAD_LANES - 1u);
    var logit: array<vec4<f32>, SOFTMAX_QUADS>;
    var top = EMPTY;
    var largest_scale = 0.0;
    for (var q = 0u; q < SOFTMAX_QUADS; q++) { // unroll
        let quad = column * SOFTMAX_QUADS + q;
        let at = worker.row * SCORE_QUADS + quad;
        let scale = scales_of(quad);
        var sum = vec4<f32>(0.0);
        for (var g = 0u; g < GROUPS; g++) { // unroll
            sum += scale[g] * scores[g * ROWS * SCORE_QUADS + at];
        }
        sum *= KEY_UNIT;
        if (ROPE_OCTS > 0u) {
            sum += scores[GROUPS * ROWS * SCORE_QUADS + at];
        }
        sum *= (*softmax).scale;
        let bits = bitcast<vec4<u32>>(sum) & vec4<u32>(0x7FFFFFFFu);
        (*softmax).largest = max((*softmax).largest, max(max(bits.x, bits.y), max(bits.z, bits.w)));
        let token = vec4<u32>(block + 4u * quad - (*softmax).kv_begin) + vec4<u32>(0u, 1u, 2u, 3u);
        let seen = (token < vec4<u32>((*softmax).num_seen)) & (scale[0] > vec4<f32>(0.0)) & vec4<bool>(worker.column < QUAD_LANES);
        logit[q] = select(vec4<f32>(EMPTY), sum, seen);
        top = max(top, max(max(logit[q].x, logit[q].y), max(logit[q].z, logit[q].w)));
        let of_tokens = select(vec4<f32>(0.0), max(max(scale[0], scale[1]), max(scale[2], scale[3])), seen);
        largest_scale = max(largest_scale, max(max(of_tokens.x, of_tokens.y), max(of_tokens.z, of_tokens.w)));
    }
    (*softmax).old_top = (*softmax).top;
    (*softmax).old_reference = (*softmax).reference;
    // Lanes of a row compare maxima only where one of the subgroup's grew by more than LAZY, or a scale past the row's reference.
    if (subgroupAny(top > (*softmax).top + LAZY || bitcast<u32>(largest_scale) >> 23u > (*softmax).reference)) {
        top = row_largest(top);
        let exponent = bitcast<u32>(row_largest(largest_scale)) >> 23u;
        let moves = top > (*softmax).top + LAZY;
        let exceeds = exponent > (*softmax).reference;
        if (moves) {
            (*softmax).top = top;
        }
        if (exceeds) {
            (*softmax).reference = max(exponent + REFERENCE_SLACK, LEAST_REFERENCE);
        }
        if ((moves || exceeds) && (*softmax).old_top > EMPTY) {
            atomicStore(&notes[MOVED], 1u);
        }
    }
    let inverse = bitcast<f32>((254u - (*softmax).reference) << 23u);
    var block_sum = 0.0;
    for (var q = 0u; q < SOFTMAX_QUADS; q++) { // unroll
        // A logit as low as EMPTY that is seen counts as infinite, and is found by its magnitude.
        let seen = logit[q] > vec4<f32>(EMPTY);
        let weight = select(vec4<f32>(0.0), exp2(logit[q] - vec4<f32>((*softmax).top)), seen);
        block_sum += (weight.x + weight.y) + (weight.z + weight.w);
        if (worker.column < QUAD_LANES) {
            let quad = column * SOFTMAX_QUADS + q;
            let scale = scales_of(quad);
            for (var g = 0u; g < GROUPS; g++) { // unroll
                let scaled = select(vec4<f32>(0.0), weight * (scale[g] * inverse), seen);
                put_weights(worker.row, quad, g, vec4<f16>(scaled));
            }
        }
    }
    return block_sum;
}

// The scales of a quad of tokens, a column a group.
fn scales_of(quad: u32) -> mat4x4<f32> {
    return transpose(mat4x4<f32>(scales[4u * quad], scales[4u * quad + 1u], scales[4u * quad + 2u], scales[4u * quad + 3u]));
}

// Stores the weights of a quad of tokens for a group.
fn put_weights(row: u32, quad: u32, group: u32, weight: vec4<f16>) {
    let oct = group * TOKEN_OCTS + quad / 2u;
    if (row < WEIGHTS_IN_KEYS) {
        let at = row * KEY_PITCH + LATENT_OCTS + oct;
        if (quad % 2u == 0u) {
            keys[at].low = weight;
        } else {
            keys[at].high = weight;
        }
    } else {
        let at = (row - WEIGHTS_IN_KEYS) * WEIGHT_PITCH + oct;
        if (quad % 2u == 0u) {
            weights[at].low = weight;
        } else {
            weights[at].high = weight;
        }
    }
}

// 3. Adds the block's codes by their weights to the subgroup's output.
fn add_values(acc: ptr<function, array<MatrixC, ACC_TILES>>, subgroup: u32) {
    let group_oct = subgroup * LATENT_TILES / GROUP_TILES * TOKEN_OCTS;
    var weight: array<MatrixA, WEIGHT_TILES>; // [TOKEN_TILES, ROW_TILES]
    for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
        for (var r = 0u; r < ROW_TILES; r++) { // unroll
            let oct = group_oct + t * TILE_OCTS;
            if (r * TILE < WEIGHTS_IN_KEYS) {
                weight[t * ROW_TILES + r] = coopLoadT<MatrixA>(&keys[r * TILE * KEY_PITCH + LATENT_OCTS + oct].low, KEY_PITCH * 2u);
            } else {
                let at = (max(r * TILE, WEIGHTS_IN_KEYS) - WEIGHTS_IN_KEYS) * WEIGHT_PITCH + oct;
                weight[t * ROW_TILES + r] = coopLoadT<MatrixA>(&weights[at].low, WEIGHT_PITCH * 2u);
            }
        }
    }
    for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
        for (var c = 0u; c < LATENT_TILES; c++) { // unroll
            let at = t * TILE * KEY_PITCH + (subgroup * LATENT_TILES + c) * TILE_OCTS;
            let value = coopLoadT<MatrixB>(&keys[at].low, KEY_PITCH * 2u);
            for (var r = 0u; r < ROW_TILES; r++) { // unroll
                (*acc)[r * LATENT_TILES + c] = coopMultiplyAdd(weight[t * ROW_TILES + r], value, (*acc)[r * LATENT_TILES + c]);
            }
        }
    }
}

// Rescales a lane's sum by its row's new maximum, and publishes the factor of the row's output: that, and by its new reference. What
// else has moved leaves both as they are: by exactly 1.
fn rescale_sum(softmax: ptr<function, Softmax>, worker: Worker) {
    let factor = exp2((*softmax).old_top - (*softmax).top);
    (*softmax).sum *= factor;
    if (worker.column == 0u) {
        let steps = min((*softmax).reference - (*softmax).old_reference, 127u);
        factors[worker.row] = factor * bitcast<f32>((127u - steps) << 23u);
    }
}

// Multiplies a tile of the output, which is in scratch, by the factors of its rows.
fn rescale_tile(worker: Worker, first_row: u32) {
    for (var i = worker.lane; i < TILE * TILE_OCTS * 2u; i += SUBGROUP) {
        scores[worker.scratch + i] *= factors[first_row + i / (TILE_OCTS * 2u)];
    }
}
