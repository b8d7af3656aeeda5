// Attention of one tile of query rows over one range of tokens: a split of a split-KV decode.
//
// A workgroup takes one work item. Its threads form row groups of LATENT_OCTS threads, each with ROWS_PER_GROUP rows of
// the tile. For each block of TOKENS tokens:
//   1. scores   LANES lanes share ROWS_PER_GROUP rows x 4 tokens; a lane adds up every LANES-th oct of the row, whole or
//               by halves (lib/dot_*.wgsl), then the lanes' partial sums are joined (lib/sum_*.wgsl)
//   2. softmax  one thread a row and token quad: block maximum, online rescale, weights 2^(s - max)
//   3. values   each thread owns one oct of output columns for its group's rows: acc[row] += weight * value
// The cache is read in place, not staged: what one row group reads the others find in the nearest cache.
//
// Lines that end in `all f32` are compiled where cache, query and output are f32, and 1e-5 of the output is promised. A running sum of 8000
// equal terms would be off by 1e-4. So sums have three levels: a block is summed from 0 and then added to `acc`, and every TOTAL_TOKENS
// tokens `acc` is added to totals, which lie where the output will be (lib/totals.wgsl) and so cost no registers.
//
// Masked tokens weigh exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on which rows share its
// tile. Nor does it depend on keys that the row does not see: non-finite logits are left out of the sums, and a block that has one, which
// is rare, adds its values without those that are infinite or NaN. The epilogue writes NaN where the formulas have it.

var<workgroup> token_at: array<u32, TOKEN_PLACES>; // [2, TOKENS]: first oct of each token's cache row, this block and the next
var<workgroup> quad_max: array<f32, TILE_QUADS_PADDED>; // [ROWS, TOKEN_QUADS]
var<workgroup> weights: array<vec4<f32>, TILE_QUADS>; // [ROWS, TOKEN_QUADS], four tokens each
var<workgroup> rescale: array<f32, ROWS_PADDED>; // [ROWS]
var<workgroup> notes: array<atomic<u32>, 4>; // shared by all threads; indices below
var<workgroup> query_at: array<vec2<u32>, ROWS_PADDED>; // [ROWS]: first oct of each row's q_nope and q_pe

// Indices of `notes`, which saves registers across the loop over blocks.
const ODD_BLOCK = 0u; // the last block with a non-finite logit, plus 1
const ODD_ITEM = 1u; // whether any block had one
const NAN_ROWS = 2u; // bit r: row r of the tile is NaN
const_assert ROWS <= 32u;
const KV_BEGIN = 3u;

// What a thread does in an item.
struct Worker {
    group_row: u32, // the first row of its row group
    has_rows: bool, // a row group past the tile's last row only takes part in barriers
    column_oct: u32, // its output columns
    lane: u32, // scores: its octs of a row are `lane`, `lane + LANES`, ..
    token_quad: u32, // and its four tokens of a block
    in_softmax: bool,
    softmax_row: u32, // its row and four tokens in the softmax
    softmax_quad: u32,
}

// A thread's state of the row that it has in the softmax.
struct Softmax {
    visible: u32, // the row attends to the keys before this position
    top: f32, // the row's largest logit
    sum: f32, // of weights, over this thread's tokens only
    total_top: f32, // all f32
    total_sum: f32, // all f32
}

// A thread's sums of values: its oct of columns of each of its rows, in two halves.
struct Sums {
    low: array<vec4<f32>, ROWS_PER_GROUP>,
    high: array<vec4<f32>, ROWS_PER_GROUP>,
}

