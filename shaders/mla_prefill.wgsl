// FlashAttention-style prefill in MLA's expanded form (ragged batch, causal): variant `shared`, in f32 without tensor cores, for every
// device.
//
//   out = softmax(scale * (q_nope . k_nope + q_pe . k_pe)) . v, lse, for one tile of query rows of one head
//
// Tile: 64 * ROW_QUADS query rows, looping over blocks of TOKENS keys. The 256 threads are a 16 x 16 grid: a thread owns 4 * ROW_QUADS
// rows (by `ty`), 4 * KEY_QUADS keys of each block, then 4 * COLUMN_QUADS output columns (by `tx`). `staged`, the only array in
// workgroup memory, is reused by the three phases of a block:
//   1. scores   slices of DEPTH columns of queries and keys, transposed: a vec4 is four rows, or four keys, of one column. For f32
//               inputs the partial sums of DEPTH_TURN columns are added up separately, for accuracy of large logits
//   2. softmax  online: row maxima are exchanged; row sums stay per thread, over its own keys, until the end
//   3. values   slices of SLICE_KEYS keys: weights, a vec4 of four rows, and values
// Keys past the last visible one of the tile repeat it and weigh 0. A quad is 4 consecutive elements.
//
// Lines under `if all f32`, or that end in `all f32`, are compiled where inputs and output are f32: values are summed in three levels, of
// VALUE_TURN keys, of TOTAL_TOKENS keys in `acc`, and of all these in totals, which lie where the output will be (lib/prefill_totals.wgsl).
//
// Measured on an H200: 24.6 TFLOP/s at head dims 128/64/128; other tiles in src/gpu/kernels/prefill/plain.rs.
// Concatenated with: lib/round, lib/quad_*, alias Unit = Quad, lib/out_*, lib/prefill, lib/row_end, lib/prefill_read.
// Constants: src/gpu/kernels/prefill/plain.rs.
var<workgroup> staged: array<vec4<f32>, STAGED>; // queries [DEPTH, TILE_QUADS] and keys [DEPTH, BLOCK_QUADS]; or see VALUES_AT

const TILE_QUADS = 16u * ROW_QUADS; // quads of rows
const KEYS_AT = DEPTH * TILE_QUADS; // offset of keys in `staged`, after the queries
const BLOCK_QUADS = 16u * KEY_QUADS;
const VALUES_AT = SLICE_KEYS * TILE_QUADS; // offset of values in `staged`, after the weights
const VALUE_QUADS = 16u * COLUMN_QUADS; // quads of a staged value; columns past V are zeros

// Quad `quad` of a query row, or of a key: nope, then rope, then zeros past P + R.
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

// Stores a 4 x 4 block transposed: columns `column` to `column` + 3 of quad `row_quad` of rows, in [columns, rows] from `at` on.
fn stage_turned(at: u32, rows: u32, column: u32, row_quad: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) {
    staged[at + column * rows + row_quad] = vec4<f32>(a.x, b.x, c.x, d.x);
    staged[at + (column + 1u) * rows + row_quad] = vec4<f32>(a.y, b.y, c.y, d.y);
    staged[at + (column + 2u) * rows + row_quad] = vec4<f32>(a.z, b.z, c.z, d.z);
    staged[at + (column + 3u) * rows + row_quad] = vec4<f32>(a.w, b.w, c.w, d.w);
}

