// Scatters new rows into the paged cache.
//
//   for token: slot = slots[token]; skip if there is none
//     kv[slot / PAGE_SIZE][slot % PAGE_SIZE] = convert(kv_c[token] ++ k_pe[token])
//
// An item is a quad: 4 elements of one row. L, R and every offset and stride are multiples of 4 elements, so a quad is
// 1, 2 or 4 whole words on both sides, and no two invocations share a word.
//
// Prelude: GROUP, PAGE_SIZE, NUM_SLOTS, LATENT_QUADS, ROW_QUADS. Libs: grid, round, in_*, out_*, convert_*.

struct AppendParams {
    kv_base_quads: u32,
    kv_block_stride_quads: u32,
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    inv_mantissa: f32, // of k_scale: see E4m3Scale
    exponent: i32,
    mantissa: u32,
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + tokens] num_tokens, then a slot a token
@group(1) @binding(0) var<uniform> params: AppendParams;
@group(1) @binding(1) var<storage, read> kv_c: array<InQuad>; // [tokens, L / 4], strided
@group(1) @binding(2) var<storage, read> k_pe: array<InQuad>; // [tokens, R / 4], strided
@group(1) @binding(3) var<storage, read_write> kv: array<OutQuad>; // [num_pages, page_size, (L + R) / 4], pages strided

@compute @workgroup_size(GROUP)
fn kv_append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let token = item / ROW_QUADS;
    let quad = item % ROW_QUADS;
    if token >= table[0] {
        return;
    }
    // a skipped token is 0xFFFFFFFF, and the host proved the others; the bound keeps a wild table harmless too
    let slot = table[1u + token];
    if slot >= NUM_SLOTS {
        return;
    }
    var q: InQuad;
    if quad < LATENT_QUADS {
        q = kv_c[params.kv_c_base_quads + token * params.kv_c_stride_quads + quad];
    } else {
        q = k_pe[params.k_pe_base_quads + token * params.k_pe_stride_quads + quad - LATENT_QUADS];
    }
    let row = params.kv_base_quads + (slot / PAGE_SIZE) * params.kv_block_stride_quads + (slot % PAGE_SIZE) * ROW_QUADS;
    kv[row + quad] = convert(q, E4m3Scale(params.inv_mantissa, params.exponent, params.mantissa));
}