// No function that is called in a loop has a barrier: that deadlocked on a driver.
@compute @workgroup_size(THREADS)
fn mla_decode(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) num_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = slice.first_item + group_id.y * num_groups.x + group_id.x;
    if (number >= slice.end_item) {
        return;
    }
    let item = load_item(number);
    let worker = worker_of(item, thread);
    begin_item(item, thread);
    var softmax = begin_softmax(item, worker);
    var acc = Sums();
    workgroupBarrier();

    var parity = 0u; // the half of `token_at` that this block has
    for (var block = item.kv_begin; block < item.kv_end; block += TOKENS) {
        // 1. scores
        score(worker, parity);
        workgroupBarrier();

        // 2. softmax
        var logits = vec4<f32>(EMPTY);
        if (worker.in_softmax) {
            logits = visible_logits(softmax.visible, worker, thread, parity, block);
        }
        workgroupBarrier();
        if (worker.in_softmax) {
            weigh(&softmax, worker, thread, logits);
        }
        find_tokens(item, thread, TOKENS - parity, block + TOKENS);
        workgroupBarrier();

        // 3. values
        add_values(&acc, item, worker, parity, block);
        if (ends_total(item, block)) { // all f32
            workgroupBarrier(); // all f32
            if (worker.in_softmax) { // all f32
                end_total_sum(&softmax, worker, is_last(item, block)); // all f32
            } // all f32
            workgroupBarrier(); // all f32
            end_total(&acc, item, worker, block); // all f32
        } // all f32
        parity = TOKENS - parity;
    }

    // Each row's sum and maximum, for all threads, once the last of them has read `rescale` for its values.
    workgroupBarrier();
    if (worker.in_softmax) {
        quad_max[thread] = softmax.sum;
        if (worker.softmax_quad == 0u) {
            rescale[worker.softmax_row] = softmax.top;
        }
    }
    workgroupBarrier();
    let begin = atomicLoad(&notes[KV_BEGIN]);
    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
        if (worker.group_row + r < item.num_rows) {
            finish(item, begin, worker.group_row + r, worker.column_oct, mat2x4<f32>(acc.low[r], acc.high[r]));
        }
    }
}

fn worker_of(item: Item, thread: u32) -> Worker {
    let group_row = (thread / LATENT_OCTS) * ROWS_PER_GROUP;
    let column_oct = thread % LATENT_OCTS;
    return Worker(
        group_row,
        group_row < item.num_rows,
        column_oct,
        column_oct % LANES,
        column_oct / LANES,
        thread < TILE_QUADS,
        min(thread / TOKEN_QUADS, ROWS - 1u),
        thread % TOKEN_QUADS,
    );
}

// What all threads share: where each row's query is, the notes, and where the tokens of the first block are.
fn begin_item(item: Item, thread: u32) {
    if (thread < ROWS) {
        // Rows past the last one repeat it; their results are not stored.
        let query = query_of(item.first_row, min(thread, item.num_rows - 1u));
        query_at[thread] = vec2<u32>(
            layer.q_nope_at + query.token * layer.q_nope_token_stride + query.head * layer.q_nope_head_stride,
            layer.q_pe_at + query.token * layer.q_pe_token_stride + query.head * layer.q_pe_head_stride,
        );
    }
    if (thread < 4u) {
        atomicStore(&notes[thread], select(0u, item.kv_begin, thread == KV_BEGIN));
    }
    if (item.kv_begin < item.kv_end) {
        find_tokens(item, thread, 0u, item.kv_begin);
    }
}

fn begin_softmax(item: Item, worker: Worker) -> Softmax {
    var softmax: Softmax;
    softmax.visible = min(query_of(item.first_row, min(worker.softmax_row, item.num_rows - 1u)).visible, item.kv_end);
    softmax.top = EMPTY;
    softmax.sum = 0.0;
    softmax.total_top = EMPTY; // all f32
    softmax.total_sum = 0.0; // all f32
    return softmax;
}

// Where the tokens of the block from `block` on are, into one half of `token_at`. Past the end, the last token again, which then weighs 0.
fn find_tokens(item: Item, thread: u32, half: u32, block: u32) {
    if (thread < TOKENS) {
        let token = min(block + thread, item.kv_end - 1u);
        let entry = entry_of_token(item.page_begin, token);
        token_at[half + thread] = row_of_entry(entry, token);
        note_token(half + thread, is_token(entry));
    }
}

