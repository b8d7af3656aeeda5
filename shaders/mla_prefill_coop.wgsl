// FlashAttention-style prefill in MLA's expanded form (ragged batch, causal): variants `coop`, `coop_small` and `coop_few`, on
// cooperative matrices (tensor cores), f16 x f16 + f32.
//
//   out = softmax(scale * (q_nope . k_nope + q_pe . k_pe)) . v, lse, for one tile of query rows of one head
//
// The same arguments and work list as mla_prefill.wgsl. A matrix has TILE x TILE elements, spread over the lanes of a subgroup.
// Tile: ROWS query rows, looping over blocks of TOKENS keys. The subgroups are a grid of row groups x COLUMN_SPLIT: each keeps
// ROW_TILES * TILE query rows in registers, and its share of their output columns in accumulators. A block of keys, then its values,
// are staged as f16 in `staged`, in three phases:
//   1. scores   each subgroup multiplies its query rows with its share of the block's keys
//   2. softmax  SOFTMAX_LANES lanes a row turn scores into weights. Weights and values overwrite the keys, with tokens permuted
//               (`quad_of`, `place_of`) so that these lanes have no bank conflicts. Lazy rescaling (FlashAttention-4): a row's maximum
//               moves only when it grew by more than LAZY (base 2), so weights stay below 2^LAZY and the output is rarely rescaled
//   3. values   each subgroup multiplies its rows of weights with its share of the values' columns
// The next block is prefetched into registers. NVIDIA's compiler copies registers carried into the next iteration, which waits for their
// loads: so keys are loaded and staged within one iteration, and values are loaded two phases before their use. It also unrolls the loop
// over blocks 8 times. For `coop_few`, coop.rs makes the loop's condition a `subgroupAny`, which keeps it rolled.
//
// f16 ends at 65504: bf16 values beyond it are detected, and the tile is recomputed in f32 (lib/prefill_half_bf16.wgsl).
//
// Keys past the last visible one of the tile repeat it and weigh 0. Every workgroup variable and every pitch is a multiple of 16 bytes:
// NVIDIA reads matrices wrongly otherwise. An oct is 8 consecutive elements, a quad 4.
//
// Concatenated with: lib/round, lib/half_oct, lib/row_lanes, lib/prefill_half_*, lib/out_*, lib/prefill, lib/row_end, lib/prefill_pinned.
// Constants, and the tiles of each variant: src/gpu/kernels/prefill/coop.rs.

// keys [TOKENS, KEY_PITCH]; then weights [ROWS, WEIGHT_PITCH], and from VALUES_AT on values [TOKENS, VALUE_PITCH]
var<workgroup> staged: array<HalfOct, STAGED>;
var<workgroup> scores: array<vec4<f32>, SCORES>; // [ROWS, SCORE_PITCH]; or [subgroups, OUT_TILES, TILE, TILE / 4] of the output
var<workgroup> factors: array<f32, ROWS>; // [ROWS] scale of a query row, then of its output
var<workgroup> notes: array<atomic<u32>, 4>; // [4] flags of the workgroup: MOVED, ODD

const LAZY = 14.0; // base 2
// The score of a masked key: at any scale from LEAST_SCALE on it weighs 0. Other scores are below 2^43, for which a scale of LEAST_SCALE
// gives the same weights as any smaller one.
const MASKED = -1.0e30;
const LEAST_SCALE = 1.0e-26;
// Indices of `notes`.
const MOVED = 0u; // a row's maximum moved in this block
const ODD = 1u; // f16 does not hold some key or value

// A thread's registers for a block of keys, and for one of values, between global memory and `staged`.
struct Keys {
    nope: array<Unit, NOPE_LOADS>,
    rope: array<Unit, ROPE_LOADS_PADDED>,
}

struct Values {
    octs: array<Unit, VALUE_LOADS>,
}

// Which oct of [TOKENS, octs] is load `i` of a thread, as token * octs + oct; past the end, the last one again.
fn load_at(thread: u32, i: u32, octs: u32) -> u32 {
    return min(i * THREADS + thread, TOKENS * octs - 1u);
}

