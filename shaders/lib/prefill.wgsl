// The bindings and tiles of mla_prefill. A Unit is what inputs are read by: a quad (4 consecutive elements) or an oct (8).
// Concatenated with: lib/out_*, lib/prefill_read or lib/prefill_pinned. Constants: NUM_HEADS; alias Unit.
struct PrefillParams {
    logit_scale: f32, // softmax_scale * log2(e)
    max_tokens: u32, // query tokens that q_nope and q_pe hold, at least 1
    max_keys: u32, // keys that k_nope, k_pe and v hold, at least 1
    max_rows: u32, // rows of the output and the LSE, at least 1
    q_nope_at: u32, // Units, as all offsets and strides below but those of the output and the LSE
    q_nope_token_stride: u32,
    q_nope_head_stride: u32,
    q_pe_at: u32,
    q_pe_token_stride: u32,
    q_pe_head_stride: u32,
    k_nope_at: u32,
    k_nope_token_stride: u32,
    k_nope_head_stride: u32,
    k_pe_at: u32,
    k_pe_token_stride: u32,
    k_pe_head_stride: u32,
    v_at: u32,
    v_token_stride: u32,
    v_head_stride: u32,
    out_at: u32, // quads
    out_token_stride: u32,
    out_head_stride: u32,
    lse_at: u32, // f32 elements
    lse_token_stride: u32,
    lse_head_stride: u32,
    v_scale: f32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + tiles * TILE_WORDS] num_tiles, then tiles
@group(1) @binding(0) var<uniform> params: PrefillParams;
// Bindings 1 to 5 are queries, keys and values: lib/prefill_read.wgsl or lib/prefill_pinned.wgsl.
@group(1) @binding(6) var<storage, read_write> out: array<OutQuad>; // [rows, H, V]
@group(1) @binding(7) var<storage, read_write> lse: array<u32>; // f32 bits, [rows, H]

const TILE_WORDS = 6u;
const EMPTY = -1.0e38; // finite sentinel for the LSE -inf of a row that attends to no key
const MINUS_INFINITY = 0xFF800000u;

// A tile of query rows of one sequence and one head, and the range of its keys: PrefillTile of src/ops/mla_prefill/tiles.rs.
struct Tile {
    head: u32,
    first_token: u32,
    num_rows: u32,
    kv_begin: u32,
    num_keys: u32,
    first_visible: i32,
    first_row: u32, // of the output
    last_key: u32, // the last key that may be read
}

// Workgroups are numbered by tile, then head: the long tiles of all heads run first, so that the device drains on short ones. Numbered
// by head, then tile, whose tiles share keys, an H200 took 11 % longer for 16 heads and 1 % less for 128.
// A number past the last tile reads some other entry of the table: the caller leaves, but this load does not wait for num_tiles.
fn tile_of(number: u32) -> Tile {
    let at = min(1u + number / NUM_HEADS * TILE_WORDS, arrayLength(&table) - TILE_WORDS);
    let kv_begin = table[at + 2u];
    let num_keys = table[at + 3u];
    let last_key = min(kv_begin + max(num_keys, 1u) - 1u, params.max_keys - 1u);
    return Tile(number % NUM_HEADS, table[at], table[at + 1u], kv_begin, num_keys, bitcast<i32>(table[at + 4u]), table[at + 5u], last_key);
}

// A step prepared again after its commands were recorded may have more tokens than the binding's buffers, which no host check can see:
// the clamps keep accesses inside them. Rows and keys past the tile's end repeat the last one.
fn token_of(tile: Tile, row: u32) -> u32 {
    return min(tile.first_token + min(row, tile.num_rows - 1u), params.max_tokens - 1u);
}

fn key_of(tile: Tile, key: u32) -> u32 {
    return min(tile.kv_begin + key, tile.last_key);
}

fn output_row(tile: Tile, row: u32) -> u32 {
    return min(tile.first_row + min(row, tile.num_rows - 1u), params.max_rows - 1u);
}

// How many of the tile's keys a row attends to (the causal mask).
fn visible_to(tile: Tile, row: u32) -> u32 {
    return u32(clamp(tile.first_visible + i32(row), 0, i32(tile.num_keys)));
}

// Stores a quad of an output row, given without v_scale.
fn store_quad(tile: Tile, row: u32, column_quad: u32, value: vec4<f32>) {
    let at = params.out_at + output_row(tile, row) * params.out_token_stride + tile.head * params.out_head_stride;
    out[at + column_quad] = out_quad(bitcast<vec4<u32>>(value * params.v_scale), UNSCALED);
}

// Stores a row's LSE, given in base 2; `any` is false for a row that attends to no key, whose LSE is -inf.
fn store_lse(tile: Tile, row: u32, base_2: f32, any: bool) {
    let at = params.lse_at + output_row(tile, row) * params.lse_token_stride + tile.head * params.lse_head_stride;
    lse[at] = select(MINUS_INFINITY, bitcast<u32>(base_2 * LN_2), any);
}

const LN_2 = 0.6931471805599453;

// exp2 that is exactly 1 at 0 on every device: rescaling by an unchanged maximum must change no bit.
fn exp2_exact(x: f32) -> f32 {
    return select(exp2(x), 1.0, x == 0.0);
}
