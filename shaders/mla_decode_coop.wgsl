// Attention of one tile of query rows over one range of tokens on cooperative matrices: the tensor cores.
//
// The twin of mla_decode.wgsl: the same work items, tables, layer and partial results. A matrix has TILE x TILE elements,
// spread over the lanes of a subgroup. Each of SUBGROUPS subgroups owns LATENT_TILES tiles of the latent's columns: as
// inner dimension of the scores, and as columns of the output, which stays in its accumulators. A cache row is decoded to
// f16 once and staged in workgroup memory, where every row tile reads it as key and as value. For each block of TOKENS:
//   1. scores   each subgroup multiplies its columns of the queries (in registers) with its columns of the keys, and
//               publishes its part of each score
//   2. softmax  SOFTMAX_LANES lanes a row add up the parts and turn them into weights. The row's maximum moves only when
//               it grew by more than LAZY, so weights stay below 2^LAZY and the accumulators are rarely rescaled
//   3. values   each subgroup adds weights x values to its columns of the output
// The next block is loaded while this one is worked on, and staged in the other of BUFFERS buffers.
//
// f16 ends at 65504. A query row is scaled by a power of two, its largest element to just below 2^15; an f32 query is
// split in two parts. A bf16 cache may hold more than f16: then the item is done again with the cache scaled down, see
// lib/key_bf16.wgsl.
//
// Masked tokens weigh exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on
// which rows share its tile. Every workgroup variable is a multiple of 16 bytes long, and so is every pitch: on NVIDIA
// matrices are read wrongly otherwise.

var<workgroup> keys: array<vec4<f16>, KEY_QUADS>; // [BUFFERS, TOKENS, KEY_PITCH]
var<workgroup> scores: array<f32, SCORES>; // [SUBGROUPS, ROWS, SCORE_PITCH]: parts of scores; then tiles of the output
var<workgroup> weights: array<f16, WEIGHTS>; // [ROWS, WEIGHT_PITCH]
var<workgroup> factors: array<f32, ROWS>; // [ROWS]: what to multiply a row with
var<workgroup> row_at: array<u32, TOKENS>; // [TOKENS]: first oct of each token's cache row, next block
var<workgroup> notes: array<atomic<u32>, 4>; // for all threads: see MOVED and LARGEST

const LAZY = 8.0;
const HALF_MAX = 65504.0;
const MOVED = 0u; // one past the token of the last block in which a maximum moved
const LARGEST = 1u; // bits of the largest key, where f16 could not hold it

struct Query {
    token: u32,
    head: u32,
    visible: u32, // keys before this position are seen
}

// Row `row` of the item, of which `first_row` is the first.
fn query_of(first_row: u32, row: u32) -> Query {
    let index = first_row + row;
    let at = tables[QUERIES_AT] + (index / layer.num_heads) * 2u;
    return Query(tables[at], index % layer.num_heads, tables[at + 1u]);
}

// Eight elements of a query row.
fn query_oct(query: Query, oct: u32) -> mat2x4<f32> {
    if (oct < LATENT_OCTS) {
        let at = layer.q_nope_at + query.token * layer.q_nope_token_stride + query.head * layer.q_nope_head_stride;
        return decode_query(q_nope[at + oct]);
    }
    let at = layer.q_pe_at + query.token * layer.q_pe_token_stride + query.head * layer.q_pe_head_stride;
    return decode_query(q_pe[at + oct - LATENT_OCTS]);
}

// First oct of a token's cache row.
fn cache_row(page_begin: u32, token: u32) -> u32 {
    let page_size = tables[PAGE_SIZE];
    var page = tables[tables[PAGES_AT] + page_begin + token / page_size];
    if (CLAMP_PAGES) {
        page = min(page, tables[NUM_PAGES] - 1u);
    }
    return layer.kv_at + page * layer.kv_block_stride + (token % page_size) * ROW_OCTS;
}