// Which oct of a chunk of queries, [CHUNK_ROWS, ROW_OCTS], is load `i` of a thread; past the end, the last one again.
fn query_at(thread: u32, i: u32) -> u32 {
    return min(i * THREADS + thread, CHUNK_ROWS * ROW_OCTS - 1u);
}

// Which quad of a block's keys is quad `i` of a softmax lane. The SOFTMAX_LANES lanes of a row read 16 bytes each, quads 0, 1, 4, 5, .. of
// it; the next row begins two quads further (SCORE_PITCH), in other banks.
fn quad_of(lane: u32, i: u32) -> u32 {
    if (SOFTMAX_LANES == 1u) {
        return i;
    }
    return lane % 2u + i % 2u * 2u + lane / 2u * 4u + i / 2u * (2u * SOFTMAX_LANES);
}

// The position of a key in the staged weights and values, where the quads of a softmax lane are consecutive.
fn place_of(key: u32) -> u32 {
    if (SOFTMAX_LANES == 1u) {
        return key;
    }
    let quad = key / 4u;
    let lane = quad % 2u + quad / 4u % max(SOFTMAX_LANES / 2u, 1u) * 2u;
    let i = quad / 2u % 2u + quad / (2u * SOFTMAX_LANES) * 2u;
    return (lane * SOFTMAX_QUADS + i) * 4u + key % 4u;
}

fn load_keys(tile: Tile, block: u32, thread: u32) -> Keys {
    var loaded: Keys;
    let k_nope_at = params.k_nope_at + tile.head * params.k_nope_head_stride;
    for (var i = 0u; i < NOPE_LOADS; i++) { // unroll on cards
        let at = load_at(thread, i, NOPE_OCTS);
        loaded.nope[i] = k_nope[k_nope_at + key_of(tile, block + at / NOPE_OCTS) * params.k_nope_token_stride + at % NOPE_OCTS];
    }
    let k_pe_at = params.k_pe_at + tile.head * params.k_pe_head_stride;
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = load_at(thread, i, max(ROPE_OCTS, 1u));
        loaded.rope[i] = k_pe[k_pe_at + key_of(tile, block + at / max(ROPE_OCTS, 1u)) * params.k_pe_token_stride + at % max(ROPE_OCTS, 1u)];
    }
    return loaded;
}

fn load_values(tile: Tile, block: u32, thread: u32) -> Values {
    var loaded: Values;
    let v_at = params.v_at + tile.head * params.v_head_stride;
    for (var i = 0u; i < VALUE_LOADS; i++) { // unroll on cards
        let at = load_at(thread, i, V_OCTS);
        loaded.octs[i] = v[v_at + key_of(tile, block + at / V_OCTS) * params.v_token_stride + at % V_OCTS];
    }
    return loaded;
}

// Converts to f16 and stages. The result is not 0 if f16 does not hold some element.
fn stage_keys(thread: u32, keys: Keys) -> u32 {
    var odd = 0u;
    for (var i = 0u; i < NOPE_LOADS; i++) { // unroll on cards
        let at = load_at(thread, i, NOPE_OCTS);
        staged[at / NOPE_OCTS * KEY_PITCH + at % NOPE_OCTS] = half_key(keys.nope[i]);
        odd |= odd_key(keys.nope[i]);
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = load_at(thread, i, max(ROPE_OCTS, 1u));
        staged[at / max(ROPE_OCTS, 1u) * KEY_PITCH + NOPE_OCTS + at % max(ROPE_OCTS, 1u)] = half_key(keys.rope[i]);
        odd |= odd_key(keys.rope[i]);
    }
    return odd;
}

// Stages values; returns like stage_keys.
fn stage_values(thread: u32, values: Values) -> u32 {
    var odd = 0u;
    for (var i = 0u; i < VALUE_LOADS; i++) { // unroll on cards
        let at = load_at(thread, i, V_OCTS);
        staged[VALUES_AT + place_of(at / V_OCTS) * VALUE_PITCH + at % V_OCTS] = half_value(values.octs[i]);
        odd |= odd_value(values.octs[i]);
    }
    return odd;
}