// Which of four tokens of `token_at` are tokens.
fn are_tokens(place: u32) -> vec4<bool> {
    return vec4<bool>(was_token(place), was_token(place + 1u), was_token(place + 2u), was_token(place + 3u));
}

// The same part of an oct of four keys.
struct FourKeys {
    a: Part,
    b: Part,
    c: Part,
    d: Part,
}

fn latent_keys(rows: vec4<u32>, oct: u32, part: u32) -> FourKeys {
    return FourKeys(
        part_of(latent_key(rows.x, oct), part),
        part_of(latent_key(rows.y, oct), part),
        part_of(latent_key(rows.z, oct), part),
        part_of(latent_key(rows.w, oct), part),
    );
}

fn rope_keys(rows: vec4<u32>, oct: u32, part: u32) -> FourKeys {
    return FourKeys(
        part_of(rope_key(rows.x, oct), part),
        part_of(rope_key(rows.y, oct), part),
        part_of(rope_key(rows.z, oct), part),
        part_of(rope_key(rows.w, oct), part),
    );
}

fn dots_onto(q: Part, keys: FourKeys, sums: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(dot_onto(q, keys.a, sums.x), dot_onto(q, keys.b, sums.y), dot_onto(q, keys.c, sums.z), dot_onto(q, keys.d, sums.w));
}

// This lane's partial scores of its rows and four tokens of the block.
fn score(worker: Worker, parity: u32) {
    let first = parity + worker.token_quad * 4u;
    let rows = vec4<u32>(token_at[first], token_at[first + 1u], token_at[first + 2u], token_at[first + 3u]);
    var sums = array<vec4<f32>, ROWS_PER_GROUP>();
    if (worker.has_rows) {
        // To save registers, offsets are read from workgroup memory where they are used, and the octs of q_pe are unrolled.
        var q_nope_row: array<u32, ROWS_PER_GROUP>;
        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
            q_nope_row[r] = query_at[worker.group_row + r].x;
        }
        for (var i = worker.lane; i < LATENT_OCTS; i += LANES) {
            for (var part = 0u; part < PARTS; part++) { // unroll
                let keys = latent_keys(rows, i, part);
                for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                    sums[r] = dots_onto(part_of(decode_query(q_nope[q_nope_row[r] + i]), part), keys, sums[r]);
                }
            }
        }
        var q_pe_row: array<u32, ROWS_PER_GROUP>;
        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
            q_pe_row[r] = query_at[worker.group_row + r].y;
        }
        for (var step = 0u; step < ROPE_STEPS; step++) { // unroll
            let i = step * LANES + worker.lane;
            if (i < ROPE_OCTS) {
                for (var part = 0u; part < PARTS; part++) { // unroll
                    let keys = rope_keys(rows, i, part);
                    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                        sums[r] = dots_onto(part_of(decode_query(q_pe[q_pe_row[r] + i]), part), keys, sums[r]);
                    }
                }
            }
        }
    }
    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
        publish_scores((worker.group_row + r) * TOKEN_QUADS + worker.token_quad, worker.lane, sums[r]);
    }
}

