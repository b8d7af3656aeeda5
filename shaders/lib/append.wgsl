// How new rows lie, and where in the cache they go, in quads: 4 elements of one row. Prelude: PAGE_SIZE, ROW_QUADS. Lib: round.

struct AppendParams {
    scale: E4m3Scale,
    kv_base_quads: u32,
    kv_block_stride_quads: u32,
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    max_tokens: u32,
    reserved: u32,
}

const NO_SLOT = 0xFFFFFFFFu;

fn row_of(slot: u32, params: AppendParams) -> u32 {
    let page = slot / PAGE_SIZE;
    return params.kv_base_quads + page * params.kv_block_stride_quads + (slot % PAGE_SIZE) * ROW_QUADS;
}