fn query_oct(tile: Tile, row: u32, oct: u32) -> Unit {
    let token = token_of(tile, row);
    if (oct < NOPE_OCTS) {
        return q_nope[params.q_nope_at + token * params.q_nope_token_stride + tile.head * params.q_nope_head_stride + oct];
    }
    return q_pe[params.q_pe_at + token * params.q_pe_token_stride + tile.head * params.q_pe_head_stride + oct - NOPE_OCTS];
}

// What a lane does in a tile.
struct Worker {
    thread: u32,
    lane: u32,
    share: u32, // of its subgroup: of a block's keys, and of the output's columns
    first_row: u32, // and the first of its query rows
    scratch: u32, // and its tiles of the output in `scores`
    row: u32, // the lane's row in the softmax, and which of the row's lanes it is
    softmax_lane: u32,
}

// A lane's state of its row.
struct Softmax {
    visible: u32, // keys that the row attends to
    seen_by_all: u32, // keys that every row of the tile attends to
    scale: f32, // of scores
    top: f32, // the row's running maximum
    old_top: f32, // before the last block
    sum: f32, // of weights, over this lane's keys only
}

// No function that is called in a loop has a barrier: that deadlocked on a driver.
@compute @workgroup_size(THREADS)
fn mla_prefill(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let number = group.y * groups.x + group.x;
    let tile = tile_of(number);
    if (number >= table[0] * NUM_HEADS) {
        return;
    }
    let worker = worker_of(subgroup, lane);
    let thread = worker.thread;
    if (thread < 4u) {
        atomicStore(&notes[thread], 0u);
    }

    // The loads of all queries, then of the first block.
    var loaded: array<Unit, QUERY_LOADS>; // [QUERY_CHUNKS, CHUNK_LOADS]
    load_query_octs(&loaded, tile, thread);
    let first = load_keys(tile, 0u, thread);
    var values = load_values(tile, 0u, thread);
    var queries: array<MatrixA, QUERY_TILES>; // [ROW_TILES, KEY_TILES]
    let scale = load_queries(&queries, &loaded, tile, worker);
    var softmax = Softmax(visible_to(tile, worker.row), visible_to(tile, 0u), scale, EMPTY, EMPTY, 0.0);
    var acc = array<MatrixC, ACC_TILES>(); // [ROW_TILES, VALUE_TILES]
    var odd = stage_keys(thread, first);

    // A block in which a maximum moves ends the inner loop. The output is rescaled, the block's keys, which weights and values overwrote,
    // are staged again, and the block is repeated. With the rescaling inside the loop an H100 was 6 % slower for bf16, and 17 % for 256
    // columns of values: benches/results/h100-unrolled-loops-2026-11-25.md.
    var block = 0u;
    var moved = true;
    while (moved) {
        moved = false;
        for (; block < tile.num_keys; block += TOKENS) {
            let ahead = load_keys(tile, block + TOKENS, thread);
            workgroupBarrier();

            // 1. The scores of the subgroup's rows and its share of the keys. As a function beside add_values they cost an H200 13 %.
            var products = array<MatrixC, SCORE_TILES>(); // [TOKEN_TILES, ROW_TILES]
            for (var k = 0u; k < KEY_TILES; k++) { // unroll
                for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
                    let at = (worker.share * TOKEN_TILES + t) * TILE * KEY_PITCH + k * TILE_OCTS;
                    let key = coopLoad<MatrixB>(&staged[at].low, KEY_PITCH * 2u);
                    for (var r = 0u; r < ROW_TILES; r++) { // unroll
                        products[t * ROW_TILES + r] = coopMultiplyAdd(queries[r * KEY_TILES + k], key, products[t * ROW_TILES + r]);
                    }
                }
            }
            for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
                for (var r = 0u; r < ROW_TILES; r++) { // unroll
                    let at = (worker.first_row + r * TILE) * SCORE_PITCH + (worker.share * TOKEN_TILES + t) * (TILE / 4u);
                    coopStoreT(products[t * ROW_TILES + r], &scores[at], SCORE_PITCH);
                }
            }
            workgroupBarrier();
            var score_quad: array<vec4<f32>, SOFTMAX_QUADS>; // loaded while values are stored
            for (var i = 0u; i < SOFTMAX_QUADS; i++) { // unroll
                score_quad[i] = scores[worker.row * SCORE_PITCH + quad_of(worker.softmax_lane, i)];
            }
            odd |= stage_values(thread, values);
            values = load_values(tile, block + TOKENS, thread);
            let block_sum = weigh(&score_quad, &softmax, worker, block);
            workgroupBarrier();
            // The first weights are loaded before the test for rescaling, to overlap its latency.
            var weight: array<MatrixA, ROW_TILES>;
            for (var r = 0u; r < ROW_TILES; r++) { // unroll
                weight[r] = coopLoadT<MatrixA>(&staged[(worker.first_row + r * TILE) * WEIGHT_PITCH].low, WEIGHT_PITCH * 2u);
            }
            if (atomicLoad(&notes[MOVED]) != 0u) {
                moved = true;
                break;
            }
            softmax.sum += block_sum;
            add_values(&acc, &weight, worker);
            workgroupBarrier();
            odd |= stage_keys(thread, ahead);
        }
        if (moved) {
            rescale_sum(&softmax, worker);
            workgroupBarrier();
            if (thread == 0u) {
                atomicStore(&notes[MOVED], 0u);
            }
            for (var c = 0u; c < ACC_TILES; c++) { // unroll
                coopStoreT(acc[c], &scores[worker.scratch], TILE / 4u);
                workgroupBarrier();
                rescale_tile(worker, c / VALUE_TILES * TILE);
                workgroupBarrier();
                acc[c] = coopLoadT<MatrixC>(&scores[worker.scratch], TILE / 4u);
            }
            odd |= stage_keys(thread, load_keys(tile, block, thread));
            values = load_values(tile, block, thread);
        }
    }

    if (NOTICES_ODD && is_odd_tile(odd)) {
        wide_rows(tile, subgroup, lane);
        return;
    }
    end_row(softmax, tile, worker);
    store_output(&acc, tile, worker);
}

