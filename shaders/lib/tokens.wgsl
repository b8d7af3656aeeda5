// Where a token of a sequence is in the paged cache. Kernels of a decode step find tokens here and nowhere else.
// Concatenated with: lib/tables, lib/layer. Constants: ROW_OCTS, CLAMP_PAGES.

// First oct (8 elements) of a token's row. `list` is where the sequence's page ids begin.
fn row_of_token(list: u32, token: u32) -> u32 {
    return row_of_entry(entry_of_token(list, token), token);
}

// The entry of the list that says where a token is: the id of its page. Apart from `row_of_entry` for kernels that load it ahead.
fn entry_of_token(list: u32, token: u32) -> u32 {
    return pages[list + token / slice.page_size];
}

// First oct of the row of a token whose entry this is. Ids written on the device are clamped to the pool (CLAMP_PAGES).
fn row_of_entry(entry: u32, token: u32) -> u32 {
    var page = entry;
    if (CLAMP_PAGES) {
        page = min(page, slice.num_pages - 1u);
    }
    return layer.kv_at + page * layer.kv_block_stride + token % slice.page_size * ROW_OCTS;
}
