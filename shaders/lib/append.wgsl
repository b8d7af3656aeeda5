// The arguments of kv_append and rope_append. A quad is 4 consecutive elements. Concatenated with: lib/round, lib/slots.

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
    guard_row: u32, // as the next two where it counts what is lost: see lib/guard
    guard_flushed: u32, // of the rotary part of a record, else of all
    guard_top: u32,
}

const NO_SLOT = 0xFFFFFFFFu; // the token is skipped

// First quad of a token's row, by its slot in the slab that is bound.
fn append_row(slot: u32, params: AppendParams) -> u32 {
    return row_of_slot(slot, params.kv_base_quads, params.kv_block_stride_quads);
}