fn worker_of(subgroup: u32, lane: u32) -> Worker {
    let thread = subgroup * SUBGROUP + lane;
    return Worker(
        thread,
        lane,
        subgroup % COLUMN_SPLIT,
        subgroup / COLUMN_SPLIT * (ROW_TILES * TILE),
        subgroup * (OUT_TILES * TILE * TILE / 4u),
        thread / SOFTMAX_LANES,
        thread % SOFTMAX_LANES,
    );
}

fn load_query_octs(loaded: ptr<function, array<Unit, QUERY_LOADS>>, tile: Tile, thread: u32) {
    for (var i = 0u; i < QUERY_LOADS; i++) { // unroll on cards
        let at = query_at(thread, i % CHUNK_LOADS);
        (*loaded)[i] = query_oct(tile, i / CHUNK_LOADS * CHUNK_ROWS + at / ROW_OCTS, at % ROW_OCTS);
    }
}

// Loads the subgroup's query rows into registers: through `staged`, CHUNK_ROWS rows at a time. The result is the scale of their scores.
fn load_queries(queries: ptr<function, array<MatrixA, QUERY_TILES>>, loaded: ptr<function, array<Unit, QUERY_LOADS>>, tile: Tile, worker: Worker) -> f32 {
    var logit_scale = params.logit_scale * KEY_UNIT;
    if (SCALES_QUERIES) {
        var largest = 0.0;
        for (var oct = worker.softmax_lane; oct < ROW_OCTS; oct += SOFTMAX_LANES) {
            largest = max(largest, magnitude_of(query_oct(tile, worker.row, oct)));
        }
        let exponent = clamp(268u - (bitcast<u32>(row_largest(largest)) >> 23u), 1u, 253u);
        logit_scale *= bitcast<f32>((254u - exponent) << 23u);
        if (worker.softmax_lane == 0u) {
            factors[worker.row] = bitcast<f32>(exponent << 23u);
        }
        workgroupBarrier();
    }
    for (var chunk = 0u; chunk < QUERY_CHUNKS; chunk++) { // unroll
        for (var i = 0u; i < CHUNK_LOADS; i++) { // unroll
            let at = query_at(worker.thread, i);
            let factor = factors[chunk * CHUNK_ROWS + at / ROW_OCTS];
            staged[at / ROW_OCTS * KEY_PITCH + at % ROW_OCTS] = half_query((*loaded)[chunk * CHUNK_LOADS + i], factor);
        }
        workgroupBarrier();
        for (var r = 0u; r < ROW_TILES; r++) { // unroll
            let chunk_row = worker.first_row + r * TILE - chunk * CHUNK_ROWS;
            if (chunk_row < CHUNK_ROWS) {
                for (var k = 0u; k < KEY_TILES; k++) { // unroll
                    (*queries)[r * KEY_TILES + k] = coopLoadT<MatrixA>(&staged[chunk_row * KEY_PITCH + k * TILE_OCTS].low, KEY_PITCH * 2u);
                }
            }
        }
        workgroupBarrier();
    }
    return max(logit_scale, LEAST_SCALE);
}

