// Attention of one tile of query rows over one range of tokens on cooperative matrices: the tensor cores.
//
// The same work items, tables, layer and partial results as mla_decode.wgsl. A matrix has TILE x TILE elements, spread over the
// lanes of a subgroup. The tokens of a block are converted to f16 and staged in workgroup memory once; every query row of the tile
// reads them there, as keys and as values. For each block of TOKENS tokens:
//   1. scores   the subgroups are KEY_SPLIT x TOKEN_SPLIT x ROW_SPLIT: each multiplies its query rows, which it keeps in
//               registers, by its tokens' keys over its share of the columns, and stores partial scores in workgroup memory
//   2. softmax  SOFTMAX_LANES lanes a row add them up and turn them into weights. Lazy rescaling: the running maximum moves
//               only when it grew by more than LAZY, so weights stay below 2^LAZY, and the output is rarely rescaled
//   3. values   each subgroup owns LATENT_TILES tiles of the output's columns, in accumulators: += weights x values
// Meanwhile the next blocks are being loaded into registers, AHEAD of them at a time. A block is loaded and staged in the same
// iteration: NVIDIA's compiler copies values that are carried to the next iteration, and so would wait for the loads.
//
// f16 ends at 65504. A query row is scaled by a power of two, its largest element to just below 2^15; an f32 query is
// split in two parts. Keys of a bf16 cache beyond f16's range become infinite. They, infinities and NaN are found by scores that are not
// finite; NaN codes of e4m3, which would become numbers in f16, are looked for. Such an item is computed again in f32
// (lib/wide_rows.wgsl), slowly.
//
// Masked tokens have weight exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on
// which rows share its tile. The size of every workgroup variable and every pitch are multiples of 16 bytes: otherwise NVIDIA's
// drivers load matrices wrongly.

var<workgroup> keys: array<HalfOct, KEYS>; // [TOKENS, KEY_PITCH]
var<workgroup> scores: array<f32, SCORES>; // [KEY_SPLIT, TOKEN_TILES, ROWS, SCORE_PITCH]; at times a tile of the output for each subgroup
var<workgroup> weights: array<f16, WEIGHTS>; // [ROWS, WEIGHT_PITCH]
var<workgroup> factors: array<f32, ROWS>; // [ROWS]: what to multiply a row with
var<workgroup> row_at: array<u32, PLACES>; // a ring of BLOCKS blocks: the first oct of each run of tokens in the cache
var<workgroup> notes: array<atomic<u32>, 4>; // flags of the workgroup: see MOVED

const LAZY = 14.0;
// Indices in `notes`.
const MOVED = 0u; // whether a maximum moved in this block
const ODD_KEYS = 1u; // whether a key is beyond f16's range, or an input is not finite

// Eight neighbouring elements as matrices take them.
struct HalfOct {
    low: vec4<f16>,
    high: vec4<f16>,
}

// From words. naga has no bitcast from u32 to a pair of f16, so each half is made a u16 first.
fn half_oct(words: vec4<u32>) -> HalfOct {
    let low = vec4<u32>(words.x & 0xFFFFu, words.x >> 16u, words.y & 0xFFFFu, words.y >> 16u);
    let high = vec4<u32>(words.z & 0xFFFFu, words.z >> 16u, words.w & 0xFFFFu, words.w >> 16u);
    return HalfOct(bitcast<vec4<f16>>(vec4<u16>(low)), bitcast<vec4<f16>>(vec4<u16>(high)));
}

// Eight elements of a query row.
fn query_oct(query: Query, oct: u32) -> QueryOct {
    if (oct < LATENT_OCTS) {
        return q_nope[layer.q_nope_at + query.token * layer.q_nope_token_stride + query.head * layer.q_nope_head_stride + oct];
    }
    let at = layer.q_pe_at + query.token * layer.q_pe_token_stride + query.head * layer.q_pe_head_stride;
    return q_pe[at + oct - LATENT_OCTS];
}

