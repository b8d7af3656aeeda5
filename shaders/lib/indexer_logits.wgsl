// Runs of keys and a layer's arrays, of every variant of indexer_logits.
//
// A run is a part of the keys of one row of the logits, and of the columns behind them that get -inf. Tables:
// src/ops/indexer_logits/runs.rs. Constants: PAGE_SIZE, KEY_UNITS (units of `cache` in a key), UNIT_WORDS (words in such a unit), HEADS.
// Aliases: QOct, KeyOct. Concatenated with: lib/index_key_*, which has KeyUnit, key_oct and key_scale.

struct IndexerLogitsParams {
    q_base: u32, // in octs, as the strides
    q_token_stride: u32,
    q_head_stride: u32,
    weights_base: u32,
    weights_token_stride: u32,
    weights_head_stride: u32,
    kv_base: u32, // in units, as the stride
    kv_block_stride: u32,
    first_page: u32, // pages of this slab
    num_pages: u32,
    logits_base: u32,
    logits_row_stride: u32,
    max_tokens: u32,
    max_rows: u32,
    max_columns: u32,
    reserved_0: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + 6 * runs + pages]: the number of runs, runs, page ids
@group(1) @binding(0) var<uniform> params: IndexerLogitsParams;
@group(1) @binding(1) var<storage, read> q: array<QOct>; // [tokens, Hi, 16], strided
@group(1) @binding(2) var<storage, read> weights: array<f32>; // [tokens, Hi], strided
@group(1) @binding(3) var<storage, read> cache: array<KeyUnit>; // [num_pages, page_size, KEY_UNITS], strided; with codes a page's scales
@group(1) @binding(4) var<storage, read_write> logits: array<u32>; // [rows, columns], strided: bits of f32

const MINUS_INFINITY = 0xFF800000u;

struct Run {
    row: u32,
    token: u32,
    pages: u32, // in `table`
    begin: u32,
    end: u32,
    fill_end: u32,
}

// A run, within what the binding has room for; an empty one past the last. It returns in one place: FXC takes what an early return leaves
// for data that may differ between threads.
fn load_run(number: u32) -> Run {
    let count = table[0];
    var run = Run(0u, 0u, 0u, 0u, 0u, 0u);
    if (number < count) {
        let at = 1u + 6u * number;
        let row = table[at];
        let token = table[at + 1u];
        if (row < params.max_rows && token < params.max_tokens) {
            let end = min(table[at + 4u], params.max_columns);
            let fill_end = min(table[at + 5u], params.max_columns);
            run = Run(row, token, 1u + 6u * count + table[at + 2u], table[at + 3u], end, fill_end);
        }
    }
    return run;
}

// Where a key is.
struct Place {
    at: u32, // its first unit in `cache`; NOWHERE for a key that the run does not have, or that another slab has
    scale: u32, // the word of its scale
}

const NOWHERE = 0xFFFFFFFFu;

fn place_on(run: Run, key: u32, page_id: u32) -> Place {
    let page = page_id - params.first_page;
    if (key >= run.end || page >= params.num_pages) {
        return Place(NOWHERE, 0u);
    }
    let base = params.kv_base + page * params.kv_block_stride;
    let token = key % PAGE_SIZE;
    return Place(base + token * KEY_UNITS, (base + PAGE_SIZE * KEY_UNITS) * UNIT_WORDS + token);
}

// The page of a key; of the run's last key for one behind it.
fn page_of(run: Run, key: u32) -> u32 {
    return table[run.pages + min(key, run.end - 1u) / PAGE_SIZE];
}

fn query_oct(token: u32, head: u32, oct: u32) -> QOct {
    return q[params.q_base + token * params.q_token_stride + head * params.q_head_stride + oct];
}

fn weight_of(token: u32, head: u32) -> f32 {
    return weights[params.weights_base + token * params.weights_token_stride + head * params.weights_head_stride];
}

fn logit_at(run: Run, column: u32) -> u32 {
    return params.logits_base + run.row * params.logits_row_stride + column;
}