fn stage_slice(tile: Tile, block: u32, slice: u32, lane: u32) {
    for (var i = lane; i < (TILE_QUADS + BLOCK_QUADS) * (DEPTH / 4u); i += GROUP) {
        // Consecutive threads take consecutive rows, so their stores are consecutive: no bank conflicts.
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

// The row maxima over the 16 threads that share rows; barriers are the caller's.
fn largest_of_rows(own: vec4<f32>, row_quad: u32) -> vec4<f32> {
    var largest = own;
    for (var x = 0u; x < 16u; x++) {
        largest = max(largest, staged[row_quad * 16u + x]);
    }
    return largest;
}

// A thread's place in the 16 x 16 grid. A subgroup of 32 is 8 x 4 of it, so that its reads of `staged` hit few distinct addresses: the rest
// are broadcasts.
struct Worker {
    tx: u32,
    ty: u32,
}

// A thread's state of its rows, a vec4 of four rows each.
struct Softmax {
    visible: array<vec4<u32>, ROW_QUADS>,
    top: array<vec4<f32>, ROW_QUADS>, // the rows' largest logits
    sum: array<vec4<f32>, ROW_QUADS>, // of weights, over this thread's keys only
    total_top: array<vec4<f32>, ROW_QUADS>, // all f32
    total_sum: array<vec4<f32>, ROW_QUADS>, // all f32
}

// No function that is called in a loop has a barrier: that deadlocked on a driver.
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
    let worker = Worker(lane % 8u + lane / 32u % 2u * 8u, lane / 8u % 4u + lane / 64u * 4u);
    var softmax: Softmax;
    begin_softmax(&softmax, tile, worker);
    var acc = array<vec4<f32>, ACC>(); // [4 * COLUMN_QUADS, ROW_QUADS]: four rows of a column

    // Where ROLLED, always the same too, but the compiler cannot know: Mesa's for Intel would unroll the loops, and spill.
    let depth = select(DEPTH, min(DEPTH, tile.num_keys | DEPTH), ROLLED != 0u);
    let slice_keys = select(SLICE_KEYS, min(SLICE_KEYS, tile.num_keys | SLICE_KEYS), ROLLED != 0u);
    for (var block = 0u; block < tile.num_keys; block += TOKENS) {
        // 1. scores
        var score = array<vec4<f32>, SCORES>(); // [4 * KEY_QUADS, ROW_QUADS]: four rows of a key
        for (var slice = 0u; slice < SLICES; slice++) {
            workgroupBarrier();
            stage_slice(tile, block, slice, lane);
            workgroupBarrier();
            add_scores(&score, worker, depth);
        }

        // 2. softmax
        var top: array<vec4<f32>, ROW_QUADS>;
        largest_of_thread(&top, &softmax, &score, worker, block);
        workgroupBarrier();
        publish(&top, worker);
        workgroupBarrier();
        weigh(&score, &softmax, &acc, &top, worker, block);

        // 3. values
        for (var k = 0u; k < KEY_QUADS; k++) { // unroll
            for (var part = 0u; part < 64u / SLICE_KEYS; part++) {
                workgroupBarrier();
                if (worker.tx / (SLICE_KEYS / 4u) == part) {
                    for (var i = 0u; i < 4u; i++) { // unroll
                        for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                            staged[(worker.tx % (SLICE_KEYS / 4u) * 4u + i) * TILE_QUADS + r * 16u + worker.ty] = score[(k * 4u + i) * ROW_QUADS + r];
                        }
                    }
                }
                stage_values(tile, block + k * 64u + part * SLICE_KEYS, lane);
                workgroupBarrier();
                add_values(&acc, worker, slice_keys);
            }
        }
        if (ends_total(tile, block)) { // all f32
            end_total(&softmax, &acc, tile, worker, block); // all f32
        } // all f32
    }

    var sum = softmax.sum; // as naga's SPIR-V passes no pointer to a member
    workgroupBarrier();
    publish(&sum, worker);
    workgroupBarrier();
    finish(&softmax, &acc, tile, worker);
}

fn begin_softmax(softmax: ptr<function, Softmax>, tile: Tile, worker: Worker) {
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        let row = (r * 16u + worker.ty) * 4u;
        (*softmax).visible[r] = vec4<u32>(visible_to(tile, row), visible_to(tile, row + 1u), visible_to(tile, row + 2u), visible_to(tile, row + 3u));
        (*softmax).top[r] = vec4<f32>(EMPTY);
        (*softmax).sum[r] = vec4<f32>(0.0);
        (*softmax).total_top[r] = vec4<f32>(EMPTY); // all f32
        (*softmax).total_sum[r] = vec4<f32>(0.0); // all f32
    }
}

// Adds the products of a staged slice of columns.
fn add_scores(score: ptr<function, array<vec4<f32>, SCORES>>, worker: Worker, depth: u32) {
    for (var d = 0u; d < depth; d += DEPTH_TURN) {
        let before = *score;
        if (SUMS_APART != 0u) {
            *score = array<vec4<f32>, SCORES>();
        }
        for (var e = 0u; e < DEPTH_TURN; e++) { // unroll on cards
            var query: array<vec4<f32>, ROW_QUADS>;
            for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                query[r] = staged[(d + e) * TILE_QUADS + r * 16u + worker.ty];
            }
            for (var k = 0u; k < KEY_QUADS; k++) { // unroll
                let key = staged[KEYS_AT + (d + e) * BLOCK_QUADS + k * 16u + worker.tx];
                for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                    (*score)[(k * 4u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.x), (*score)[(k * 4u) * ROW_QUADS + r]);
                    (*score)[(k * 4u + 1u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.y), (*score)[(k * 4u + 1u) * ROW_QUADS + r]);
                    (*score)[(k * 4u + 2u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.z), (*score)[(k * 4u + 2u) * ROW_QUADS + r]);
                    (*score)[(k * 4u + 3u) * ROW_QUADS + r] = fma(query[r], vec4<f32>(key.w), (*score)[(k * 4u + 3u) * ROW_QUADS + r]);
                }
            }
        }
        if (SUMS_APART != 0u) {
            for (var i = 0u; i < SCORES; i++) { // unroll
                (*score)[i] += before[i];
            }
        }
    }
}