// 2. Turns this lane's scores of a block into staged weights; the result is their sum.
fn weigh(score_quad: ptr<function, array<vec4<f32>, SOFTMAX_QUADS>>, softmax: ptr<function, Softmax>, worker: Worker, block: u32) -> f32 {
    var tops = vec4<f32>(MASKED);
    for (var i = 0u; i < SOFTMAX_QUADS; i++) { // unroll
        if (block + TOKENS > (*softmax).seen_by_all) {
            let key = vec4<u32>(block + quad_of(worker.softmax_lane, i) * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            (*score_quad)[i] = select(vec4<f32>(MASKED), (*score_quad)[i], key < vec4<u32>((*softmax).visible));
        }
        tops = max(tops, (*score_quad)[i]);
    }
    let top = max(max(tops.x, tops.y), max(tops.z, tops.w)); // this lane's
    let scale = (*softmax).scale;
    (*softmax).old_top = (*softmax).top;
    // Lazy rescaling: the row's lanes exchange maxima only if some lane of the subgroup exceeds the running maximum by LAZY.
    if (subgroupAny(top * scale > (*softmax).top + LAZY)) {
        let row_top = row_largest(top);
        let logit = select(EMPTY, row_top * scale, row_top > MASKED);
        if (logit > (*softmax).top + LAZY) {
            (*softmax).top = logit;
            if ((*softmax).old_top > EMPTY) {
                atomicStore(&notes[MOVED], 1u);
            }
        }
    }
    let base = select((*softmax).top, 0.0, (*softmax).top == EMPTY); // a row without a visible key yet: all weights are 0
    var weights: array<vec4<f32>, SOFTMAX_QUADS>;
    var sums = vec4<f32>(0.0);
    for (var i = 0u; i < SOFTMAX_QUADS; i++) { // unroll
        weights[i] = exp2(fma((*score_quad)[i], vec4<f32>(scale), vec4<f32>(-base)));
        sums += weights[i];
    }
    let first = worker.row * WEIGHT_PITCH + worker.softmax_lane * SOFTMAX_QUADS / 2u;
    for (var i = 0u; i < SOFTMAX_OCTS; i++) { // unroll
        staged[first + i] = HalfOct(vec4<f16>(weights[2u * i]), vec4<f16>(weights[2u * i + 1u]));
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}

// 3. Adds the block's values by their weights to the subgroup's output. `weight` has the weights of the first keys.
fn add_values(acc: ptr<function, array<MatrixC, ACC_TILES>>, weight: ptr<function, array<MatrixA, ROW_TILES>>, worker: Worker) {
    for (var t = 0u; t < BLOCK_TILES; t++) { // unroll
        for (var r = 0u; r < ROW_TILES; r++) { // unroll
            if (t > 0u) {
                let at = (worker.first_row + r * TILE) * WEIGHT_PITCH + t * TILE_OCTS;
                (*weight)[r] = coopLoadT<MatrixA>(&staged[at].low, WEIGHT_PITCH * 2u);
            }
        }
        for (var c = 0u; c < VALUE_TILES; c++) { // unroll
            let at = VALUES_AT + t * TILE * VALUE_PITCH + (worker.share * VALUE_TILES + c) * TILE_OCTS;
            let value = coopLoadT<MatrixB>(&staged[at].low, VALUE_PITCH * 2u);
            for (var r = 0u; r < ROW_TILES; r++) { // unroll
                (*acc)[r * VALUE_TILES + c] = coopMultiplyAdd((*weight)[r], value, (*acc)[r * VALUE_TILES + c]);
            }
        }
    }
}

// Rescales a lane's sum by its row's new maximum, and publishes the factor.
fn rescale_sum(softmax: ptr<function, Softmax>, worker: Worker) {
    let old_top = (*softmax).old_top;
    let factor = select(1.0, exp2(old_top - (*softmax).top), old_top > EMPTY && old_top != (*softmax).top);
    (*softmax).sum *= factor;
    if (worker.softmax_lane == 0u) {
        factors[worker.row] = factor;
    }
}

// Multiplies a tile of the subgroup's output, which is in scratch, by the factors of its rows.
fn rescale_tile(worker: Worker, row: u32) {
    for (var i = worker.lane; i < TILE * TILE / 4u; i += SUBGROUP) {
        scores[worker.scratch + i] *= factors[worker.first_row + row + i / (TILE / 4u)];
    }
}

// Whether f16 does not hold some key or value of the tile.
fn is_odd_tile(odd: u32) -> bool {
    if (odd != 0u) {
        atomicStore(&notes[ODD], 1u);
    }
    workgroupBarrier();
    return atomicLoad(&notes[ODD]) != 0u;
}

// The row's sum: stores its LSE and publishes the factor of its output.
fn end_row(softmax: Softmax, tile: Tile, worker: Worker) {
    let any = softmax.visible > 0u;
    let row_end = finish_row(tile.head, softmax.top, row_total(softmax.sum), 1.0, any);
    if (worker.softmax_lane == 0u) {
        factors[worker.row] = select(0.0, row_end.factor, any);
        if (worker.row < tile.num_rows) {
            store_lse(tile, worker.row, row_end.lse, any);
        }
    }
}

// Stores the subgroup's columns of its rows.
fn store_output(acc: ptr<function, array<MatrixC, ACC_TILES>>, tile: Tile, worker: Worker) {
    for (var turn = 0u; turn < OUT_TURNS; turn++) { // unroll
        workgroupBarrier();
        for (var c = 0u; c < OUT_TILES; c++) { // unroll
            coopStoreT((*acc)[turn * OUT_TILES + c], &scores[worker.scratch + c * (TILE * TILE / 4u)], TILE / 4u);
        }
        workgroupBarrier();
        for (var i = worker.lane; i < OUT_TILES * TILE * TILE / 4u; i += SUBGROUP) {
            let c = turn * OUT_TILES + i / (TILE * TILE / 4u);
            let at = i % (TILE * TILE / 4u);
            let out_row = worker.first_row + c / VALUE_TILES * TILE + at / (TILE / 4u);
            let quad = (worker.share * VALUE_TILES + c % VALUE_TILES) * (TILE / 4u) + at % (TILE / 4u);
            if (out_row < tile.num_rows) {
                store_quad(tile, out_row, quad, scores[worker.scratch + i] * factors[out_row]);
            }
        }
    }
}
