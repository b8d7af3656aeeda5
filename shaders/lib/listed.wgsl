// Where the tokens of an item are in the paged cache, by its query token's list of slots: lib/tokens.wgsl is the alternative. An item's
// range is one of entries of the list. A slot is `page * page_size + offset`; an entry that is no slot of this cache, such as -1, is
// skipped: its token weighs 0, and nothing is multiplied by what stands in its place.
// Concatenated with: lib/tables, lib/layer, lib/query, and a `list_length`. Constants: ROW_UNITS,
// NOTED_TOKENS.

@group(0) @binding(6) var<storage, read> indices: array<u32>; // i32 [total_q, topk]

// The item as the kernels take it: `page_begin` is where its query token's list begins, and `kv_end` is at most the list's length.
fn found_item(item: Item) -> Item {
    let token = query_of(item.first_row, 0u).token;
    var found = item;
    found.page_begin = layer.indices_at + token * layer.indices_stride;
    if (layer.has_lengths != 0u) {
        let length = u32(max(bitcast<i32>(list_length(layer.lengths_at + token * layer.lengths_stride)), 0));
        found.kv_end = max(min(item.kv_end, length), item.kv_begin);
    }
    return found;
}

// First unit (8 latent elements) of a token's row, or of the cache for an entry that is no token.
fn row_of_token(list: u32, token: u32) -> u32 {
    return row_of_entry(entry_of_token(list, token), token);
}

// An entry of the list, counted from the cache's first slot. Apart from `row_of_entry` for kernels that load it ahead.
fn entry_of_token(list: u32, token: u32) -> u32 {
    return indices[list + token] - layer.first_slot;
}

// First unit of the row of a token whose entry this is.
fn row_of_entry(entry: u32, token: u32) -> u32 {
    let slot = select(0u, entry, is_token(entry));
    return layer.kv_at + slot / slice.page_size * layer.kv_block_stride + slot % slice.page_size * ROW_UNITS;
}

// Whether an entry of the list is a token of the cache: a negative slot is a large one.
fn is_token(entry: u32) -> bool {
    return entry < layer.num_slots;
}

var<workgroup> noted: array<u32, NOTED_TOKENS>; // for entries of a block, which one thread looks up and others weigh: whether it is a token

fn note_token(place: u32, is_one: bool) {
    noted[place] = u32(is_one);
}

fn was_token(place: u32) -> bool {
    return noted[place] != 0u;
}

// Whether there is a token among the entries from `begin` to `end`.
fn has_tokens(list: u32, begin: u32, end: u32) -> bool {
    for (var i = begin; i < end; i++) {
        if (is_token(entry_of_token(list, i))) {
            return true;
        }
    }
    return false;
}
