// What an mla_prefill is bound with (src/gpu/ops/prefill.rs). A Unit is what a row is read by: a quad or an oct of its elements.
struct PrefillParams {
    logit_scale: f32, // softmax_scale * log2(e)
    max_tokens: u32, // query tokens, keys and rows that the buffers hold, each at least 1
    max_keys: u32,
    max_rows: u32, // of the output and the LSE
    q_nope_at: u32, // units, as all places and strides below but those of the output and the LSE
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
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + tiles * TILE_WORDS]
@group(1) @binding(0) var<uniform> params: PrefillParams;
// bindings 1 to 5 are what is read: lib/prefill_read.wgsl or lib/prefill_pinned.wgsl
@group(1) @binding(6) var<storage, read_write> out: array<OutQuad>; // [rows, H, V]
@group(1) @binding(7) var<storage, read_write> lse: array<u32>; // f32 bits, [rows, H]

const TILE_WORDS = 6u;
const EMPTY = -1.0e38; // a finite stand-in for the -inf of a row that has seen no key
const MINUS_INFINITY = 0xFF800000u;

// A tile of query rows of one sequence, and which keys they see: PrefillTile of src/prefill/plan.rs.
struct Tile {
    head: u32,
    first_token: u32,
    num_rows: u32,
    kv_begin: u32,
    num_keys: u32,
    first_visible: i32,
    first_row: u32, // of the output
    last_key: u32, // that may be read
}

// Workgroups are numbered by tiles, then heads: the long tiles of all heads come first, so that the device ends on short ones. By heads, then
// tiles, which share keys, an H200 took 11 % longer for 16 heads and 1 % less for 128.
// A number past the last tile is given something else of the table, so that this need not wait for the number of tiles.
fn tile_of(number: u32) -> Tile {
    let at = min(1u + number / NUM_HEADS * TILE_WORDS, arrayLength(&table) - TILE_WORDS);
    let kv_begin = table[at + 2u];
    let num_keys = table[at + 3u];
    let last_key = min(kv_begin + max(num_keys, 1u) - 1u, params.max_keys - 1u);
    return Tile(number % NUM_HEADS, table[at], table[at + 1u], kv_begin, num_keys, bitcast<i32>(table[at + 4u]), table[at + 5u], last_key);
}

// A step may be prepared again, with more tokens than the binding has, after its commands were recorded: no host check can see that,
// and these keep it inside of the buffers. Rows and keys past the tile's last one stand for the last.
fn token_of(tile: Tile, row: u32) -> u32 {
    return min(tile.first_token + min(row, tile.num_rows - 1u), params.max_tokens - 1u);
}

fn key_of(tile: Tile, key: u32) -> u32 {
    return min(tile.kv_begin + key, tile.last_key);
}

fn output_row(tile: Tile, row: u32) -> u32 {
    return min(tile.first_row + min(row, tile.num_rows - 1u), params.max_rows - 1u);
}

// Keys that a row sees.
fn visible_to(tile: Tile, row: u32) -> u32 {
    return u32(clamp(tile.first_visible + i32(row), 0, i32(tile.num_keys)));
}

// Four neighbouring elements of an output row.
fn store_quad(tile: Tile, row: u32, column_quad: u32, value: vec4<f32>) {
    let at = params.out_at + output_row(tile, row) * params.out_token_stride + tile.head * params.out_head_stride;
    out[at + column_quad] = out_quad(bitcast<vec4<u32>>(value), UNSCALED);
}

// A row's LSE from base 2; `any` is false for a row that sees no key.
fn store_lse(tile: Tile, row: u32, base_2: f32, any: bool) {
    let at = params.lse_at + output_row(tile, row) * params.lse_token_stride + tile.head * params.lse_head_stride;
    lse[at] = select(MINUS_INFINITY, bitcast<u32>(base_2 * LN_2), any);
}

const LN_2 = 0.6931471805599453;

// exp2 whose value at 0 is 1 on every device: rescaling by an unchanged maximum must change no bit.
fn exp2_exact(x: f32) -> f32 {
    return select(exp2(x), 1.0, x == 0.0);
}
