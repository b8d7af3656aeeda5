// Scores, softmax and values of mla_decode_coop.wgsl for a cache of one dtype. lib/attend_record.wgsl is the alternative, for records.
// Concatenated with: lib/tokens or lib/listed, lib/row_lanes, lib/decode_queries, mla_decode_coop. Constants:
// src/gpu/kernels/decode/coop.rs.

// 1. The subgroup's partial scores.
fn score(queries: ptr<function, array<MatrixA, QUERY_TILES>>, worker: Worker) {
    for (var t = 0u; t < SCORE_TOKEN_TILES; t++) { // unroll
        let first_key = (worker.score_tile + t) * TILE * KEY_PITCH;
        var sums = array<MatrixC, SCORE_CHAINS>();
        for (var k = 0u; k < LATENT_KEY_TILES; k++) { // unroll
            let key = coopLoad<MatrixB>(&keys[first_key + key_oct(worker.key_share, k)].low, KEY_PITCH * 2u);
            for (var r = 0u; r < QUERY_ROWS; r++) { // unroll
                sums[r % SCORE_ROW_TILES * CHAINS + k % CHAINS] = coopMultiplyAdd((*queries)[r * KEY_TILES + k], key, sums[r % SCORE_ROW_TILES * CHAINS + k % CHAINS]);
            }
        }
        if (worker.has_rope) {
            for (var k = 0u; k < ROPE_KEY_TILES; k++) { // unroll
                let key = coopLoad<MatrixB>(&keys[first_key + key_oct(worker.key_share, LATENT_KEY_TILES + k)].low, KEY_PITCH * 2u);
                for (var r = 0u; r < QUERY_ROWS; r++) { // unroll
                    sums[r % SCORE_ROW_TILES * CHAINS + k % CHAINS] = coopMultiplyAdd((*queries)[r * KEY_TILES + LATENT_KEY_TILES + k], key, sums[r % SCORE_ROW_TILES * CHAINS + k % CHAINS]);
                }
            }
        }
        for (var r = 0u; r < SCORE_ROW_TILES; r++) { // unroll
            let at = ((worker.key_share * TOKEN_TILES + worker.score_tile + t) * ROWS + worker.score_row + r * TILE) * SCORE_PITCH;
            for (var more = 0u; more < MORE_CHAINS; more++) { // unroll
                sums[r * CHAINS] = sums[r * CHAINS] + sums[r * CHAINS + 1u + more];
            }
            coopStoreT(sums[r * CHAINS], &scores[at], SCORE_PITCH);
        }
    }
}

// 2. This lane's weights of a block, and their sum. `seen`, whether the row sees a token, is written out twice, its terms in this order:
// in another order or as a function, Mesa's compiler for NVIDIA (NVK) spills.
fn weigh(softmax: ptr<function, Softmax>, worker: Worker, block: u32) -> f32 {
    var logit: array<f32, SOFTMAX_TOKENS>;
    var top = EMPTY;
    for (var i = 0u; i < SOFTMAX_TOKENS; i++) { // unroll
        var sum = 0.0;
        for (var s = 0u; s < KEY_SPLIT; s++) { // unroll
            let tile = s * TOKEN_TILES + i * SOFTMAX_LANES / TILE;
            sum += scores[(tile * ROWS + worker.row) * SCORE_PITCH + i * SOFTMAX_LANES % TILE + worker.column];
        }
        sum *= (*softmax).scale;
        (*softmax).largest = max((*softmax).largest, bitcast<u32>(sum) & 0x7FFFFFFFu);
        let seen = block + i * SOFTMAX_LANES + worker.column - (*softmax).kv_begin < (*softmax).num_seen
            && was_token(i * SOFTMAX_LANES + worker.column);
        logit[i] = select(EMPTY, sum, seen);
        top = max(top, logit[i]);
    }
    (*softmax).old_top = (*softmax).top;
    // Lanes of a row compare maxima only where one of the subgroup's grew by more than LAZY.
    if (subgroupAny(top > (*softmax).top + LAZY)) {
        top = row_largest(top);
        if (top > (*softmax).top + LAZY) {
            (*softmax).top = top;
            if ((*softmax).old_top > EMPTY) {
                atomicStore(&notes[MOVED], 1u);
            }
        }
    }
    var block_sum = 0.0;
    for (var i = 0u; i < SOFTMAX_TOKENS; i++) { // unroll
        let seen = block + i * SOFTMAX_LANES + worker.column - (*softmax).kv_begin < (*softmax).num_seen
            && was_token(i * SOFTMAX_LANES + worker.column);
        let weight = select(0.0, exp2(logit[i] - (*softmax).top), seen);
        block_sum += weight;
        weights[worker.row * WEIGHT_PITCH + i * SOFTMAX_LANES + worker.column] = f16(weight);
    }
    return block_sum;
}

// 3. Adds the block's values by their weights to the subgroup's output.
fn add_values(acc: ptr<function, array<MatrixC, ACC_TILES>>, subgroup: u32) {
    var weight: array<MatrixA, WEIGHT_TILES>; // [TOKEN_TILES, ROW_TILES]
    for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
        for (var r = 0u; r < ROW_TILES; r++) { // unroll
            weight[t * ROW_TILES + r] = coopLoadT<MatrixA>(&weights[r * TILE * WEIGHT_PITCH + t * TILE], WEIGHT_PITCH);
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

// Rescales a lane's sum by its row's new maximum, and publishes the factor.
fn rescale_sum(softmax: ptr<function, Softmax>, worker: Worker) {
    let factor = exp2((*softmax).old_top - (*softmax).top);
    (*softmax).sum *= factor;
    if (worker.column == 0u) {
        factors[worker.row] = factor;
    }
}

// Multiplies a tile of the output, which is in scratch, by the factors of its rows.
fn rescale_tile(worker: Worker, first_row: u32) {
    for (var i = worker.lane; i < TILE * TILE; i += SUBGROUP) {
        scores[worker.scratch + i] *= factors[first_row + i / TILE];
    }
}
