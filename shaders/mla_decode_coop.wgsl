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
// These three are lib/attend_plain.wgsl, or lib/attend_record.wgsl for records, whose codes are staged without their scales.
// Meanwhile the next blocks are being loaded into registers, AHEAD of them at a time. A block is loaded and staged in the same
// iteration: NVIDIA's compiler copies values that are carried to the next iteration, and so would wait for the loads.
//
// f16 ends at 65504. A query row is scaled by a power of two, its largest element to just below 2^15; an f32 query is
// split in two parts. Keys of a bf16 cache beyond f16's range become infinite. They, infinities and NaN are found by scores that are not
// finite; NaN codes of e4m3, which would become numbers in f16, and scales of records that are not finite are looked for. Such an item
// is computed again in f32 (lib/wide_rows.wgsl), slowly.
//
// Masked tokens have weight exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on
// which rows share its tile. The size of every workgroup variable and every pitch are multiples of 16 bytes: otherwise NVIDIA's
// drivers load matrices wrongly.

var<workgroup> keys: array<HalfOct, KEYS>; // [TOKENS, KEY_PITCH]
// At times `scores` is a tile of the output for each subgroup.
var<workgroup> scores: array<f32, SCORES>; // [KEY_SPLIT, TOKEN_TILES, ROWS, SCORE_PITCH] // one dtype
var<workgroup> weights: array<f16, WEIGHTS>; // [ROWS, WEIGHT_PITCH] // one dtype
var<workgroup> scores: array<vec4<f32>, ALL_SCORE_QUADS>; // [GROUPS and one of rotary columns, ROWS, SCORE_QUADS] // records
var<workgroup> weights: array<HalfOct, WEIGHTS>; // [ROWS - WEIGHTS_IN_KEYS, WEIGHT_PITCH] // records
var<workgroup> factors: array<f32, ROWS>; // [ROWS]: what to multiply a row with
var<workgroup> row_at: array<u32, PLACES>; // a ring of BLOCKS blocks: the first oct of each run of tokens in the cache
var<workgroup> notes: array<atomic<u32>, 4>; // flags of the workgroup: see MOVED

const LAZY = 14.0;
// Indices in `notes`.
const MOVED = 0u; // whether a maximum moved in this block
const ODD_KEYS = 1u; // whether a key is beyond f16's range, or an input is not finite

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

// What a lane does in an item.
struct Worker {
    thread: u32,
    subgroup: u32,
    lane: u32,
    // Its subgroup's share of the scores: which columns, tokens and rows.
    key_share: u32,
    has_rope: bool, // whether the share has rotary columns
    score_tile: u32,
    score_row: u32,
    scratch: u32, // in `scores`, for a tile of the subgroup's output
    // Its row in the softmax, and of a block's tokens `column`, `column + SOFTMAX_LANES`, ..
    row: u32,
    column: u32,
}

// A lane's state of its row.
struct Softmax {
    kv_begin: u32,
    num_seen: u32, // tokens that the row sees, from `kv_begin` on
    scale: f32, // of scores
    top: f32, // the row's running maximum
    old_top: f32, // before the last block
    sum: f32, // of weights, over this lane's tokens only
    reference: u32, // the biased exponent of what its weights times scales are divided by // records
    old_reference: u32, // before the last block // records
    largest: u32, // for ODD_KEYS: the bits of the largest magnitude of a logit
}