fn stage(buffer: u32, token: u32, oct: u32, half: HalfOct) {
    let at = ((buffer * TOKENS + token) * KEY_PITCH + oct) * 2u;
    keys[at] = half.low;
    keys[at + 1u] = half.high;
}

// What a thread holds of a block on its way from the cache to the staging buffer.
struct Block {
    latent: array<KvOct, LATENT_LOADS>,
    rope: array<KvOct, ROPE_LOADS_PADDED>,
}

// The block whose rows are in `row_at`.
fn load_block(thread: u32) -> Block {
    var block: Block;
    for (var i = 0u; i < LATENT_LOADS; i++) { // unroll
        let at = i * THREADS + thread;
        block.latent[i] = kv[row_at[at / LATENT_OCTS] + at % LATENT_OCTS];
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u);
        block.rope[i] = kv[row_at[at / ROPE_OCTS] + LATENT_OCTS + at % ROPE_OCTS];
    }
    return block;
}

// Returns the largest magnitude in it, where it matters.
fn stage_block(buffer: u32, thread: u32, block: Block, shrink: f32) -> f32 {
    var largest = 0.0;
    for (var i = 0u; i < LATENT_LOADS; i++) { // unroll
        let at = i * THREADS + thread;
        stage(buffer, at / LATENT_OCTS, at % LATENT_OCTS, half_key(block.latent[i], shrink));
        largest = max(largest, largest_key(block.latent[i]));
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u); // the last one more than once
        stage(buffer, at / ROPE_OCTS, LATENT_OCTS + at % ROPE_OCTS, half_key(block.rope[i], shrink));
        largest = max(largest, largest_key(block.rope[i]));
    }
    return largest;
}

