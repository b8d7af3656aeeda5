// Attention of a tile of query rows of one head over the keys that they see, in f32: runs everywhere.
//
// The threads are 16 x 16: a thread owns 4 * ROW_QUADS rows (`ty` says which) and, of each block of TOKENS keys, 4 * KEY_QUADS keys, later
// 4 * COLUMN_QUADS columns of the output (`tx`). Everything that threads share goes through one array of workgroup memory, in turns:
//   1. scores   slices of DEPTH columns of queries and keys, transposed, so that a vec4 is four rows, or four keys, of one column. Where
//               inputs are f32, the sums of DEPTH_TURN columns are added up apart: large logits need all their digits
//   2. softmax  each thread's maxima; every thread then knows its rows' maxima, and keeps sums over its own keys until the end
//   3. values   slices of SLICE_KEYS keys: the weights, again four rows a vec4, and the values
// Keys past the last one that the tile sees repeat it and weigh 0.
var<workgroup> staged: array<vec4<f32>, STAGED>;

const TILE_QUADS = 16u * ROW_QUADS; // quads of rows
const KEYS_AT = DEPTH * TILE_QUADS; // in `staged`, behind the queries
const BLOCK_QUADS = 16u * KEY_QUADS;
const VALUES_AT = SLICE_KEYS * TILE_QUADS; // behind the weights
const VALUE_QUADS = 16u * COLUMN_QUADS; // of a row of values, the columns past V zeros

// Four elements of a query row or of a key, from quad `quad` on; none are left behind P + R.
fn query_quad(tile: Tile, token: u32, quad: u32) -> vec4<f32> {
    if (quad < NOPE_QUADS) {
        return decode_quad(q_nope[params.q_nope_at + token * params.q_nope_token_stride + tile.head * params.q_nope_head_stride + quad]);
    }
    if (quad < NOPE_QUADS + ROPE_QUADS) {
        let at = params.q_pe_at + token * params.q_pe_token_stride + tile.head * params.q_pe_head_stride;
        return decode_quad(q_pe[at + quad - NOPE_QUADS]);
    }
    return vec4<f32>(0.0);
}

fn key_quad(tile: Tile, key: u32, quad: u32) -> vec4<f32> {
    if (quad < NOPE_QUADS) {
        return decode_quad(k_nope[params.k_nope_at + key * params.k_nope_token_stride + tile.head * params.k_nope_head_stride + quad]);
    }
    if (quad < NOPE_QUADS + ROPE_QUADS) {
        let at = params.k_pe_at + key * params.k_pe_token_stride + tile.head * params.k_pe_head_stride;
        return decode_quad(k_pe[at + quad - NOPE_QUADS]);
    }
    return vec4<f32>(0.0);
}

// Four columns of four rows, turned around, to column `column` of `rows` quads of rows from `at` on.
fn stage_turned(at: u32, rows: u32, column: u32, row_quad: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) {
    staged[at + column * rows + row_quad] = vec4<f32>(a.x, b.x, c.x, d.x);
    staged[at + (column + 1u) * rows + row_quad] = vec4<f32>(a.y, b.y, c.y, d.y);
    staged[at + (column + 2u) * rows + row_quad] = vec4<f32>(a.z, b.z, c.z, d.z);
    staged[at + (column + 3u) * rows + row_quad] = vec4<f32>(a.w, b.w, c.w, d.w);
}

fn stage_slice(tile: Tile, block: u32, slice: u32, lane: u32) {
    for (var i = lane; i < (TILE_QUADS + BLOCK_QUADS) * (DEPTH / 4u); i += GROUP) {
        // Neighbouring lanes take neighbouring rows: what they store lies side by side.
        if (i < TILE_QUADS * (DEPTH / 4u)) {
            let row_quad = i % TILE_QUADS;
            let column = i / TILE_QUADS;
            let quad = slice * (DEPTH / 4u) + column;
            let a = query_quad(tile, token_of(tile, row_quad * 4u), quad);
            let b = query_quad(tile, token_of(tile, row_quad * 4u + 1u), quad);
            let c = query_quad(tile, token_of(tile, row_quad * 4u + 2u), quad);
            let d = query_quad(tile, token_of(tile, row_quad * 4u + 3u), quad);
            stage_turned(0u, TILE_QUADS, column * 4u, row_quad, a, b, c, d);
        } else {
            let k = i - TILE_QUADS * (DEPTH / 4u);
            let row_quad = k % BLOCK_QUADS;
            let column = k / BLOCK_QUADS;
            let quad = slice * (DEPTH / 4u) + column;
            let a = key_quad(tile, key_of(tile, block + row_quad * 4u), quad);
            let b = key_quad(tile, key_of(tile, block + row_quad * 4u + 1u), quad);
            let c = key_quad(tile, key_of(tile, block + row_quad * 4u + 2u), quad);
            let d = key_quad(tile, key_of(tile, block + row_quad * 4u + 3u), quad);
            stage_turned(KEYS_AT, BLOCK_QUADS, column * 4u, row_quad, a, b, c, d);
        }
    }
}

