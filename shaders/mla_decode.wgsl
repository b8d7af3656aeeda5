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

fn finite_or_zero(x: mat2x4<f32>) -> mat2x4<f32> {
    return mat2x4<f32>(select(x[0], vec4<f32>(0.0), is_odd(x[0])), select(x[1], vec4<f32>(0.0), is_odd(x[1])));
}

@compute @workgroup_size(THREADS)
fn mla_decode(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) num_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let item = slice.first_item + group_id.y * num_groups.x + group_id.x;
    if (item >= slice.end_item) {
        return;
    }
    let item_at = slice.items_at + item * 8u;
    let first_row = tables[item_at];
    let num_rows = tables[item_at + 1u];
    let page_begin = tables[item_at + 2u];
    let kv_begin = tables[item_at + 3u];
    let kv_end = tables[item_at + 4u];
    let partial = tables[item_at + 5u];

    // This thread's rows, its oct of columns, and for the scores its lane and tokens.
    let group_row = (thread / LATENT_OCTS) * ROWS_PER_GROUP;
    let column_oct = thread % LATENT_OCTS;
    let lane = column_oct % LANES;
    let token_quad = column_oct / LANES;
    // A row group past the tile's last row only takes part in barriers.
    let has_rows = group_row < num_rows;
    if (thread < ROWS) {
        // Rows past the last one repeat it; their results are not stored.
        let query = query_of(first_row, min(thread, num_rows - 1u));
        query_at[thread] = vec2<u32>(
            layer.q_nope_at + query.token * layer.q_nope_token_stride + query.head * layer.q_nope_head_stride,
            layer.q_pe_at + query.token * layer.q_pe_token_stride + query.head * layer.q_pe_head_stride,
        );
    }

    // Softmax: the row and tokens that this thread works on, and the row's state.
    let softmax_row = min(thread / TOKEN_QUADS, ROWS - 1u);
    let softmax_quad = thread % TOKEN_QUADS;
    let in_softmax = thread < TILE_QUADS;
    let visible = min(query_of(first_row, min(softmax_row, num_rows - 1u)).visible, kv_end);
    var row_max = EMPTY;
    var row_sum = 0.0; // over this thread's tokens only

    // Values: a row's oct of columns in two halves.
    var acc_low = array<vec4<f32>, ROWS_PER_GROUP>();
    var acc_high = array<vec4<f32>, ROWS_PER_GROUP>();
    var total_max = EMPTY; // all f32
    var total_sum = 0.0; // all f32

    if (thread < 4u) {
        atomicStore(&notes[thread], select(0u, kv_begin, thread == KV_BEGIN));
    }
    if (thread < TOKENS && kv_begin < kv_end) {
        token_at[thread] = cache_row(page_begin, min(kv_begin + thread, kv_end - 1u));
    }
    workgroupBarrier();

    var parity = 0u;
    for (var block = kv_begin; block < kv_end; block += TOKENS) {
        // 1. scores
        let row_0 = token_at[parity + token_quad * 4u];
        let row_1 = token_at[parity + token_quad * 4u + 1u];
        let row_2 = token_at[parity + token_quad * 4u + 2u];
        let row_3 = token_at[parity + token_quad * 4u + 3u];
        var score = array<vec4<f32>, ROWS_PER_GROUP>();
        if (has_rows) {
            // To save registers, offsets are read from workgroup memory where they are used, and the octs of q_pe are unrolled.
            var q_nope_row: array<u32, ROWS_PER_GROUP>;
            for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                q_nope_row[r] = query_at[group_row + r].x;
            }
            for (var i = lane; i < LATENT_OCTS; i += LANES) {
                for (var part = 0u; part < PARTS; part++) { // unroll
                    let k_0 = part_of(decode_kv(kv[row_0 + i]), part);
                    let k_1 = part_of(decode_kv(kv[row_1 + i]), part);
                    let k_2 = part_of(decode_kv(kv[row_2 + i]), part);
                    let k_3 = part_of(decode_kv(kv[row_3 + i]), part);
                    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                        let q = part_of(decode_query(q_nope[q_nope_row[r] + i]), part);
                        score[r] = vec4<f32>(dot_onto(q, k_0, score[r].x), dot_onto(q, k_1, score[r].y), dot_onto(q, k_2, score[r].z), dot_onto(q, k_3, score[r].w));
                    }
                }
            }
            var q_pe_row: array<u32, ROWS_PER_GROUP>;
            for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                q_pe_row[r] = query_at[group_row + r].y;
            }
            for (var step = 0u; step < ROPE_STEPS; step++) { // unroll
                let i = step * LANES + lane;
                if (i < ROPE_OCTS) {
                    for (var part = 0u; part < PARTS; part++) { // unroll
                        let k_0 = part_of(decode_kv(kv[row_0 + LATENT_OCTS + i]), part);
                        let k_1 = part_of(decode_kv(kv[row_1 + LATENT_OCTS + i]), part);
                        let k_2 = part_of(decode_kv(kv[row_2 + LATENT_OCTS + i]), part);
                        let k_3 = part_of(decode_kv(kv[row_3 + LATENT_OCTS + i]), part);
                        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                            let q = part_of(decode_query(q_pe[q_pe_row[r] + i]), part);
                            score[r] = vec4<f32>(dot_onto(q, k_0, score[r].x), dot_onto(q, k_1, score[r].y), dot_onto(q, k_2, score[r].z), dot_onto(q, k_3, score[r].w));
                        }
                    }
                }
            }
        }
        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
            publish_scores((group_row + r) * TOKEN_QUADS + token_quad, lane, score[r]);
        }
        workgroupBarrier();

        // 2. softmax
        let tokens = vec4<u32>(block + softmax_quad * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        let seen = tokens < vec4<u32>(visible);
        var logits = vec4<f32>(EMPTY);
        if (in_softmax) {
            let logit = summed_scores(thread) * (layer.logit_scale * QUERY_SCALE * KV_SCALE);
            let numbers = is_number(logit);
            if (!all(numbers)) {
                atomicStore(&notes[ODD_BLOCK], block + 1u);
                atomicStore(&notes[ODD_ITEM], 1u);
                if (any(seen & !numbers & has_weight(logit))) {
                    atomicOr(&notes[NAN_ROWS], 1u << softmax_row);
                }
            }
            logits = select(logits, logit, seen & numbers);
            quad_max[thread] = max(max(logits.x, logits.y), max(logits.z, logits.w));
        }
        workgroupBarrier();
        if (in_softmax) {
            var new_max = row_max;
            for (var i = 0u; i < TOKEN_QUADS; i++) { // unroll
                new_max = max(new_max, quad_max[softmax_row * TOKEN_QUADS + i]);
            }
            let factor = exp2_exact(row_max - new_max);
            let weight = select(vec4<f32>(0.0), exp2(logits - new_max), logits > vec4<f32>(EMPTY));
            row_sum = fma(row_sum, factor, (weight.x + weight.y) + (weight.z + weight.w));
            row_max = new_max;
            weights[thread] = weight;
            if (softmax_quad == 0u) {
                rescale[softmax_row] = factor;
            }
        }
        if (thread < TOKENS) {
            token_at[(TOKENS - parity) + thread] = cache_row(page_begin, min(block + TOKENS + thread, kv_end - 1u));
        }
        workgroupBarrier();

        // 3. values
        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
            acc_low[r] *= rescale[group_row + r];
            acc_high[r] *= rescale[group_row + r];
        }
        let before_low = acc_low; // all f32
        let before_high = acc_high; // all f32
        acc_low = array<vec4<f32>, ROWS_PER_GROUP>(); // all f32
        acc_high = array<vec4<f32>, ROWS_PER_GROUP>(); // all f32
        var quads = select(0u, min(TOKEN_QUADS, (kv_end - block + 3u) / 4u), has_rows);
        if (atomicLoad(&notes[ODD_BLOCK]) == block + 1u) {
            for (var i = 0u; i < quads * 4u; i++) {
                let v = finite_or_zero(decode_value(kv[token_at[parity + i] + column_oct]));
                for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                    let w = vec4<f32>(weights[(group_row + r) * TOKEN_QUADS + i / 4u][i % 4u]);
                    acc_low[r] = fma(w, v[0], acc_low[r]);
                    acc_high[r] = fma(w, v[1], acc_high[r]);
                }
            }
            quads = 0u;
        }
        for (var i = 0u; i < quads; i++) {
            // Past the end, token_at repeats the last token, which then weighs 0.
            let v_0 = decode_value(kv[token_at[parity + i * 4u] + column_oct]);
            let v_1 = decode_value(kv[token_at[parity + i * 4u + 1u] + column_oct]);
            let v_2 = decode_value(kv[token_at[parity + i * 4u + 2u] + column_oct]);
            let v_3 = decode_value(kv[token_at[parity + i * 4u + 3u] + column_oct]);
            for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                let w = weights[(group_row + r) * TOKEN_QUADS + i];
                acc_low[r] = fma(vec4<f32>(w.w), v_3[0], fma(vec4<f32>(w.z), v_2[0], fma(vec4<f32>(w.y), v_1[0], fma(vec4<f32>(w.x), v_0[0], acc_low[r]))));
                acc_high[r] = fma(vec4<f32>(w.w), v_3[1], fma(vec4<f32>(w.z), v_2[1], fma(vec4<f32>(w.y), v_1[1], fma(vec4<f32>(w.x), v_0[1], acc_high[r]))));
            }
        }
        for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll // all f32
            acc_low[r] += before_low[r]; // all f32
            acc_high[r] += before_high[r]; // all f32
        } // all f32
        let done = block + TOKENS - kv_begin; // all f32
        let is_last = block + TOKENS >= kv_end; // all f32
        if (kv_end - kv_begin > TOTAL_TOKENS && (done % TOTAL_TOKENS == 0u || is_last)) { // all f32
            workgroupBarrier(); // all f32
            if (in_softmax) { // all f32
                let factor = exp2_exact(total_max - row_max); // all f32
                total_max = row_max; // all f32
                total_sum = fma(total_sum, factor, row_sum); // all f32
                row_sum = select(0.0, total_sum, is_last); // all f32
                if (softmax_quad == 0u) { // all f32
                    rescale[softmax_row] = factor; // all f32
                } // all f32
            } // all f32
            workgroupBarrier(); // all f32
            for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll // all f32
                if (group_row + r < num_rows) { // all f32
                    var total = mat2x4<f32>(acc_low[r], acc_high[r]); // all f32
                    if (done > TOTAL_TOKENS) { // all f32
                        total += load_total(first_row, group_row + r, partial, column_oct) * rescale[group_row + r]; // all f32
                    } // all f32
                    if (!is_last) { // all f32
                        store_total(first_row, group_row + r, partial, column_oct, total); // all f32
                        total = mat2x4<f32>(); // all f32
                    } // all f32
                    acc_low[r] = total[0]; // all f32
                    acc_high[r] = total[1]; // all f32
                } // all f32
            } // all f32
        } // all f32
        parity = TOKENS - parity;
    }

    // Each row's sum and maximum, for all threads, once the last of them has read `rescale` for its values.
    workgroupBarrier();
    let is_odd_item = atomicLoad(&notes[ODD_ITEM]) != 0u;
    let begin = atomicLoad(&notes[KV_BEGIN]);
    let nan_rows = atomicLoad(&notes[NAN_ROWS]);
    if (in_softmax) {
        quad_max[thread] = row_sum;
        if (softmax_quad == 0u) {
            rescale[softmax_row] = row_max;
        }
    }
    workgroupBarrier();
    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
        let row = group_row + r;
        if (row < num_rows) {
            var sum = 0.0;
            for (var i = 0u; i < TOKEN_QUADS; i++) {
                sum += quad_max[row * TOKEN_QUADS + i];
            }
            sum = select(sum, -1.0, ((nan_rows >> row) & 1u) != 0u);
            let any = sum > 0.0;
            let divisor = select(1.0, sum, any);
            var value = mat2x4<f32>(acc_low[r], acc_high[r]) * (KV_SCALE * (1.0 / divisor));
            let query = query_of(first_row, row);
            if (is_odd_item) {
                // 0 * inf: a column is NaN where a visible key is infinite, even if the key's weight is 0.
                for (var token = begin; token < min(query.visible, kv_end); token++) {
                    let v = decode_value(kv[cache_row(page_begin, token) + column_oct]);
                    value = mat2x4<f32>(with_nan(value[0], is_odd(v[0])), with_nan(value[1], is_odd(v[1])));
                }
            }
            let sees_keys = min(query.visible, kv_end) > begin;
            if (partial == DIRECT) {
                let base_2 = part_lse(rescale[row] + log2(divisor), sum, sees_keys);
                store_out(query.token, query.head, column_oct, nan_if(value, is_nan_row(base_2)));
                if (column_oct == 0u) {
                    store_lse(query.token, query.head, base_2);
                }
            } else {
                let at = (partial + row) * PARTIAL_QUADS;
                partials[at + 2u * column_oct] = value[0];
                partials[at + 2u * column_oct + 1u] = value[1];
                if (column_oct == 0u) {
                    partials[at + 2u * LATENT_OCTS] = vec4<f32>(part_lse(rescale[row], sum, sees_keys), 1.0 - 2.0 * f32(is_odd_item), max(sum, 0.0), 0.0);
                }
            }
        }
    }
}