// No function that is called in a loop has a barrier: that deadlocked on a driver.
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
    let worker = worker_of(subgroup, lane);
    let thread = worker.thread;
    // Missing rows of a tile repeat its last one; their results are not stored.
    let query = query_of(item.first_row, min(worker.row, item.num_rows - 1u));
    // Blocks begin at multiples of TOKENS for every page size and split, so the same tokens always share a block, and where pages are
    // multiples of TOKENS a block is inside of a page.
    let first_block = item.kv_begin / TOKENS * TOKENS;
    if (thread < 4u) {
        atomicStore(&notes[thread], 0u);
    }

    // Loads of the first block, then of the query row: each lane has some octs of it.
    var next_entry = 0u; // what the page list has for this thread's next entry of `row_at`
    var first: Block;
    if (item.kv_begin < item.kv_end) {
        next_entry = find_first_runs(item, thread, first_block);
        workgroupBarrier();
        first = load_block(thread, 0u);
    }
    var queries: array<MatrixA, QUERY_TILES>; // [QUERY_PARTS, SCORE_ROW_TILES, KEY_TILES]
    let exponent = load_queries(&queries, worker, query);

    var softmax = begin_softmax(item, query, exponent);
    var odd = 0u; // for ODD_KEYS
    var acc = array<MatrixC, ACC_TILES>(); // [ROW_TILES, LATENT_TILES]
    if (item.kv_begin < item.kv_end) {
        odd = stage_block(thread, first, item.kv_end - first_block);
    }

    // A block in which a maximum moves ends the inner loop: the output is rescaled, and the block repeated. With the rescaling inside the
    // loop, even if it never ran, an H200 was 4 to 8 % slower.
    var turn = first_block;
    var has_rope = worker.has_rope; // records
    var moved = true;
    while (moved) {
        moved = false;
        // On cards two blocks an iteration: the longer body keeps NVIDIA's compiler from unrolling it 8 times, which would exceed the
        // instruction cache.
        for (; turn < item.kv_end; turn += TURN * TOKENS) {
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
                score(&queries, worker); // one dtype
                score(&queries, worker, has_rope); // records
                has_rope = worker.has_rope; // records
                workgroupBarrier();
                let block_sum = weigh(&softmax, worker, block);
                workgroupBarrier();
                if (atomicLoad(&notes[MOVED]) != 0u) {
                    turn = block;
                    moved = true;
                    break;
                }
                softmax.sum += block_sum;
                next_entry = find_runs(item, thread, first_block, number, next_entry);
                add_values(&acc, subgroup);
                workgroupBarrier();
                odd |= stage_block(thread, ahead[part % AHEAD], max(item.kv_end, block + TOKENS) - block - TOKENS);
            }
        }
        if (moved) {
            has_rope = false; // records
            rescale_sum(&softmax, worker);
            workgroupBarrier();
            if (thread == 0u) {
                atomicStore(&notes[MOVED], 0u);
            }
            for (var c = 0u; c < ACC_TILES; c++) { // unroll
                coopStoreT(acc[c], &scores[worker.scratch], SCRATCH_PITCH);
                workgroupBarrier();
                rescale_tile(worker, c / LATENT_TILES * TILE);
                workgroupBarrier();
                acc[c] = coopLoadT<MatrixC>(&scores[worker.scratch], SCRATCH_PITCH);
            }
        }
    }

    if (has_odd_keys(softmax.largest, odd)) {
        wide_rows(item, subgroup, lane);
        return;
    }
    end_row(softmax, item, worker, query);
    store_output(&acc, item, worker);
}

fn worker_of(subgroup: u32, lane: u32) -> Worker {
    let thread = subgroup * SUBGROUP + lane;
    let key_share = subgroup % KEY_SPLIT;
    return Worker(
        thread,
        subgroup,
        lane,
        key_share,
        key_share < ROPE_SHARES, // one dtype
        has_rotary_columns(subgroup), // records
        subgroup / KEY_SPLIT % TOKEN_SPLIT * SCORE_TOKEN_TILES,
        subgroup / (KEY_SPLIT * TOKEN_SPLIT) * (ROWS / ROW_SPLIT),
        subgroup * TILE * SCRATCH_PITCH,
        thread / SOFTMAX_LANES,
        thread % SOFTMAX_LANES,
    );
}