// An f32 in f16's range is the sum of part 0, which f16 holds, and part 1, the rest. Computed by bits, since a compiler may remove a
// conversion to f16 and back.
fn query_part(x: vec4<f32>, part: u32) -> vec4<f16> {
    if (QUERY_PARTS == 1u) {
        return vec4<f16>(x);
    }
    let high = bitcast<vec4<f32>>(bitcast<vec4<u32>>(x) & vec4<u32>(0xFFFFE000u));
    if (part == 0u) {
        return vec4<f16>(high);
    }
    return vec4<f16>(x - high);
}

// The first oct of tile `k` of a subgroup's share of a row's columns: LATENT_KEY_TILES of the latent, then rotary ones.
fn key_oct(share: u32, k: u32) -> u32 {
    if (k < LATENT_KEY_TILES) {
        return (share * LATENT_KEY_TILES + k) * TILE_OCTS;
    }
    return LATENT_OCTS + (share * ROPE_KEY_TILES + k - LATENT_KEY_TILES) * TILE_OCTS;
}

// Over the lanes of a row.
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

// An oct of a row's output, or of its partial result.
fn write_oct(item: Item, row: u32, oct: u32, value: mat2x4<f32>) {
    if (item.partial == DIRECT) {
        let query = query_of(item.first_row, row);
        store_out(query.token, query.head, oct, value);
    } else {
        partials[(item.partial + row) * PARTIAL_QUADS + 2u * oct] = value[0];
        partials[(item.partial + row) * PARTIAL_QUADS + 2u * oct + 1u] = value[1];
    }
}

// What a row weighs: its LSE in base 2, or in a partial result its largest logit, the factor that the output still needs and the sum of
// its weights, as at PARTIAL_QUADS.
fn write_lse(item: Item, row: u32, query: Query, lse: f32, top: f32, factor: f32, sum: f32) {
    if (item.partial == DIRECT) {
        store_lse(query.token, query.head, lse);
    } else {
        partials[(item.partial + row) * PARTIAL_QUADS + 2u * LATENT_OCTS] = vec4<f32>(top, factor, sum, 0.0);
    }
}