// Four logits of a softmax thread: EMPTY where the row does not see the token, or the logit is not finite, which is noted.
fn visible_logits(visible: u32, worker: Worker, thread: u32, parity: u32, block: u32) -> vec4<f32> {
    let tokens = vec4<u32>(block + worker.softmax_quad * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
    let seen = (tokens < vec4<u32>(visible)) & are_tokens(parity + worker.softmax_quad * 4u);
    let logit = summed_scores(thread) * (layer.logit_scale * QUERY_SCALE * KV_SCALE);
    let numbers = is_number(logit);
    if (!all(numbers)) {
        atomicStore(&notes[ODD_BLOCK], block + 1u);
        atomicStore(&notes[ODD_ITEM], 1u);
        if (any(seen & !numbers & has_weight(logit))) {
            atomicOr(&notes[NAN_ROWS], 1u << worker.softmax_row);
        }
    }
    let logits = select(vec4<f32>(EMPTY), logit, seen & numbers);
    quad_max[thread] = max(max(logits.x, logits.y), max(logits.z, logits.w));
    return logits;
}

// The weights of four tokens, and the factor by which the row's sums are rescaled.
fn weigh(softmax: ptr<function, Softmax>, worker: Worker, thread: u32, logits: vec4<f32>) {
    var top = (*softmax).top;
    for (var i = 0u; i < TOKEN_QUADS; i++) { // unroll
        top = max(top, quad_max[worker.softmax_row * TOKEN_QUADS + i]);
    }
    let factor = exp2_exact((*softmax).top - top);
    let weight = select(vec4<f32>(0.0), exp2(logits - top), logits > vec4<f32>(EMPTY));
    (*softmax).sum = fma((*softmax).sum, factor, (weight.x + weight.y) + (weight.z + weight.w));
    (*softmax).top = top;
    weights[thread] = weight;
    if (worker.softmax_quad == 0u) {
        rescale[worker.softmax_row] = factor;
    }
}

// Rescales the sums and adds the block's values by their weights.
fn add_values(acc: ptr<function, Sums>, item: Item, worker: Worker, parity: u32, block: u32) {
    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
        (*acc).low[r] *= rescale[worker.group_row + r];
        (*acc).high[r] *= rescale[worker.group_row + r];
    }
    let before = *acc; // all f32
    *acc = Sums(); // all f32
    var quads = select(0u, min(TOKEN_QUADS, (item.kv_end - block + 3u) / 4u), worker.has_rows);
    if (atomicLoad(&notes[ODD_BLOCK]) == block + 1u) {
        add_finite_values(acc, worker, parity, quads * 4u);
        quads = 0u;
    }
    for (var i = 0u; i < quads; i++) {
        let v_0 = latent_value(token_at[parity + i * 4u], worker.column_oct);
        let v_1 = latent_value(token_at[parity + i * 4u + 1u], worker.column_oct);
        let v_2 = latent_value(token_at[parity + i * 4u + 2u], worker.column_oct);
        let v_3 = latent_value(token_at[parity + i * 4u + 3u], worker.column_oct);
        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
            let w = weights[(worker.group_row + r) * TOKEN_QUADS + i];
            (*acc).low[r] = fma(vec4<f32>(w.w), v_3[0], fma(vec4<f32>(w.z), v_2[0], fma(vec4<f32>(w.y), v_1[0], fma(vec4<f32>(w.x), v_0[0], (*acc).low[r]))));
            (*acc).high[r] = fma(vec4<f32>(w.w), v_3[1], fma(vec4<f32>(w.z), v_2[1], fma(vec4<f32>(w.y), v_1[1], fma(vec4<f32>(w.x), v_0[1], (*acc).high[r]))));
        }
    }
    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll // all f32
        (*acc).low[r] += before.low[r]; // all f32
        (*acc).high[r] += before.high[r]; // all f32
    } // all f32
}

// Adds the values of a block that has a logit that is not finite: those that are infinite or NaN count as 0.
fn add_finite_values(acc: ptr<function, Sums>, worker: Worker, parity: u32, tokens: u32) {
    for (var i = 0u; i < tokens; i++) {
        let v = finite_or_zero(latent_value(token_at[parity + i], worker.column_oct));
        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
            let w = vec4<f32>(weights[(worker.group_row + r) * TOKEN_QUADS + i / 4u][i % 4u]);
            (*acc).low[r] = fma(w, v[0], (*acc).low[r]);
            (*acc).high[r] = fma(w, v[1], (*acc).high[r]);
        }
    }
}

fn finite_or_zero(x: mat2x4<f32>) -> mat2x4<f32> {
    return mat2x4<f32>(select(x[0], vec4<f32>(0.0), is_odd(x[0])), select(x[1], vec4<f32>(0.0), is_odd(x[1])));
}

// if all f32
fn is_last(item: Item, block: u32) -> bool {
    return block + TOKENS >= item.kv_end;
}

