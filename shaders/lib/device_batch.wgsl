// A batch that only the device knows, as vLLM's metadata arrays. The host cannot check their contents, so every index derived from them
// is bounded here.
struct BatchParams {
    batch: u32, // sequences, at least 1; as is max_pages
    max_pages: u32,
    reserved_0: u32,
    reserved_1: u32,
}

@group(1) @binding(0) var<uniform> params: BatchParams;
@group(1) @binding(1) var<storage, read> seq_lens: array<i32>; // [batch]
@group(1) @binding(2) var<storage, read> query_start_loc: array<i32>; // [batch + 1]
@group(1) @binding(3) var<storage, read> block_table: array<i32>; // [batch, max_pages] page ids

// Tokens of a sequence; 0 for a negative length.
fn len_of(sequence: u32) -> u32 {
    return u32(max(seq_lens[sequence], 0));
}

// How many keys a query token attends to, by the causal mask aligned bottom-right: its own position and those before. 0 for a token of
// another sequence, or before the first key.
fn visible_of(sequence: u32, token: u32) -> u32 {
    let begin = query_start_loc[sequence];
    let end = query_start_loc[sequence + 1u];
    let t = i32(token);
    let len = i32(len_of(sequence));
    if t < begin || t >= end || begin < 0 || end - t > len {
        return 0u;
    }
    return u32(len - (end - t) + 1);
}

// The page id of a block of a sequence; past the table, an id that no pool has.
fn page_at(sequence: u32, block: u32) -> u32 {
    if block >= params.max_pages {
        return 0xFFFFFFFFu;
    }
    return u32(block_table[sequence * params.max_pages + block]);
}