@compute @workgroup_size(THREADS)
fn mla_decode(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) num_groups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let number = slice.first_item + group_id.y * num_groups.x + group_id.x;
    if (number >= slice.end_item) {
        return;
    }
    let item = load_item(number);
    let num_rows = item.num_rows;
    let list = item.page_begin;
    let kv_begin = item.kv_begin;
    let kv_end = item.kv_end;
    let partial = item.partial;
    let thread = subgroup * SUBGROUP + lane;
    // This subgroup's share of the scores: which columns, tokens and rows.
    let key_share = subgroup % KEY_SPLIT;
    let has_rope = key_share < ROPE_SHARES;
    let score_tile = subgroup / KEY_SPLIT % TOKEN_SPLIT * SCORE_TOKEN_TILES;
    let score_row = subgroup / (KEY_SPLIT * TOKEN_SPLIT) * (ROWS / ROW_SPLIT);
    let scratch = subgroup * TILE * TILE; // in `scores`, for a tile of the output

    // This lane's row in the softmax. Missing rows of a tile repeat its last one; their results are not stored.
    let row = thread / SOFTMAX_LANES;
    let column = thread % SOFTMAX_LANES;
    let query = query_of(item.first_row, min(row, num_rows - 1u));
    // It sees `num_seen` tokens from `kv_begin` on. Blocks begin at multiples of TOKENS for every page size and split, so the same
    // tokens always share a block, and where pages are multiples of TOKENS a block is inside of a page.
    let num_seen = max(min(query.visible, kv_end), kv_begin) - kv_begin;
    let first_block = kv_begin / TOKENS * TOKENS;

    if (thread < 4u) {
        atomicStore(&notes[thread], 0u);
    }

    // Loads of the first block, then of the query row: each lane has some octs of it.
    var next_entry = 0u; // what the page list has for this thread's next entry of `row_at`
    var first: Block;
    if (kv_begin < kv_end) {
        if (thread < PLACES) {
            row_at[thread] = row_of_token(list, run_token(first_block, 0u, thread, kv_end));
            next_entry = entry_of_token(list, run_token(first_block, 1u, thread, kv_end));
        }
        workgroupBarrier();
        first = load_block(thread, 0u);
    }
    var octs: array<QueryOct, LANE_QUERY_OCTS>;
    var magnitude = vec4<f32>(0.0);
    for (var i = 0u; i < LANE_QUERY_OCTS; i++) { // unroll on cards
        octs[i] = query_oct(query, min(i * SOFTMAX_LANES + column, ROW_OCTS - 1u));
        let value = decode_query(octs[i]);
        magnitude = max(magnitude, max(abs(value[0]), abs(value[1])));
    }

    // It is scaled by a power of two, which the factor of its scores undoes.
    let largest_query = row_largest(max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
    let exponent = clamp(268u - (bitcast<u32>(largest_query) >> 23u), 1u, 253u);
    let query_scale = layer.logit_scale * KEY_UNIT * bitcast<f32>((254u - exponent) << 23u);

    // Into registers through the staging buffer, as many rows as fit it at a time.
    var queries: array<MatrixA, QUERY_TILES>; // [QUERY_PARTS, SCORE_ROW_TILES, KEY_TILES]
    for (var part = 0u; part < QUERY_PARTS; part++) { // unroll
        for (var chunk = 0u; chunk < QUERY_CHUNKS; chunk++) { // unroll
            if (row / QUERY_CHUNK_ROWS == chunk) {
                for (var i = 0u; i < LANE_QUERY_OCTS; i++) { // unroll on cards
                    let value = decode_query(octs[i]) * bitcast<f32>(exponent << 23u);
                    let half = HalfOct(query_part(value[0], part), query_part(value[1], part));
                    let oct = min(i * SOFTMAX_LANES + column, ROW_OCTS - 1u); // the last one more than once
                    keys[row % QUERY_CHUNK_ROWS * KEY_PITCH + oct] = half;
                }
            }
            workgroupBarrier();
            for (var r = 0u; r < SCORE_ROW_TILES; r++) { // unroll
                let staged = score_row + r * TILE - chunk * QUERY_CHUNK_ROWS;
                if (staged < QUERY_CHUNK_ROWS) {
                    for (var k = 0u; k < LATENT_KEY_TILES; k++) { // unroll
                        let at = staged * KEY_PITCH + key_oct(key_share, k);
                        queries[(part * SCORE_ROW_TILES + r) * KEY_TILES + k] = coopLoadT<MatrixA>(&keys[at].low, KEY_PITCH * 2u);
                    }
                    if (has_rope) {
                        for (var k = 0u; k < ROPE_KEY_TILES; k++) { // unroll
                            let at = staged * KEY_PITCH + key_oct(key_share, LATENT_KEY_TILES + k);
                            queries[(part * SCORE_ROW_TILES + r) * KEY_TILES + LATENT_KEY_TILES + k] = coopLoadT<MatrixA>(&keys[at].low, KEY_PITCH * 2u);
                        }
                    }
                }
            }
            workgroupBarrier();
        }
    }

    // This lane's evidence for ODD_KEYS.
    var largest_logit = 0u; // its magnitude's bits
    var odd = 0u;
    var row_max = EMPTY;
    var old_max = EMPTY; // before the last block
    var row_sum = 0.0; // over this lane's tokens only
    var acc = array<MatrixC, ACC_TILES>(); // [ROW_TILES, LATENT_TILES]

    if (kv_begin < kv_end) {
        odd = stage_block(thread, first, kv_end - first_block);
    }

    // A block in which a maximum moves ends the inner loop: the output is rescaled, and the block repeated. With the rescaling inside the
    // loop, even if it never ran, an H200 was 4 to 8 % slower.
    var turn = first_block;
    var moved = true;
    while (moved) {
        moved = false;
        // On cards two blocks an iteration: the longer body keeps NVIDIA's compiler from unrolling it 8 times, which would exceed the
        // instruction cache.
        for (; turn < kv_end; turn += TURN * TOKENS) {
            var ahead: array<Block, AHEAD>;
            for (var part = 0u; part < TURN; part++) { // unroll
                let block = turn + part * TOKENS;
                let number = (block - first_block) / TOKENS;
                if (part % AHEAD == 0u) {
                    for (var i = 0u; i < AHEAD; i++) { // unroll
                        ahead[i] = load_block(thread, (number + 1u + i) % BLOCKS);
                    }
                }
                workgroupBarrier();

                // 1. scores
                for (var t = 0u; t < SCORE_TOKEN_TILES; t++) { // unroll
                    var score = array<MatrixC, SCORE_CHAINS>();
                    for (var k = 0u; k < LATENT_KEY_TILES; k++) { // unroll
                        let key = coopLoad<MatrixB>(&keys[(score_tile + t) * TILE * KEY_PITCH + key_oct(key_share, k)].low, KEY_PITCH * 2u);
                        for (var r = 0u; r < QUERY_ROWS; r++) { // unroll
                            score[r % SCORE_ROW_TILES * CHAINS + k % CHAINS] = coopMultiplyAdd(queries[r * KEY_TILES + k], key, score[r % SCORE_ROW_TILES * CHAINS + k % CHAINS]);
                        }
                    }
                    if (has_rope) {
                        for (var k = 0u; k < ROPE_KEY_TILES; k++) { // unroll
                            let key = coopLoad<MatrixB>(&keys[(score_tile + t) * TILE * KEY_PITCH + key_oct(key_share, LATENT_KEY_TILES + k)].low, KEY_PITCH * 2u);
                            for (var r = 0u; r < QUERY_ROWS; r++) { // unroll
                                score[r % SCORE_ROW_TILES * CHAINS + k % CHAINS] = coopMultiplyAdd(queries[r * KEY_TILES + LATENT_KEY_TILES + k], key, score[r % SCORE_ROW_TILES * CHAINS + k % CHAINS]);
                            }
                        }
                    }
                    for (var r = 0u; r < SCORE_ROW_TILES; r++) { // unroll
                        let at = ((key_share * TOKEN_TILES + score_tile + t) * ROWS + score_row + r * TILE) * SCORE_PITCH;
                        for (var more = 0u; more < MORE_CHAINS; more++) { // unroll
                            score[r * CHAINS] = score[r * CHAINS] + score[r * CHAINS + 1u + more];
                        }
                        coopStoreT(score[r * CHAINS], &scores[at], SCORE_PITCH);
                    }
                }
                workgroupBarrier();

                // 2. softmax
                var logit: array<f32, SOFTMAX_TOKENS>;
                var top = EMPTY;
                for (var i = 0u; i < SOFTMAX_TOKENS; i++) { // unroll
                    var sum = 0.0;
                    for (var s = 0u; s < KEY_SPLIT; s++) { // unroll
                        let tile = s * TOKEN_TILES + i * SOFTMAX_LANES / TILE;
                        sum += scores[(tile * ROWS + row) * SCORE_PITCH + i * SOFTMAX_LANES % TILE + column];
                    }
                    sum *= query_scale;
                    largest_logit = max(largest_logit, bitcast<u32>(sum) & 0x7FFFFFFFu);
                    let seen = block + i * SOFTMAX_LANES + column - kv_begin < num_seen;
                    logit[i] = select(EMPTY, sum, seen);
                    top = max(top, logit[i]);
                }
                old_max = row_max;
                // Lanes of a row compare maxima only where one of the subgroup's grew by more than LAZY.
                if (subgroupAny(top > row_max + LAZY)) {
                    top = row_largest(top);
                    if (top > row_max + LAZY) {
                        row_max = top;
                        if (old_max > EMPTY) {
                            atomicStore(&notes[MOVED], 1u);
                        }
                    }
                }
                var block_sum = 0.0;
                for (var i = 0u; i < SOFTMAX_TOKENS; i++) { // unroll
                    let seen = block + i * SOFTMAX_LANES + column - kv_begin < num_seen;
                    let weight = select(0.0, exp2(logit[i] - row_max), seen);
                    block_sum += weight;
                    weights[row * WEIGHT_PITCH + i * SOFTMAX_LANES + column] = f16(weight);
                }
                workgroupBarrier();

                if (atomicLoad(&notes[MOVED]) != 0u) {
                    turn = block;
                    moved = true;
                    break;
                }
                row_sum += block_sum;
                // Refills half of `row_at` at a time, that of blocks which are done.
                if ((number + 2u) % (BLOCKS / 2u) == 0u && thread / (PLACES / 2u) == number / (BLOCKS / 2u) % 2u) {
                    let round = number / BLOCKS + 1u;
                    row_at[thread] = row_of_entry(next_entry, run_token(first_block, round, thread, kv_end));
                    next_entry = entry_of_token(list, run_token(first_block, round + 1u, thread, kv_end));
                }

                // 3. values
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
                            acc[r * LATENT_TILES + c] = coopMultiplyAdd(weight[t * ROW_TILES + r], value, acc[r * LATENT_TILES + c]);
                        }
                    }
                }
                workgroupBarrier();
                odd |= stage_block(thread, ahead[part % AHEAD], max(kv_end, block + TOKENS) - block - TOKENS);
            }
        }
        if (moved) {
            let factor = exp2(old_max - row_max);
            row_sum *= factor;
            if (column == 0u) {
                factors[row] = factor;
            }
            workgroupBarrier();
            if (thread == 0u) {
                atomicStore(&notes[MOVED], 0u);
            }
            for (var c = 0u; c < ACC_TILES; c++) { // unroll
                coopStoreT(acc[c], &scores[scratch], TILE);
                workgroupBarrier();
                for (var i = lane; i < TILE * TILE; i += SUBGROUP) {
                    scores[scratch + i] *= factors[c / LATENT_TILES * TILE + i / TILE];
                }
                workgroupBarrier();
                acc[c] = coopLoadT<MatrixC>(&scores[scratch], TILE);
            }
        }
    }

    workgroupBarrier();
    if (largest_logit >= LOGIT_END || (odd & ODD) != 0u) {
        atomicStore(&notes[ODD_KEYS], 1u);
    }
    workgroupBarrier();
    if (atomicLoad(&notes[ODD_KEYS]) != 0u) {
        wide_rows(item, subgroup, lane);
        return;
    }

    // The row's sum, then the output. Partial results are not normalised, the merge does that: so a full tile is stored straight from
    // the matrices, and rows of a partly filled tile get the same bits.
    let sum = row_total(row_sum);
    let any = sum > 0.0;
    let top = select(EMPTY, row_max, any);
    let row_end = finish_row(query.head, top, sum, 1.0, any);
    let factor = KEY_UNIT * row_end.factor;
    let is_partial = partial != DIRECT;
    if (column == 0u) {
        factors[row] = select(factor, 1.0, is_partial);
        if (row < num_rows) {
            write_lse(item, row, query, row_end.lse, top, factor, sum);
        }
    }
    if (is_partial && num_rows == ROWS) {
        for (var c = 0u; c < ACC_TILES; c++) { // unroll
            let quad = (subgroup * LATENT_TILES + c % LATENT_TILES) * (TILE / 4u);
            coopStoreT(acc[c], &partials[(partial + c / LATENT_TILES * TILE) * PARTIAL_QUADS + quad], PARTIAL_QUADS);
        }
        return;
    }
    for (var c = 0u; c < ACC_TILES; c++) { // unroll
        workgroupBarrier();
        coopStoreT(acc[c], &scores[scratch], TILE);
        workgroupBarrier();
        for (var i = lane; i < TILE * TILE_OCTS; i += SUBGROUP) {
            let out_row = c / LATENT_TILES * TILE + i / TILE_OCTS;
            let oct = (subgroup * LATENT_TILES + c % LATENT_TILES) * TILE_OCTS + i % TILE_OCTS;
            let at = scratch + i * 8u;
            let value = mat2x4<f32>(
                vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]),
                vec4<f32>(scores[at + 4u], scores[at + 5u], scores[at + 6u], scores[at + 7u]),
            ) * factors[out_row];
            if (out_row < num_rows) {
                write_oct(item, out_row, oct, value);
            }
        }
    }
}
