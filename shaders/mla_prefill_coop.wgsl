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
// Concatenated with: lib/round, lib/half_oct, lib/prefill_half_*, lib/out_*, lib/prefill, lib/prefill_pinned.
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

// The maximum, and below the sum, over the softmax lanes of a row.
fn row_largest(x: f32) -> f32 {
    var largest = x;
    for (var lanes = 1u; lanes < SOFTMAX_LANES; lanes *= 2u) {
        largest = max(largest, subgroupShuffleXor(largest, lanes));
    }
    return largest;
}

fn row_total(x: f32) -> f32 {
    var sum = x;
    for (var lanes = 1u; lanes < SOFTMAX_LANES; lanes *= 2u) {
        sum += subgroupShuffleXor(sum, lanes);
    }
    return sum;
}

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
    let thread = subgroup * SUBGROUP + lane;
    let share = subgroup % COLUMN_SPLIT;
    let first_row = subgroup / COLUMN_SPLIT * (ROW_TILES * TILE);
    let scratch = subgroup * (OUT_TILES * TILE * TILE / 4u); // this subgroup's tiles of the output in `scores`

    // This thread's row in the softmax, and the position of its SOFTMAX_QUADS quads of weights.
    let row = thread / SOFTMAX_LANES;
    let softmax_lane = thread % SOFTMAX_LANES;
    let first_quad = softmax_lane * SOFTMAX_QUADS;
    let visible = visible_to(tile, row);
    let seen_by_all = visible_to(tile, 0u);
    if (thread < 4u) {
        atomicStore(&notes[thread], 0u);
    }

    // The loads of all queries, then of the first block. Queries reach the matrices through `staged`, CHUNK_ROWS rows at a time.
    var loaded: array<Unit, QUERY_LOADS>; // [QUERY_CHUNKS, CHUNK_LOADS]
    for (var i = 0u; i < QUERY_LOADS; i++) { // unroll on cards
        let at = query_at(thread, i % CHUNK_LOADS);
        loaded[i] = query_oct(tile, i / CHUNK_LOADS * CHUNK_ROWS + at / ROW_OCTS, at % ROW_OCTS);
    }
    let first = load_keys(tile, 0u, thread);
    var values = load_values(tile, 0u, thread);
    var logit_scale = params.logit_scale * KEY_UNIT;
    if (SCALES_QUERIES) {
        var largest = 0.0;
        for (var oct = thread % SOFTMAX_LANES; oct < ROW_OCTS; oct += SOFTMAX_LANES) {
            largest = max(largest, magnitude_of(query_oct(tile, row, oct)));
        }
        let exponent = clamp(268u - (bitcast<u32>(row_largest(largest)) >> 23u), 1u, 253u);
        logit_scale *= bitcast<f32>((254u - exponent) << 23u);
        if (first_quad == 0u) {
            factors[row] = bitcast<f32>(exponent << 23u);
        }
        workgroupBarrier();
    }
    logit_scale = max(logit_scale, LEAST_SCALE);
    var queries: array<MatrixA, QUERY_TILES>; // [ROW_TILES, KEY_TILES]
    for (var chunk = 0u; chunk < QUERY_CHUNKS; chunk++) { // unroll
        for (var i = 0u; i < CHUNK_LOADS; i++) { // unroll
            let at = query_at(thread, i);
            let factor = factors[chunk * CHUNK_ROWS + at / ROW_OCTS];
            staged[at / ROW_OCTS * KEY_PITCH + at % ROW_OCTS] = half_query(loaded[chunk * CHUNK_LOADS + i], factor);
        }
        workgroupBarrier();
        for (var r = 0u; r < ROW_TILES; r++) { // unroll
            let chunk_row = first_row + r * TILE - chunk * CHUNK_ROWS;
            if (chunk_row < CHUNK_ROWS) {
                for (var k = 0u; k < KEY_TILES; k++) { // unroll
                    queries[r * KEY_TILES + k] = coopLoadT<MatrixA>(&staged[chunk_row * KEY_PITCH + k * TILE_OCTS].low, KEY_PITCH * 2u);
                }
            }
        }
        workgroupBarrier();
    }

    var row_max = EMPTY;
    var row_sum = 0.0; // over this lane's keys until the end
    var acc = array<MatrixC, ACC_TILES>(); // [ROW_TILES, VALUE_TILES]
    var odd = stage_keys(thread, first);

    // A block in which a maximum moves ends the inner loop. The output is rescaled, the block's keys, which weights and values overwrote,
    // are staged again, and the block is repeated. With the rescaling inside the loop an H100 was 6 % slower for bf16, and 17 % for 256
    // columns of values: benches/results/h100-unrolled-loops-2026-11-25.md.
    var old_max = EMPTY; // before the last block
    var block = 0u;
    var moved = true;
    while (moved) {
        moved = false;
        for (; block < tile.num_keys; block += TOKENS) {
            let ahead = load_keys(tile, block + TOKENS, thread);
            workgroupBarrier();

            // 1. scores
            var score = array<MatrixC, SCORE_TILES>(); // [TOKEN_TILES, ROW_TILES]
            for (var k = 0u; k < KEY_TILES; k++) { // unroll
                for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
                    let at = (share * TOKEN_TILES + t) * TILE * KEY_PITCH + k * TILE_OCTS;
                    let key = coopLoad<MatrixB>(&staged[at].low, KEY_PITCH * 2u);
                    for (var r = 0u; r < ROW_TILES; r++) { // unroll
                        score[t * ROW_TILES + r] = coopMultiplyAdd(queries[r * KEY_TILES + k], key, score[t * ROW_TILES + r]);
                    }
                }
            }
            for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
                for (var r = 0u; r < ROW_TILES; r++) { // unroll
                    let at = (first_row + r * TILE) * SCORE_PITCH + (share * TOKEN_TILES + t) * (TILE / 4u);
                    coopStoreT(score[t * ROW_TILES + r], &scores[at], SCORE_PITCH);
                }
            }
            workgroupBarrier();

            // 2. softmax
            var score_quad: array<vec4<f32>, SOFTMAX_QUADS>; // loaded while values are stored
            for (var i = 0u; i < SOFTMAX_QUADS; i++) { // unroll
                score_quad[i] = scores[row * SCORE_PITCH + quad_of(softmax_lane, i)];
            }
            odd |= stage_values(thread, values);
            values = load_values(tile, block + TOKENS, thread);
            var tops = vec4<f32>(MASKED);
            for (var i = 0u; i < SOFTMAX_QUADS; i++) { // unroll
                if (block + TOKENS > seen_by_all) {
                    let key = vec4<u32>(block + quad_of(softmax_lane, i) * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
                    score_quad[i] = select(vec4<f32>(MASKED), score_quad[i], key < vec4<u32>(visible));
                }
                tops = max(tops, score_quad[i]);
            }
            let top = max(max(tops.x, tops.y), max(tops.z, tops.w)); // this lane's
            old_max = row_max;
            // Lazy rescaling: the row's lanes exchange maxima only if some lane of the subgroup exceeds the running maximum by LAZY.
            if (subgroupAny(top * logit_scale > row_max + LAZY)) {
                let row_top = row_largest(top);
                let logit = select(EMPTY, row_top * logit_scale, row_top > MASKED);
                if (logit > row_max + LAZY) {
                    row_max = logit;
                    if (old_max > EMPTY) {
                        atomicStore(&notes[MOVED], 1u);
                    }
                }
            }
            let base = select(row_max, 0.0, row_max == EMPTY); // a row without a visible key yet: all weights are 0
            var weights: array<vec4<f32>, SOFTMAX_QUADS>;
            var sums = vec4<f32>(0.0);
            for (var i = 0u; i < SOFTMAX_QUADS; i++) { // unroll
                weights[i] = exp2(fma(score_quad[i], vec4<f32>(logit_scale), vec4<f32>(-base)));
                sums += weights[i];
            }
            for (var i = 0u; i < SOFTMAX_OCTS; i++) { // unroll
                staged[row * WEIGHT_PITCH + first_quad / 2u + i] = HalfOct(vec4<f16>(weights[2u * i]), vec4<f16>(weights[2u * i + 1u]));
            }
            workgroupBarrier();

            // 3. values; the first weights are loaded before the test for rescaling, to overlap its latency
            var weight: array<MatrixA, ROW_TILES>;
            for (var r = 0u; r < ROW_TILES; r++) { // unroll
                weight[r] = coopLoadT<MatrixA>(&staged[(first_row + r * TILE) * WEIGHT_PITCH].low, WEIGHT_PITCH * 2u);
            }
            if (atomicLoad(&notes[MOVED]) != 0u) {
                moved = true;
                break;
            }
            row_sum += (sums.x + sums.y) + (sums.z + sums.w);

            for (var t = 0u; t < BLOCK_TILES; t++) { // unroll
                for (var r = 0u; r < ROW_TILES; r++) { // unroll
                    if (t > 0u) {
                        let at = (first_row + r * TILE) * WEIGHT_PITCH + t * TILE_OCTS;
                        weight[r] = coopLoadT<MatrixA>(&staged[at].low, WEIGHT_PITCH * 2u);
                    }
                }
                for (var c = 0u; c < VALUE_TILES; c++) { // unroll
                    let at = VALUES_AT + t * TILE * VALUE_PITCH + (share * VALUE_TILES + c) * TILE_OCTS;
                    let value = coopLoadT<MatrixB>(&staged[at].low, VALUE_PITCH * 2u);
                    for (var r = 0u; r < ROW_TILES; r++) { // unroll
                        acc[r * VALUE_TILES + c] = coopMultiplyAdd(weight[r], value, acc[r * VALUE_TILES + c]);
                    }
                }
            }
            workgroupBarrier();
            odd |= stage_keys(thread, ahead);
        }
        if (moved) {
            let factor = select(1.0, exp2(old_max - row_max), old_max > EMPTY && old_max != row_max);
            row_sum *= factor;
            if (first_quad == 0u) {
                factors[row] = factor;
            }
            workgroupBarrier();
            if (thread == 0u) {
                atomicStore(&notes[MOVED], 0u);
            }
            for (var c = 0u; c < ACC_TILES; c++) { // unroll
                coopStoreT(acc[c], &scores[scratch], TILE / 4u);
                workgroupBarrier();
                for (var i = lane; i < TILE * TILE / 4u; i += SUBGROUP) {
                    scores[scratch + i] *= factors[first_row + c / VALUE_TILES * TILE + i / (TILE / 4u)];
                }
                workgroupBarrier();
                acc[c] = coopLoadT<MatrixC>(&scores[scratch], TILE / 4u);
            }
            odd |= stage_keys(thread, load_keys(tile, block, thread));
            values = load_values(tile, block, thread);
        }
    }

    if (NOTICES_ODD) {
        if (odd != 0u) {
            atomicStore(&notes[ODD], 1u);
        }
        workgroupBarrier();
        if (atomicLoad(&notes[ODD]) != 0u) {
            wide_rows(tile, subgroup, lane);
            return;
        }
    }

    let sum = row_total(row_sum);
    let any = visible > 0u;
    let row_end = finish_row(tile.head, row_max, sum, 1.0, any);
    if (first_quad == 0u) {
        factors[row] = select(0.0, row_end.factor, any);
        if (row < tile.num_rows) {
            store_lse(tile, row, row_end.lse, any);
        }
    }
    for (var turn = 0u; turn < OUT_TURNS; turn++) { // unroll
        workgroupBarrier();
        for (var c = 0u; c < OUT_TILES; c++) { // unroll
            coopStoreT(acc[turn * OUT_TILES + c], &scores[scratch + c * (TILE * TILE / 4u)], TILE / 4u);
        }
        workgroupBarrier();
        for (var i = lane; i < OUT_TILES * TILE * TILE / 4u; i += SUBGROUP) {
            let c = turn * OUT_TILES + i / (TILE * TILE / 4u);
            let at = i % (TILE * TILE / 4u);
            let out_row = first_row + c / VALUE_TILES * TILE + at / (TILE / 4u);
            let quad = (share * VALUE_TILES + c % VALUE_TILES) * (TILE / 4u) + at % (TILE / 4u);
            if (out_row < tile.num_rows) {
                store_quad(tile, out_row, quad, scores[scratch + i] * factors[out_row]);
            }
        }
    }
}
