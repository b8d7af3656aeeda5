// A batch as the device has it. What is in the arrays is not known to the host: every index made of it is bounded here.
struct BatchParams {
    batch: u32, // at least 1, as max_pages
    max_pages: u32,
    reserved_0: u32,
    reserved_1: u32,
}

@group(1) @binding(0) var<uniform> params: BatchParams;
@group(1) @binding(1) var<storage, read> seq_lens: array<i32>; // [batch]
@group(1) @binding(2) var<storage, read> query_start_loc: array<i32>; // [batch + 1]
@group(1) @binding(3) var<storage, read> block_table: array<i32>; // [batch, max_pages]

// Tokens of a sequence; none for a negative length.
fn len_of(sequence: u32) -> u32 {
    return u32(max(seq_lens[sequence], 0));
}

// Keys that a query token of a sequence sees, bottom-right: its own position and those before; 0 for a token of another sequence, or
// before the first key.
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

// What `block_table` has for a block of a sequence; a wild id for one past the table.
fn page_at(sequence: u32, block: u32) -> u32 {
    if block >= params.max_pages {
        return 0xFFFFFFFFu;
    }
    return u32(block_table[sequence * params.max_pages + block]);
}
