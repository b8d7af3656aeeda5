// Attention of one tile of query rows over one range of tokens: a split of a split-KV decode.
//
// A workgroup takes one work item. For each block of TOKENS tokens:
//   1. scores   groups of LANES lanes each own ROWS_PER_GROUP rows x 4 tokens; a lane adds up every LANES-th quad of
//               the row, then the lanes' partial sums are joined (lib/sum_*.wgsl)
//   2. softmax  one thread a row and token quad: block maximum, online rescale, weights 2^(s - max)
//   3. values   each thread owns one quad of output columns for all ROWS rows: acc[row] += weight * value
// The cache is read in place, not staged: a row of keys serves all ROWS rows from registers.
//
// Masked tokens weigh exactly 0 and an unchanged maximum rescales by exactly 1, so a row's result does not depend on
// which rows share its tile.

var<workgroup> token_at: array<u32, TOKEN_SLOTS>; // [2, TOKENS]: first quad of each token's cache row, this block and the next
var<workgroup> quad_max: array<f32, TILE_QUADS_PADDED>; // [ROWS, TOKEN_QUADS]
var<workgroup> weights: array<vec4<f32>, TILE_QUADS>; // [ROWS, TOKEN_QUADS], four tokens each
var<workgroup> rescale: array<f32, ROWS_PADDED>; // [ROWS]

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

// First quad of a token's cache row.
fn cache_row(page_begin: u32, token: u32) -> u32 {
    let page_size = tables[PAGE_SIZE];
    var page = tables[tables[PAGES_AT] + page_begin + token / page_size];
    if (CLAMP_PAGES) {
        page = min(page, tables[NUM_PAGES] - 1u);
    }
    return layer.kv_at + page * layer.kv_block_stride + (token % page_size) * ROW_QUADS;
}

fn dot_onto(q: vec4<f32>, k: vec4<f32>, sum: f32) -> f32 {
    return fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sum))));
}

