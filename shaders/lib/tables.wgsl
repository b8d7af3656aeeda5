// A step's tables and page list, two arrays of words (src/tables.rs), and its scratch. Every op of a step binds all.
struct Slice {
    first_item: u32, // work items before this one belong to earlier slices
    end_item: u32,
    num_merges: u32,
    page_size: u32,
    num_pages: u32,
    items_at: u32, // where the tables' sections begin
    queries_at: u32,
    merges_at: u32,
    merge_partials_at: u32,
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

// bindings 0 and 3 are the tables and the page list: lib/read.wgsl or lib/pinned.wgsl
@group(1) @binding(1) var<storage, read_write> partials: array<vec4<f32>>; // [partials, 2 * LATENT_OCTS + 1]: row, then its LSE
@group(1) @binding(2) var<uniform> slice: Slice;

const PARTIAL_QUADS = 2u * LATENT_OCTS + 1u; // a row's latent, then its base-2 LSE and what the latent is yet to be multiplied with
const DIRECT = 0xFFFFFFFFu; // the partial of an item that writes its output itself
const EMPTY = -1.0e38; // a finite stand-in for the -inf of a row that has seen no key
const MINUS_INFINITY = 0xFF800000u;

// exp2 whose value at 0 is 1 on every device: rescaling by an unchanged maximum must change no bit.
fn exp2_exact(x: f32) -> f32 {
    return select(exp2(x), 1.0, x == 0.0);
}
