// Where the tokens of an item are in the paged cache, by the page list of its sequence. Kernels of a decode step find tokens here and
// nowhere else; lib/listed.wgsl is the alternative, for lists of slots.
// Concatenated with: lib/tables, lib/layer, lib/query. Constants: ROW_UNITS, CLAMP_PAGES.

// The item as the kernels take it.
fn found_item(item: Item) -> Item {
    return item;
}

// First unit (8 latent elements) of a token's row. `list` is where the sequence's page ids begin.
fn row_of_token(list: u32, token: u32) -> u32 {
    return row_of_entry(entry_of_token(list, token), token);
}

// The entry of the list that says where a token is: the id of its page. Apart from `row_of_entry` for kernels that load it ahead.
fn entry_of_token(list: u32, token: u32) -> u32 {
    return pages[list + token / slice.page_size];
}

// First unit of the row of a token whose entry this is. Ids written on the device are clamped to the pool (CLAMP_PAGES).
fn row_of_entry(entry: u32, token: u32) -> u32 {
    var page = entry;
    if (CLAMP_PAGES) {
        page = min(page, slice.num_pages - 1u);
    }
    return layer.kv_at + page * layer.kv_block_stride + token % slice.page_size * ROW_UNITS;
}

// Whether an entry of the list is a token of the cache.
fn is_token(entry: u32) -> bool {
    return true;
}

// For entries of a block that are looked up by one thread and weighed by others.
fn note_token(place: u32, is_one: bool) {}

fn was_token(place: u32) -> bool {
    return true;
}

// Whether there is a token from `begin` to `end`.
fn has_tokens(list: u32, begin: u32, end: u32) -> bool {
    return end > begin;
}