@compute @workgroup_size(THREADS)
fn mla_decode(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) num_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
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

    // Scores: which rows and tokens of the block this lane works on.
    let lane = thread % LANES;
    let lane_group = thread / LANES;
    let token_quad = lane_group % TOKEN_QUADS;
    let group_row = (lane_group / TOKEN_QUADS) * ROWS_PER_GROUP;
    var q_nope_row: array<u32, ROWS_PER_GROUP>;
    var q_pe_row: array<u32, ROWS_PER_GROUP>;
    for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
        // A tile's missing rows repeat its last one; their results go nowhere.
        let query = query_of(first_row, min(group_row + r, num_rows - 1u));
        q_nope_row[r] = layer.q_nope_at + query.token * layer.q_nope_token_stride + query.head * layer.q_nope_head_stride;
        q_pe_row[r] = layer.q_pe_at + query.token * layer.q_pe_token_stride + query.head * layer.q_pe_head_stride;
    }

    // Softmax: which row and tokens this thread works on, and the row's state.
    let softmax_row = min(thread / TOKEN_QUADS, ROWS - 1u);
    let softmax_quad = thread % TOKEN_QUADS;
    let in_softmax = thread < TILE_QUADS;
    var visible = query_of(first_row, min(softmax_row, num_rows - 1u)).visible;
    visible = min(visible, kv_end);
    var row_max = EMPTY;
    var row_sum = 0.0; // over this thread's tokens only

    // Values: this thread's quad of columns.
    var acc = array<vec4<f32>, ROWS>();

    if (thread < TOKENS && kv_begin < kv_end) {
        token_at[thread] = cache_row(page_begin, min(kv_begin + thread, kv_end - 1u));
    }
    workgroupBarrier();

    var parity = 0u;
    for (var block = kv_begin; block < kv_end; block += TOKENS) {
        // 1. scores
        var key_row: array<u32, 4>;
        for (var t = 0u; t < 4u; t++) { // unroll
            key_row[t] = token_at[parity + token_quad * 4u + t];
        }
        var score = array<vec4<f32>, ROWS_PER_GROUP>();
        for (var i = lane; i < LATENT_QUADS; i += LANES) {
            let k0 = decode_kv(kv[key_row[0u] + i]);
            let k1 = decode_kv(kv[key_row[1u] + i]);
            let k2 = decode_kv(kv[key_row[2u] + i]);
            let k3 = decode_kv(kv[key_row[3u] + i]);
            for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                let q = decode_query(q_nope[q_nope_row[r] + i]);
                score[r] = vec4<f32>(dot_onto(q, k0, score[r].x), dot_onto(q, k1, score[r].y), dot_onto(q, k2, score[r].z), dot_onto(q, k3, score[r].w));
            }
        }
        for (var i = lane; i < ROPE_QUADS; i += LANES) {
            let k0 = decode_kv(kv[key_row[0u] + LATENT_QUADS + i]);
            let k1 = decode_kv(kv[key_row[1u] + LATENT_QUADS + i]);
            let k2 = decode_kv(kv[key_row[2u] + LATENT_QUADS + i]);
            let k3 = decode_kv(kv[key_row[3u] + LATENT_QUADS + i]);
            for (var r = 0u; r < ROWS_PER_GROUP; r++) { // unroll
                let q = decode_query(q_pe[q_pe_row[r] + i]);
                score[r] = vec4<f32>(dot_onto(q, k0, score[r].x), dot_onto(q, k1, score[r].y), dot_onto(q, k2, score[r].z), dot_onto(q, k3, score[r].w));
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
            logits = select(logits, summed_scores(thread) * layer.logit_scale, seen);
            quad_max[thread] = max(max(logits.x, logits.y), max(logits.z, logits.w));
        }
        workgroupBarrier();
        if (in_softmax) {
            var new_max = row_max;
            for (var i = 0u; i < TOKEN_QUADS; i++) { // unroll
                new_max = max(new_max, quad_max[softmax_row * TOKEN_QUADS + i]);
            }
            let factor = exp2_exact(row_max - new_max);
            let weight = select(vec4<f32>(0.0), exp2(logits - new_max), seen);
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
        for (var r = 0u; r < ROWS; r++) { // unroll
            acc[r] *= rescale[r];
        }
        let quads = min(TOKEN_QUADS, (kv_end - block + 3u) / 4u);
        for (var i = 0u; i < quads; i++) {
            // Past the end, token_at repeats the last token, which then weighs 0.
            let v0 = decode_kv(kv[token_at[parity + i * 4u] + thread]);
            let v1 = decode_kv(kv[token_at[parity + i * 4u + 1u] + thread]);
            let v2 = decode_kv(kv[token_at[parity + i * 4u + 2u] + thread]);
            let v3 = decode_kv(kv[token_at[parity + i * 4u + 3u] + thread]);
            for (var r = 0u; r < ROWS; r++) { // unroll
                let w = weights[r * TOKEN_QUADS + i];
                acc[r] = fma(vec4<f32>(w.w), v3, fma(vec4<f32>(w.z), v2, fma(vec4<f32>(w.y), v1, fma(vec4<f32>(w.x), v0, acc[r]))));
            }
        }
        parity = TOKENS - parity;
    }

    // Each row's sum and maximum, for all threads.
    if (in_softmax) {
        quad_max[thread] = row_sum;
        if (softmax_quad == 0u) {
            rescale[softmax_row] = row_max;
        }
    }
    workgroupBarrier();
    for (var r = 0u; r < ROWS; r++) { // unroll
        if (r < num_rows) {
            var sum = 0.0;
            for (var i = 0u; i < TOKEN_QUADS; i++) { // unroll
                sum += quad_max[r * TOKEN_QUADS + i];
            }
            let any = sum > 0.0;
            let divisor = select(1.0, sum, any);
            let value = acc[r] * (1.0 / divisor);
            let base_2 = select(EMPTY, rescale[r] + log2(divisor), any);
            if (slot == DIRECT) {
                let query = query_of(first_row, r);
                store_out(query.token, query.head, thread, value);
                if (thread == 0u) {
                    store_lse(query.token, query.head, base_2, any);
                }
            } else {
                let at = (slot + r) * PARTIAL_QUADS;
                partials[at + thread] = value;
                if (thread == 0u) {
                    partials[at + LATENT_QUADS] = vec4<f32>(base_2, 0.0, 0.0, 0.0);
                }
            }
        }
    }
}
