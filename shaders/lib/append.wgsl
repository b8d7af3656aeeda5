// The arguments of kv_append and rope_append, and the address of a cache slot. A quad is 4 consecutive elements.
// Concatenated with: lib/round. Constants: PAGE_SIZE, ROW_QUADS (quads of a token).

struct AppendParams {
    scale: E4m3Scale,
    kv_base_quads: u32, // quads, as all bases and strides
    kv_block_stride_quads: u32,
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    max_tokens: u32,
    reserved: u32,
}

const NO_SLOT = 0xFFFFFFFFu; // the token is skipped

// First quad of a slot's token in the cache.
fn row_of(slot: u32, params: AppendParams) -> u32 {
    let page = slot / PAGE_SIZE;
    return params.kv_base_quads + page * params.kv_block_stride_quads + (slot % PAGE_SIZE) * ROW_QUADS;
}