fn begin_softmax(item: Item, query: Query, exponent: u32) -> Softmax {
    let num_seen = max(min(query.visible, item.kv_end), item.kv_begin) - item.kv_begin;
    let scale = layer.logit_scale * KEY_UNIT * bitcast<f32>((254u - exponent) << 23u); // one dtype
    return Softmax(item.kv_begin, num_seen, scale, EMPTY, EMPTY, 0.0, 0u); // one dtype
    let scale = layer.logit_scale * bitcast<f32>((254u - exponent) << 23u); // records
    return Softmax(item.kv_begin, num_seen, scale, EMPTY, EMPTY, 0.0, 0u, 0u, 0u); // records
}

// Whether some thread of the workgroup has evidence for ODD_KEYS.
fn has_odd_keys(largest_logit: u32, odd: u32) -> bool {
    workgroupBarrier();
    if (largest_logit >= LOGIT_END || (odd & ODD) != 0u) {
        atomicStore(&notes[ODD_KEYS], 1u);
    }
    workgroupBarrier();
    return atomicLoad(&notes[ODD_KEYS]) != 0u;
}

// The row's sum: stores its LSE and publishes the factor of its output, which is 1 in a partial result.
fn end_row(softmax: Softmax, item: Item, worker: Worker, query: Query) {
    let sum = row_total(softmax.sum);
    let any = sum > 0.0;
    let top = select(EMPTY, softmax.top, any);
    let row_end = finish_row(query.head, top, sum, 1.0, any);
    if (worker.column == 0u) {
        let factor = KEY_UNIT * row_end.factor; // one dtype
        let factor = KEY_UNIT * bitcast<f32>(softmax.reference << 23u) * row_end.factor; // records
        if (SINKS) {
            factors[worker.row] = select(1.0, factor * share_of_keys(query.head, row_end.lse), item.partial == DIRECT);
        } else {
            factors[worker.row] = select(1.0, factor, item.partial == DIRECT);
        }
        if (worker.row < item.num_rows) {
            write_lse(item, worker.row, query, row_end.lse, top, factor, sum);
        }
    }
}

// Stores the subgroup's columns of the output, or of the partial results.
fn store_output(acc: ptr<function, array<MatrixC, ACC_TILES>>, item: Item, worker: Worker) {
    if (item.partial != DIRECT && item.num_rows == ROWS) {
        // Partial results are not normalised, the merge does that: so a full tile is stored straight from the matrices, and rows of a
        // partly filled tile get the same bits.
        for (var c = 0u; c < ACC_TILES; c++) { // unroll
            let quad = (worker.subgroup * LATENT_TILES + c % LATENT_TILES) * (TILE / 4u);
            coopStoreT((*acc)[c], &partials[(item.partial + c / LATENT_TILES * TILE) * PARTIAL_QUADS + quad], PARTIAL_QUADS);
        }
        return;
    }
    for (var c = 0u; c < ACC_TILES; c++) { // unroll
        workgroupBarrier();
        coopStoreT((*acc)[c], &scores[worker.scratch], SCRATCH_PITCH);
        workgroupBarrier();
        for (var i = worker.lane; i < TILE * TILE_OCTS; i += SUBGROUP) {
            let row = c / LATENT_TILES * TILE + i / TILE_OCTS;
            let oct = (worker.subgroup * LATENT_TILES + c % LATENT_TILES) * TILE_OCTS + i % TILE_OCTS;
            let at = worker.scratch + i * 8u; // one dtype
            let value = mat2x4<f32>( // one dtype
                vec4<f32>(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]), // one dtype
                vec4<f32>(scores[at + 4u], scores[at + 5u], scores[at + 6u], scores[at + 7u]), // one dtype
            ) * factors[row]; // one dtype
            let at = worker.scratch + i * 2u; // records
            let value = mat2x4<f32>(scores[at], scores[at + 1u]) * factors[row]; // records
            if (row < item.num_rows) {
                write_oct(item, row, oct, value);
            }
        }
    }
}