@compute @workgroup_size(THREADS)
fn mla_decode(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) num_groups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let item = slice.first_item + group_id.y * num_groups.x + group_id.x;
    if (item >= min(slice.end_item, tables[NUM_ITEMS])) {
        return;
    }
    let item_at = tables[ITEMS_AT] + item * 8u;
    let first_row = tables[item_at];
    let num_rows = tables[item_at + 1u];
    let page_begin = tables[item_at + 2u];
    let kv_begin = tables[item_at + 3u];
    let kv_end = tables[item_at + 4u];
    let slot = tables[item_at + 5u];
    let thread = subgroup * SUBGROUP + lane;
    let softmax_row = thread / SOFTMAX_LANES;
    let softmax_lane = thread % SOFTMAX_LANES;
    let scratch = subgroup * ROWS * SCORE_PITCH; // this subgroup's part of `scores`

    // Each query row's power of two: in `factors` to scale the row with, and undone in what its scores are multiplied with.
    var score_scale: array<f32, SOFTMAX_ROWS>;
    var visible: array<u32, SOFTMAX_ROWS>;
    for (var r = 0u; r < SOFTMAX_ROWS; r++) { // unroll
        // A tile's missing rows repeat its last one; their results go nowhere.
        let row = r * SOFTMAX_STRIDE + softmax_row;
        let query = query_of(first_row, min(row, num_rows - 1u));
        visible[r] = min(query.visible, kv_end);
        var largest = vec4<f32>(0.0);
        for (var oct = softmax_lane; oct < ROW_OCTS; oct += SOFTMAX_LANES) {
            let value = query_oct(query, oct);
            largest = max(largest, max(abs(value[0]), abs(value[1])));
        }
        var magnitude = max(max(largest.x, largest.y), max(largest.z, largest.w));
        magnitude = max(magnitude, subgroupShuffleXor(magnitude, 1u));
        magnitude = max(magnitude, subgroupShuffleXor(magnitude, 2u));
        magnitude = max(magnitude, subgroupShuffleXor(magnitude, 4u));
        let exponent = clamp(268u - (bitcast<u32>(magnitude) >> 23u), 1u, 253u);
        score_scale[r] = layer.logit_scale * bitcast<f32>((254u - exponent) << 23u);
        if (softmax_lane == 0u) {
            factors[row] = bitcast<f32>(exponent << 23u);
        }
    }
    if (thread < 2u) {
        atomicStore(&notes[thread], 0u);
    }
    // Columns past the row's end, which the last subgroups multiply.
    for (var i = thread; i < PAD_OCTS * TOKENS * BUFFERS; i += THREADS) {
        stage(0u, i / max(PAD_OCTS, 1u), ROW_OCTS + i % max(PAD_OCTS, 1u), HalfOct());
    }
    workgroupBarrier();

    // The queries, into registers by way of the staging buffer.
    var queries: array<MatrixA, QUERY_TILES>; // [QUERY_PARTS, ROW_TILES, KEY_TILES]
    for (var part = 0u; part < QUERY_PARTS; part++) { // unroll
        for (var r = 0u; r < ROW_TILES; r++) { // unroll
            for (var i = thread; i < TILE * ROW_OCTS; i += THREADS) {
                let row = r * TILE + i / ROW_OCTS;
                let value = query_oct(query_of(first_row, min(row, num_rows - 1u)), i % ROW_OCTS) * factors[row];
                var half = HalfOct(vec4<f16>(value[0]), vec4<f16>(value[1]));
                if (part == 1u) {
                    half = HalfOct(vec4<f16>(value[0] - vec4<f32>(half.low)), vec4<f16>(value[1] - vec4<f32>(half.high)));
                }
                stage(0u, i / ROW_OCTS, i % ROW_OCTS, half);
            }
            workgroupBarrier();
            for (var k = 0u; k < LATENT_TILES; k++) { // unroll
                queries[(part * ROW_TILES + r) * KEY_TILES + k] = coopLoadT<MatrixA>(&keys[(subgroup * LATENT_TILES + k) * TILE_QUADS], KEY_PITCH * 2u);
            }
            for (var k = 0u; k < ROPE_TILES; k++) { // unroll
                queries[(part * ROW_TILES + r) * KEY_TILES + LATENT_TILES + k] = coopLoadT<MatrixA>(&keys[LATENT_OCTS * 2u + (subgroup * ROPE_TILES + k) * TILE_QUADS], KEY_PITCH * 2u);
            }
            workgroupBarrier();
        }
    }

    var key_scale = KEY_UNIT; // what staged keys have to be multiplied with
    for (var attempt = 0u; attempt < KEY_ATTEMPTS; attempt++) {
        let shrink = 1.0 / key_scale; // a power of two
        var largest = 0.0;
        var row_max: array<f32, SOFTMAX_ROWS>;
        var row_sum: array<f32, SOFTMAX_ROWS>; // over this thread's tokens only
        for (var r = 0u; r < SOFTMAX_ROWS; r++) { // unroll
            row_max[r] = EMPTY;
            row_sum[r] = 0.0;
        }
        var acc = array<MatrixC, ACC_TILES>(); // [ROW_TILES, LATENT_TILES]

        // Past the end the last token is repeated: it weighs 0.
        var next: Block;
        if (kv_begin < kv_end) {
            if (thread < TOKENS) {
                row_at[thread] = cache_row(page_begin, min(kv_begin + thread, kv_end - 1u));
            }
            workgroupBarrier();
            next = load_block(thread);
            largest = stage_block(0u, thread, next, shrink);
            workgroupBarrier();
            if (thread < TOKENS) {
                row_at[thread] = cache_row(page_begin, min(kv_begin + TOKENS + thread, kv_end - 1u));
            }
            workgroupBarrier();
            next = load_block(thread);
        }

        var buffer = 0u;
        for (var block = kv_begin; block < kv_end; block += TOKENS) {
            let keys_at = buffer * TOKENS * KEY_PITCH * 2u;
            var next_row = 0u;
            if (thread < TOKENS) {
                next_row = cache_row(page_begin, min(block + 2u * TOKENS + thread, kv_end - 1u));
            }

            // 1. scores
            for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
                let tile_at = keys_at + t * TILE * KEY_PITCH * 2u;
                var score = array<MatrixC, ROW_TILES>();
                for (var k = 0u; k < LATENT_TILES; k++) { // unroll
                    let key = coopLoad<MatrixB>(&keys[tile_at + (subgroup * LATENT_TILES + k) * TILE_QUADS], KEY_PITCH * 2u);
                    for (var r = 0u; r < QUERY_PARTS * ROW_TILES; r++) { // unroll
                        score[r % ROW_TILES] = coopMultiplyAdd(queries[r * KEY_TILES + k], key, score[r % ROW_TILES]);
                    }
                }
                for (var k = 0u; k < ROPE_TILES; k++) { // unroll
                    let key = coopLoad<MatrixB>(&keys[tile_at + LATENT_OCTS * 2u + (subgroup * ROPE_TILES + k) * TILE_QUADS], KEY_PITCH * 2u);
                    for (var r = 0u; r < QUERY_PARTS * ROW_TILES; r++) { // unroll
                        score[r % ROW_TILES] = coopMultiplyAdd(queries[r * KEY_TILES + LATENT_TILES + k], key, score[r % ROW_TILES]);
                    }
                }
                for (var r = 0u; r < ROW_TILES; r++) { // unroll
                    coopStoreT(score[r], &scores[scratch + r * TILE * SCORE_PITCH + t * TILE], SCORE_PITCH);
                }
            }
            workgroupBarrier();

            // 2. softmax
            for (var r = 0u; r < SOFTMAX_ROWS; r++) { // unroll
                let row = r * SOFTMAX_STRIDE + softmax_row;
                var logit: array<f32, SOFTMAX_TOKENS>;
                var top = EMPTY;
                for (var i = 0u; i < SOFTMAX_TOKENS; i++) { // unroll
                    let column = i * SOFTMAX_LANES + softmax_lane;
                    var sum = 0.0;
                    for (var s = 0u; s < SUBGROUPS; s++) { // unroll
                        sum += scores[(s * ROWS + row) * SCORE_PITCH + column];
                    }
                    logit[i] = select(EMPTY, sum * (score_scale[r] * key_scale), block + column < visible[r]);
                    top = max(top, logit[i]);
                }
                top = max(top, subgroupShuffleXor(top, 1u));
                top = max(top, subgroupShuffleXor(top, 2u));
                top = max(top, subgroupShuffleXor(top, 4u));
                var factor = 1.0;
                if (top > row_max[r] + LAZY) {
                    factor = exp2(row_max[r] - top);
                    if (row_max[r] > EMPTY) {
                        atomicStore(&notes[MOVED], block + 1u);
                    }
                    row_max[r] = top;
                }
                row_sum[r] *= factor;
                for (var i = 0u; i < SOFTMAX_TOKENS; i++) { // unroll
                    let column = i * SOFTMAX_LANES + softmax_lane;
                    let weight = select(0.0, exp2(logit[i] - row_max[r]), block + column < visible[r]);
                    row_sum[r] += weight;
                    weights[row * WEIGHT_PITCH + column] = f16(weight);
                }
                if (softmax_lane == 0u) {
                    factors[row] = factor;
                }
            }
            if (BUFFERS == 2u) {
                buffer = 1u - buffer;
                largest = max(largest, stage_block(buffer, thread, next, shrink));
            }
            if (thread < TOKENS) {
                row_at[thread] = next_row;
            }
            workgroupBarrier();
            if (BUFFERS == 2u) {
                next = load_block(thread);
            }

            // 3. values
            if (atomicLoad(&notes[MOVED]) == block + 1u) {
                for (var r = 0u; r < ROW_TILES; r++) { // unroll
                    for (var c = 0u; c < LATENT_TILES; c++) { // unroll
                        coopStoreT(acc[r * LATENT_TILES + c], &scores[scratch], TILE);
                        workgroupBarrier();
                        for (var i = lane; i < TILE * TILE; i += SUBGROUP) {
                            scores[scratch + i] *= factors[r * TILE + i / TILE];
                        }
                        workgroupBarrier();
                        acc[r * LATENT_TILES + c] = coopLoadT<MatrixC>(&scores[scratch], TILE);
                    }
                }
                workgroupBarrier();
            }
            for (var t = 0u; t < TOKEN_TILES; t++) { // unroll
                var weight: array<MatrixA, ROW_TILES>;
                for (var r = 0u; r < ROW_TILES; r++) { // unroll
                    weight[r] = coopLoadT<MatrixA>(&weights[r * TILE * WEIGHT_PITCH + t * TILE], WEIGHT_PITCH);
                }
                for (var c = 0u; c < LATENT_TILES; c++) { // unroll
                    let value = coopLoadT<MatrixB>(&keys[keys_at + t * TILE * KEY_PITCH * 2u + (subgroup * LATENT_TILES + c) * TILE_QUADS], KEY_PITCH * 2u);
                    for (var r = 0u; r < ROW_TILES; r++) { // unroll
                        acc[r * LATENT_TILES + c] = coopMultiplyAdd(weight[r], value, acc[r * LATENT_TILES + c]);
                    }
                }
            }
            if (BUFFERS == 1u) {
                workgroupBarrier();
                largest = max(largest, stage_block(0u, thread, next, shrink));
                next = load_block(thread);
                workgroupBarrier();
            }
        }

        // Did f16 hold the keys?
        if (KEY_ATTEMPTS > 1u && attempt == 0u) {
            if (largest > HALF_MAX) {
                atomicMax(&notes[LARGEST], bitcast<u32>(largest));
            }
            workgroupBarrier();
            let bits = atomicLoad(&notes[LARGEST]);
            if (bits != 0u) {
                key_scale = bitcast<f32>(min((bits >> 23u) - 14u, 240u) << 23u);
                continue;
            }
        }

        // The rows' sums, then the output by way of this subgroup's part of `scores`.
        workgroupBarrier();
        for (var r = 0u; r < SOFTMAX_ROWS; r++) { // unroll
            let row = r * SOFTMAX_STRIDE + softmax_row;
            var sum = row_sum[r] + subgroupShuffleXor(row_sum[r], 1u);
            sum += subgroupShuffleXor(sum, 2u);
            sum += subgroupShuffleXor(sum, 4u);
            let any = sum > 0.0;
            let divisor = select(1.0, sum, any);
            if (softmax_lane == 0u) {
                factors[row] = key_scale / divisor;
                if (row < num_rows) {
                    let base_2 = select(EMPTY, row_max[r] + log2(divisor), any);
                    if (slot == DIRECT) {
                        let query = query_of(first_row, row);
                        store_lse(query.token, query.head, base_2, any);
                    } else {
                        partials[(slot + row) * PARTIAL_QUADS + 2u * LATENT_OCTS] = vec4<f32>(base_2, 0.0, 0.0, 0.0);
                    }
                }
            }
        }
        for (var r = 0u; r < ROW_TILES; r++) { // unroll
            for (var c = 0u; c < LATENT_TILES; c++) { // unroll
                workgroupBarrier();
                coopStoreT(acc[r * LATENT_TILES + c], &scores[scratch], TILE);
                workgroupBarrier();
                for (var i = lane; i < TILE * TILE / 8u; i += SUBGROUP) {
                    let row = r * TILE + i * 8u / TILE;
                    let oct = (subgroup * LATENT_TILES + c) * (TILE / 8u) + i % (TILE / 8u);
                    let at = scratch + i * 8u;
                    let value = mat2x4<f32>(
                        vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]),
                        vec4<f32>(scores[at + 4u], scores[at + 5u], scores[at + 6u], scores[at + 7u]),
                    ) * factors[row];
                    if (row < num_rows) {
                        if (slot == DIRECT) {
                            let query = query_of(first_row, row);
                            store_out(query.token, query.head, oct, value);
                        } else {
                            partials[(slot + row) * PARTIAL_QUADS + 2u * oct] = value[0];
                            partials[(slot + row) * PARTIAL_QUADS + 2u * oct + 1u] = value[1];
                        }
                    }
                }
            }
        }
        break;
    }
}