// Whether four rows see the thread's key `k` of a block.
fn sees(visible: vec4<u32>, worker: Worker, block: u32, k: u32) -> vec4<bool> {
    return vec4<u32>(block + (k / 4u * 16u + worker.tx) * 4u + k % 4u) < visible;
}

// The largest logits so far, by this thread's keys of a block.
fn largest_of_thread(
    top: ptr<function, array<vec4<f32>, ROW_QUADS>>,
    softmax: ptr<function, Softmax>,
    score: ptr<function, array<vec4<f32>, SCORES>>,
    worker: Worker,
    block: u32,
) {
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        (*top)[r] = (*softmax).top[r];
        for (var k = 0u; k < KEYS_OF_THREAD; k++) { // unroll
            let seen = sees((*softmax).visible[r], worker, block, k);
            (*top)[r] = max((*top)[r], select(vec4<f32>(EMPTY), (*score)[k * ROW_QUADS + r] * params.logit_scale, seen));
        }
    }
}

// Stages what this thread has of its rows, in [rows, 16 threads].
fn publish(of_rows: ptr<function, array<vec4<f32>, ROW_QUADS>>, worker: Worker) {
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        staged[(r * 16u + worker.ty) * 16u + worker.tx] = (*of_rows)[r];
    }
}

// Turns scores into weights, and rescales sums and output by the new maxima: those that were published, and this thread's own.
fn weigh(
    score: ptr<function, array<vec4<f32>, SCORES>>,
    softmax: ptr<function, Softmax>,
    acc: ptr<function, array<vec4<f32>, ACC>>,
    own: ptr<function, array<vec4<f32>, ROW_QUADS>>,
    worker: Worker,
    block: u32,
) {
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        let top = largest_of_rows((*own)[r], r * 16u + worker.ty);
        let factor = exp2_exact4((*softmax).top[r] - top);
        (*softmax).top[r] = top;
        (*softmax).sum[r] *= factor;
        for (var c = 0u; c < COLUMNS_OF_THREAD; c++) { // unroll
            (*acc)[c * ROW_QUADS + r] *= factor;
        }
        let sum_before = (*softmax).sum[r]; // all f32
        (*softmax).sum[r] = vec4<f32>(0.0); // all f32
        for (var k = 0u; k < KEYS_OF_THREAD; k++) { // unroll
            let seen = sees((*softmax).visible[r], worker, block, k);
            // fma: the product is not rounded before the subtraction, so large logits lose no accuracy beyond the dot product's.
            let exponent = fma((*score)[k * ROW_QUADS + r], vec4<f32>(params.logit_scale), -top);
            (*score)[k * ROW_QUADS + r] = select(vec4<f32>(0.0), exp2(select(vec4<f32>(0.0), exponent, seen)), seen);
            (*softmax).sum[r] += (*score)[k * ROW_QUADS + r];
        }
        (*softmax).sum[r] += sum_before; // all f32
    }
}

fn exp2_exact4(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(exp2_exact(x.x), exp2_exact(x.y), exp2_exact(x.z), exp2_exact(x.w));
}

// Adds the staged values by the staged weights.
fn add_values(acc: ptr<function, array<vec4<f32>, ACC>>, worker: Worker, slice_keys: u32) {
    for (var key = 0u; key < slice_keys; key += VALUE_TURN) {
        // if all f32
        for (var c = 0u; c < COLUMN_QUADS; c++) { // unroll
            var turn = array<vec4<f32>, TURN>();
            for (var e = 0u; e < VALUE_TURN; e++) { // unroll on cards
                let value = staged[VALUES_AT + (key + e) * VALUE_QUADS + c * 16u + worker.tx];
                for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                    let weight = staged[(key + e) * TILE_QUADS + r * 16u + worker.ty];
                    turn[r] = fma(weight, vec4<f32>(value.x), turn[r]);
                    turn[ROW_QUADS + r] = fma(weight, vec4<f32>(value.y), turn[ROW_QUADS + r]);
                    turn[2u * ROW_QUADS + r] = fma(weight, vec4<f32>(value.z), turn[2u * ROW_QUADS + r]);
                    turn[3u * ROW_QUADS + r] = fma(weight, vec4<f32>(value.w), turn[3u * ROW_QUADS + r]);
                }
            }
            for (var i = 0u; i < TURN; i++) { // unroll
                (*acc)[c * TURN + i] += turn[i];
            }
        }
        // else
        for (var e = 0u; e < VALUE_TURN; e++) { // unroll on cards
            var weight: array<vec4<f32>, ROW_QUADS>;
            for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                weight[r] = staged[(key + e) * TILE_QUADS + r * 16u + worker.ty];
            }
            for (var c = 0u; c < COLUMN_QUADS; c++) { // unroll
                let value = staged[VALUES_AT + (key + e) * VALUE_QUADS + c * 16u + worker.tx];
                for (var r = 0u; r < ROW_QUADS; r++) { // unroll
                    (*acc)[(c * 4u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.x), (*acc)[(c * 4u) * ROW_QUADS + r]);
                    (*acc)[(c * 4u + 1u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.y), (*acc)[(c * 4u + 1u) * ROW_QUADS + r]);
                    (*acc)[(c * 4u + 2u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.z), (*acc)[(c * 4u + 2u) * ROW_QUADS + r]);
                    (*acc)[(c * 4u + 3u) * ROW_QUADS + r] = fma(weight[r], vec4<f32>(value.w), (*acc)[(c * 4u + 3u) * ROW_QUADS + r]);
                }
            }
        }
        // end
    }
}