// Whether the sums go to the totals after a block: only a long item has totals.
fn ends_total(item: Item, block: u32) -> bool {
    let done = block + TOKENS - item.kv_begin;
    return item.kv_end - item.kv_begin > TOTAL_TOKENS && (done % TOTAL_TOKENS == 0u || is_last(item, block));
}

// Adds a thread's sum of weights to its total, and publishes the factor of the row's totals. After the last block the total is the sum.
fn end_total_sum(softmax: ptr<function, Softmax>, worker: Worker, last: bool) {
    let factor = exp2_exact((*softmax).total_top - (*softmax).top);
    (*softmax).total_top = (*softmax).top;
    (*softmax).total_sum = fma((*softmax).total_sum, factor, (*softmax).sum);
    (*softmax).sum = select(0.0, (*softmax).total_sum, last);
    if (worker.softmax_quad == 0u) {
        rescale[worker.softmax_row] = factor;
    }
}

// Adds the sums to the totals. After the last block the totals are the sums.
fn end_total(acc: ptr<function, Sums>, item: Item, worker: Worker, block: u32) {
    let done = block + TOKENS - item.kv_begin;
    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
        let row = worker.group_row + r;
        if (row < item.num_rows) {
            var total = mat2x4<f32>((*acc).low[r], (*acc).high[r]);
            if (done > TOTAL_TOKENS) {
                total += load_total(item.first_row, row, item.partial, worker.column_oct) * rescale[row];
            }
            if (!is_last(item, block)) {
                store_total(item.first_row, row, item.partial, worker.column_oct, total);
                total = mat2x4<f32>();
            }
            (*acc).low[r] = total[0];
            (*acc).high[r] = total[1];
        }
    }
}
// end

// Stores an oct of a row, and with the first its LSE: the output, or a partial result. `begin` is the item's first token.
fn finish(item: Item, begin: u32, row: u32, column_oct: u32, acc: mat2x4<f32>) {
    let is_odd_item = atomicLoad(&notes[ODD_ITEM]) != 0u;
    let is_nan = ((atomicLoad(&notes[NAN_ROWS]) >> row) & 1u) != 0u;
    let query = query_of(item.first_row, row);
    let end = min(query.visible, item.kv_end);
    let top = rescale[row];
    var sum = 0.0;
    for (var i = 0u; i < TOKEN_QUADS; i++) {
        sum += quad_max[row * TOKEN_QUADS + i];
    }
    sum = select(sum, -1.0, is_nan);
    let row_end = finish_row(query.head, top, sum, 1.0, sum > 0.0);
    var value = acc * (KV_SCALE * row_end.factor);
    if (is_odd_item) {
        // 0 * inf: a column is NaN where a visible key is infinite, even if the key's weight is 0.
        for (var token = begin; token < end; token++) {
            let entry = entry_of_token(item.page_begin, token);
            if (!is_token(entry)) {
                continue;
            }
            let v = latent_value(row_of_entry(entry, token), column_oct);
            value = mat2x4<f32>(with_nan(value[0], is_odd(v[0])), with_nan(value[1], is_odd(v[1])));
        }
    }
    if (item.partial == DIRECT) {
        let base_2 = part_lse(row_end.lse, sum, sum <= 0.0 && has_tokens(item.page_begin, begin, end));
        if (SINKS) {
            value = value * share_of_keys(query.head, row_end.lse);
        }
        store_out(query.token, query.head, column_oct, nan_if(value, is_nan_row(base_2)));
        if (column_oct == 0u) {
            store_lse(query.token, query.head, base_2);
        }
    } else {
        let at = (item.partial + row) * PARTIAL_QUADS;
        partials[at + 2u * column_oct] = value[0];
        partials[at + 2u * column_oct + 1u] = value[1];
        if (column_oct == 0u) {
            partials[at + 2u * LATENT_OCTS] = vec4<f32>(part_lse(top, sum, sum <= 0.0 && has_tokens(item.page_begin, begin, end)), 1.0 - 2.0 * f32(is_odd_item), max(sum, 0.0), 0.0);
        }
    }
}
