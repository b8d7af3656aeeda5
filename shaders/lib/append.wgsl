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
    first_slot: u32, // of the slab that is bound; 0 where it is the whole pool
    num_slots: u32, // of that slab
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

const NO_SLOT = 0xFFFFFFFFu; // the token is skipped

// First quad of a token in the cache, by its slot in the slab that is bound.
fn row_of(slot: u32, params: AppendParams) -> u32 {
    let page = slot / PAGE_SIZE;
    return params.kv_base_quads + page * params.kv_block_stride_quads + (slot % PAGE_SIZE) * ROW_QUADS;
}
