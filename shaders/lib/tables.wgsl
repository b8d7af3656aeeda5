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

// Bindings 0 and 3 are the tables and the page list: lib/read.wgsl or lib/pinned.wgsl, and the same name with _pages.
@group(1) @binding(1) var<storage, read_write> partials: array<vec4<f32>>; // [partials, PARTIAL_QUADS]
@group(1) @binding(2) var<uniform> slice: Slice;

// A query row's output, then a quad: its largest base-2 logit, the factor that the output still needs, negative where the output may hold
// NaN, and the sum of its weights. Maximum and sum are kept apart, since the LSE of a large logit has rounded the sum away. In place of a
// maximum there may be EMPTY and the like; their sum is 0.
const PARTIAL_QUADS = 2u * LATENT_OCTS + 1u;
const DIRECT = 0xFFFFFFFFu; // `partial` of an item that writes `out` itself: its rows have one split
const MINUS_INFINITY = 0xFF800000u;
const QUIET_NAN = 0x7FC00000u;

// A shader may be compiled as if no NaN and no infinity existed. So elements and logits that are not finite are detected by their bits and
// left out of all sums, and finite numbers beyond every logit mark a row whose LSE they decide. These constants are typed: DXC makes
// doubles of untyped ones.
const EMPTY: f32 = -1.0e38; // the row has seen no key: -inf
const WEIGHTLESS: f32 = -0.95e38; // each key that it has seen has a logit of -inf: NaN, unless another part has weight
const NO_NUMBER: f32 = 1.0e38; // it has seen a logit of NaN or +inf: NaN
const LOGIT_END = 0x7E876ABDu; // 9e37: a logit of this magnitude counts as infinite

// Which logits are numbers, told by their bits: neither NaN, nor infinite, nor beyond LOGIT_END.
fn is_number(logits: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(logits) & vec4<u32>(0x7FFFFFFFu)) < vec4<u32>(LOGIT_END);
}

// Whether a logit that is no number makes its row NaN: NaN and +inf do; -inf does not, since it weighs 0.
fn has_weight(logits: vec4<f32>) -> vec4<bool> {
    let bits = bitcast<vec4<u32>>(logits);
    return (bits < vec4<u32>(0x80000000u)) | (bits > vec4<u32>(MINUS_INFINITY));
}

// Elements that are infinite or NaN.
fn is_odd(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7F800000u)) == vec4<u32>(0x7F800000u);
}

fn with_nan(x: vec4<f32>, is_nan: vec4<bool>) -> vec4<f32> {
    return bitcast<vec4<f32>>(select(bitcast<vec4<u32>>(x), vec4<u32>(QUIET_NAN), is_nan));
}

fn nan_if(x: mat2x4<f32>, is_nan: bool) -> mat2x4<f32> {
    return mat2x4<f32>(with_nan(x[0], vec4<bool>(is_nan)), with_nan(x[1], vec4<bool>(is_nan)));
}

// The LSE or the maximum of a part of a row, or the constant above that replaces it. `sum` is the sum of its weights, below 0 if a logit of
// NaN or +inf was among them.
fn part_lse(base_2: f32, sum: f32, sees_keys: bool) -> f32 {
    if (sum > 0.0) {
        return base_2;
    }
    return select(select(EMPTY, WEIGHTLESS, sees_keys), NO_NUMBER, sum < 0.0);
}

// Whether a whole row with that LSE is NaN.
fn is_nan_row(base_2: f32) -> bool {
    return base_2 >= NO_NUMBER || (base_2 > EMPTY && base_2 <= WEIGHTLESS);
}

// exp2 that is exactly 1 at 0 on every device: rescaling by an unchanged maximum must change no bit.
fn exp2_exact(x: f32) -> f32 {
    return select(exp2(x), 1.0, x == 0.0);
}
