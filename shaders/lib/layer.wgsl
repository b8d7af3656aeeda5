// Bind group 0 of the decode: one layer's buffers and strides, bound once. An oct is 8 consecutive elements.
// Concatenated with: lib/tables, lib/oct_*, lib/store_*.
struct Layer {
    logit_scale: f32, // softmax_scale * q_scale * k_scale * log2(e)
    out_scale: f32, // k_scale: the value is the latent
    lse_scale: f32, // base-2 LSE to the base asked for
    num_heads: u32,
    q_nope_at: u32, // octs, as all offsets and strides below but those of the LSE
    q_nope_token_stride: u32,
    q_nope_head_stride: u32,
    q_pe_at: u32,
    q_pe_token_stride: u32,
    q_pe_head_stride: u32,
    kv_at: u32,
    kv_block_stride: u32,
    out_at: u32,
    out_token_stride: u32,
    out_head_stride: u32,
    lse_at: u32, // f32 elements
    lse_token_stride: u32,
    lse_head_stride: u32,
    max_queries: u32, // query tokens that q, out and lse hold, at least 1
    has_lengths: u32, // the rest is of a sparse decode: whether its lists have lengths
    indices_at: u32, // words, as the three below
    indices_stride: u32,
    lengths_at: u32,
    lengths_stride: u32,
    first_slot: u32, // slots that the cache holds
    num_slots: u32,
    reserved_0: u32,
    reserved_1: u32,
}

@group(0) @binding(0) var<storage, read> q_nope: array<QueryOct>; // [total_q, H, L / 8]
@group(0) @binding(1) var<storage, read> q_pe: array<QueryOct>; // [total_q, H, R / 8]
// binding 2 is the cache: lib/read.wgsl or lib/pinned.wgsl. Bindings 6 to 8: lib/listed.wgsl, lib/sinks.wgsl
@group(0) @binding(3) var<storage, read_write> out: array<OutOct>; // [total_q, H, L / 8]
@group(0) @binding(4) var<storage, read_write> lse: array<u32>; // f32 bits, [total_q, H]
@group(0) @binding(5) var<uniform> layer: Layer;

// A step prepared again after its commands were recorded may have more query tokens than the binding's buffers, which no host check can
// see: the clamp keeps accesses inside q, out and lse.
fn bound_token(token: u32) -> u32 {
    return min(token, layer.max_queries - 1u);
}

// Stores an oct of an output row.
fn store_out(token: u32, head: u32, column_oct: u32, value: mat2x4<f32>) {
    let row = layer.out_at + token * layer.out_token_stride + head * layer.out_head_stride;
    out[row + column_oct] = encode_out(value * layer.out_scale);
}

// Stores a row's LSE, given in base 2, or what stands for it (lib/tables.wgsl).
fn store_lse(token: u32, head: u32, base_2: f32) {
    let at = layer.lse_at + token * layer.lse_token_stride + head * layer.lse_head_stride;
    let bits = select(bitcast<u32>(base_2 * layer.lse_scale), QUIET_NAN, is_nan_row(base_2));
    lse[at] = select(MINUS_INFINITY, bits, base_2 > EMPTY);
}
