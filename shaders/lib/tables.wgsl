// Bind group 1 of the decode: the step's tables and page list (src/tables.rs) and its partial results. mla_decode and mla_merge bind all
// of it. Constants: LATENT_OCTS, octs (8 consecutive elements) of the latent.
struct Slice {
    first_item: u32, // work items before this one belong to earlier slices
    end_item: u32,
    num_merges: u32,
    page_size: u32,
    num_pages: u32,
    items_at: u32, // offsets of the tables' sections, in words
    queries_at: u32,
    merges_at: u32,
    merge_partials_at: u32,
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

// Bindings 0 and 3 are the tables and the page list: lib/read.wgsl or lib/pinned.wgsl.
@group(1) @binding(1) var<storage, read_write> partials: array<vec4<f32>>; // [partials, PARTIAL_QUADS]
@group(1) @binding(2) var<uniform> slice: Slice;

const PARTIAL_QUADS = 2u * LATENT_OCTS + 1u; // a query row's output, then its base-2 LSE and the factor that the output still needs
const DIRECT = 0xFFFFFFFFu; // `partial` of an item that writes `out` itself: its rows have one split
const EMPTY = -1.0e38; // finite sentinel for the LSE -inf of a row that attends to no key
const MINUS_INFINITY = 0xFF800000u;

// exp2 that is exactly 1 at 0 on every device: rescaling by an unchanged maximum must change no bit.
fn exp2_exact(x: f32) -> f32 {
    return select(exp2(x), 1.0, x == 0.0);
}