// if all f32
// Whether the sums go to the totals after a block: only a long tile has totals.
fn ends_total(tile: Tile, block: u32) -> bool {
    let done = block + TOKENS;
    return tile.num_keys > TOTAL_TOKENS && (done % TOTAL_TOKENS == 0u || done >= tile.num_keys);
}

// Adds the sums to the totals. After the last block the totals are the sums.
fn end_total(softmax: ptr<function, Softmax>, acc: ptr<function, array<vec4<f32>, ACC>>, tile: Tile, worker: Worker, block: u32) {
    let done = block + TOKENS;
    let is_last = done >= tile.num_keys;
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        let factor = exp2_exact4((*softmax).total_top[r] - (*softmax).top[r]);
        (*softmax).total_top[r] = (*softmax).top[r];
        (*softmax).total_sum[r] = fma((*softmax).total_sum[r], factor, (*softmax).sum[r]);
        (*softmax).sum[r] = select(vec4<f32>(0.0), (*softmax).total_sum[r], is_last);
        for (var i = 0u; i < 4u; i++) { // unroll
            let row = (r * 16u + worker.ty) * 4u + i;
            for (var c = 0u; c < COLUMN_QUADS; c++) { // unroll
                if (row < tile.num_rows && c * 16u + worker.tx < V_QUADS) {
                    var total = vec4<f32>((*acc)[(c * 4u) * ROW_QUADS + r][i], (*acc)[(c * 4u + 1u) * ROW_QUADS + r][i], (*acc)[(c * 4u + 2u) * ROW_QUADS + r][i], (*acc)[(c * 4u + 3u) * ROW_QUADS + r][i]);
                    if (done > TOTAL_TOKENS) {
                        total = fma(load_total(tile, row, c * 16u + worker.tx), vec4<f32>(factor[i]), total);
                    }
                    if (!is_last) {
                        store_total(tile, row, c * 16u + worker.tx, total);
                        total = vec4<f32>(0.0);
                    }
                    (*acc)[(c * 4u) * ROW_QUADS + r][i] = total.x;
                    (*acc)[(c * 4u + 1u) * ROW_QUADS + r][i] = total.y;
                    (*acc)[(c * 4u + 2u) * ROW_QUADS + r][i] = total.z;
                    (*acc)[(c * 4u + 3u) * ROW_QUADS + r][i] = total.w;
                }
            }
        }
    }
}
// end

// Stores this thread's columns of its rows, and their LSEs. Each row's sums are published.
fn finish(softmax: ptr<function, Softmax>, acc: ptr<function, array<vec4<f32>, ACC>>, tile: Tile, worker: Worker) {
    for (var r = 0u; r < ROW_QUADS; r++) { // unroll
        var sum = vec4<f32>(0.0);
        for (var x = 0u; x < 16u; x++) {
            sum += staged[(r * 16u + worker.ty) * 16u + x];
        }
        for (var i = 0u; i < 4u; i++) { // unroll
            let row = (r * 16u + worker.ty) * 4u + i;
            let any = sum[i] > 0.0;
            let row_end = finish_row(tile.head, (*softmax).top[r][i], sum[i], 1.0, any);
            if (row < tile.num_rows) {
                for (var c = 0u; c < COLUMN_QUADS; c++) { // unroll
                    if (c * 16u + worker.tx < V_QUADS) {
                        let value = vec4<f32>((*acc)[(c * 4u) * ROW_QUADS + r][i], (*acc)[(c * 4u + 1u) * ROW_QUADS + r][i], (*acc)[(c * 4u + 2u) * ROW_QUADS + r][i], (*acc)[(c * 4u + 3u) * ROW_QUADS + r][i]);
                        store_quad(tile, row, c * 16u + worker.tx, value * row_end.factor);
                    }
                }
                if (worker.tx == 0u) {
                    store_lse(tile, row, row_end.lse, any);
                }
            }
        }
    }
}