fn stage_values(tile: Tile, first_key: u32, lane: u32) {
    for (var i = lane; i < SLICE_KEYS * VALUE_QUADS; i += GROUP) {
        let quad = i % VALUE_QUADS;
        var value = vec4<f32>(0.0);
        if (quad < V_QUADS) {
            let key = key_of(tile, first_key + i / VALUE_QUADS);
            value = decode_quad(v[params.v_at + key * params.v_token_stride + tile.head * params.v_head_stride + quad]);
        }
        staged[VALUES_AT + i] = value;
    }
}

// Over the 16 threads that share rows; a barrier is before and after.
fn largest_of_rows(own: vec4<f32>, row_quad: u32, tx: u32) -> vec4<f32> {
    var largest = own;
    for (var x = 0u; x < 16u; x++) {
        largest = max(largest, staged[row_quad * 16u + x]);
    }
    return largest;
}

@compute @workgroup_size(GROUP)
fn mla_prefill(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = group.y * groups.x + group.x;
    if (number >= table[0] * NUM_HEADS) {
        return;
    }
    let tile = tile_of(number);
    // Eight by four of them side by side, so that a subgroup reads few different places of `staged` at once.
    let tx = lane % 8u + lane / 32u % 2u * 8u;
    let ty = lane / 8u % 4u + lane / 64u * 4u;

    var visible: array<vec4<u32>, ROW_QUADS>;
    var row_max: array<vec4<f32>, ROW_QUADS>;
    var row_sum: array<vec4<f32>, ROW_QUADS>; // over this thread's keys only
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        let row = (r * 16u + ty) * 4u;
        visible[r] = vec4<u32>(visible_to(tile, row), visible_to(tile, row + 1u), visible_to(tile, row + 2u), visible_to(tile, row + 3u));
        row_max[r] = vec4<f32>(EMPTY);
        row_sum[r] = vec4<f32>(0.0);
    }
    var acc = array<vec4<f32>, ACC>(); // [4 * COLUMN_QUADS, ROW_QUADS]: four rows of a column

    for (var block = 0u; block < tile.num_keys; block += TOKENS) {
        // 1. scores
        var score = array<vec4<f32>, SCORES>(); // [4 * KEY_QUADS, ROW_QUADS]: four rows of a key
        for (var slice = 0u; slice < SLICES; slice++) {
            workgroupBarrier();
            stage_slice(tile, block, slice, lane);
            workgroupBarrier();
            for (var d = 0u; d < DEPTH; d += DEPTH_TURN) {
                let before = score;
                if (SUMS_APART != 0u) {
                    score = array<vec4<f32>, SCORES>();
                }
                for (var e = 0u; e < DEPTH_TURN; e++) { // unroll on cards
                    var query: array<vec4<f32>, ROW_QUADS>;
                    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                        query[r] = staged[(d + e) * TILE_QUADS + r * 16u + ty];
                    }
                    for (var k = 0u; k < KEY_QUADS; k++) { // unroll
                        let key = staged[KEYS_AT + (d + e) * BLOCK_QUADS + k * 16u + tx];
                        for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                            score[(k * 4u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.x), score[(k * 4u) * ROW_QUADS + r]);
                            score[(k * 4u + 1u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.y), score[(k * 4u + 1u) * ROW_QUADS + r]);
                            score[(k * 4u + 2u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.z), score[(k * 4u + 2u) * ROW_QUADS + r]);
                            score[(k * 4u + 3u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.w), score[(k * 4u + 3u) * ROW_QUADS + r]);
                        }
                    }
                }
                if (SUMS_APART != 0u) {
                    for (var i = 0u; i < SCORES; i++) { // unroll
                        score[i] += before[i];
                    }
                }
            }
        }

        // 2. softmax
        var top: array<vec4<f32>, ROW_QUADS>;
        for (var r = 0u; r < ROW_QUADS; r++) { // unroll
            top[r] = row_max[r];
            for (var k = 0u; k < KEYS_OF_THREAD; k++) { // unroll
                let seen = vec4<u32>(block + (k / 4u * 16u + tx) * 4u + k % 4u) < visible[r];
                top[r] = max(top[r], select(vec4<f32>(EMPTY), score[k * ROW_QUADS + r] * params.logit_scale, seen));
            }
        }
        workgroupBarrier();
        for (var r = 0u; r < ROW_QUADS; r++) { // unroll
            staged[(r * 16u + ty) * 16u + tx] = top[r];
        }
        workgroupBarrier();
        for (var r = 0u; r < ROW_QUADS; r++) { // unroll
            let new_max = largest_of_rows(top[r], r * 16u + ty, tx);
            let old = row_max[r];
            let factor = vec4<f32>(exp2_exact(old.x - new_max.x), exp2_exact(old.y - new_max.y), exp2_exact(old.z - new_max.z), exp2_exact(old.w - new_max.w));
            row_max[r] = new_max;
            row_sum[r] *= factor;
            for (var c = 0u; c < COLUMNS_OF_THREAD; c++) { // unroll
                acc[c * ROW_QUADS + r] *= factor;
            }
            for (var k = 0u; k < KEYS_OF_THREAD; k++) { // unroll
                let seen = vec4<u32>(block + (k / 4u * 16u + tx) * 4u + k % 4u) < visible[r];
                // The product is not rounded before the subtraction: large logits lose nothing more than the dot has lost.
                let exponent = fma(score[k * ROW_QUADS + r], vec4<f32>(params.logit_scale), -new_max);
                score[k * ROW_QUADS + r] = select(vec4<f32>(0.0), exp2(select(vec4<f32>(0.0), exponent, seen)), seen);
                row_sum[r] += score[k * ROW_QUADS + r];
            }
        }

        // 3. values
        for (var k = 0u; k < KEY_QUADS; k++) { // unroll
            for (var part = 0u; part < 64u / SLICE_KEYS; part++) {
                workgroupBarrier();
                if (tx / (SLICE_KEYS / 4u) == part) {
                    for (var i = 0u; i < 4u; i++) { // unroll
                        for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                            staged[(tx % (SLICE_KEYS / 4u) * 4u + i) * TILE_QUADS + r * 16u + ty] = score[(k * 4u + i) * ROW_QUADS + r];
                        }
                    }
                }
                stage_values(tile, block + k * 64u + part * SLICE_KEYS, lane);
                workgroupBarrier();
                for (var key = 0u; key < SLICE_KEYS; key += VALUE_TURN) {
                    for (var e = 0u; e < VALUE_TURN; e++) { // unroll on cards
                        var weight: array<vec4<f32>, ROW_QUADS>;
                        for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                            weight[r] = staged[(key + e) * TILE_QUADS + r * 16u + ty];
                        }
                        for (var c = 0u; c < COLUMN_QUADS; c++) { // unroll
                            let value = staged[VALUES_AT + (key + e) * VALUE_QUADS + c * 16u + tx];
                            for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                                acc[(c * 4u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.x), acc[(c * 4u) * ROW_QUADS + r]);
                                acc[(c * 4u + 1u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.y), acc[(c * 4u + 1u) * ROW_QUADS + r]);
                                acc[(c * 4u + 2u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.z), acc[(c * 4u + 2u) * ROW_QUADS + r]);
                                acc[(c * 4u + 3u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.w), acc[(c * 4u + 3u) * ROW_QUADS + r]);
                            }
                        }
                    }
                }
            }
        }
    }

    // Each row's sum, for all threads that have columns of it.
    workgroupBarrier();
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        staged[(r * 16u + ty) * 16u + tx] = row_sum[r];
    }
    workgroupBarrier();
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        var sum = vec4<f32>(0.0);
        for (var x = 0u; x < 16u; x++) {
            sum += staged[(r * 16u + ty) * 16u + x];
        }
        let any = sum > vec4<f32>(0.0);
        let divisor = select(vec4<f32>(1.0), sum, any);
        let factor = vec4<f32>(1.0) / divisor;
        let base_2 = row_max[r] + log2(divisor);
        for (var i = 0u; i < 4u; i++) { // unroll
            let row = (r * 16u + ty) * 4u + i;
            if (row < tile.num_rows) {
                for (var c = 0u; c < COLUMN_QUADS; c++) { // unroll
                    if (c * 16u + tx < V_QUADS) {
                        let value = vec4<f32>(acc[(c * 4u) * ROW_QUADS + r][i], acc[(c * 4u + 1u) * ROW_QUADS + r][i], acc[(c * 4u + 2u) * ROW_QUADS + r][i], acc[(c * 4u + 3u) * ROW_QUADS + r][i]);
                        store_quad(tile, row, c * 16u + tx, value * factor[i]);
                    }
                }
                if (tx == 0u) {
                    store_lse(tile, row, select(EMPTY, base_2[i], any[i]), any[i]);
                }
            }
        }
    }
}
