// A batch that only the device knows, as vLLM's metadata arrays. The host cannot check their contents, so every index derived from them
// is bounded here.
struct BatchParams {
    batch: u32, // sequences, at least 1; as is max_pages
    max_pages: u32,
    // of a rank that holds a share of the tokens; all 0: one that holds all
    interleave: u32, // tokens in a block of the pattern, at least 1
    owned: u32, // blocks of the pattern that are this rank's
    blocks: u32, // blocks of the pattern
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

@group(1) @binding(0) var<uniform> params: BatchParams;
@group(1) @binding(1) var<storage, read> seq_lens: array<i32>; // [batch], of whole sequences
@group(1) @binding(2) var<storage, read> query_start_loc: array<i32>; // [batch + 1]
@group(1) @binding(3) var<storage, read> block_table: array<i32>; // [batch, max_pages] page ids, of what this rank holds
// [blocks] twice the number of this rank's blocks before it, plus 1 where it is this rank's
@group(1) @binding(4) var<storage, read> marks: array<u32>;

// How many of the first `len` tokens of a whole sequence this rank holds.
fn local_of(len: u32) -> u32 {
    if params.blocks == 0u {
        return len;
    }
    let whole = len / params.interleave;
    let mark = marks[whole % params.blocks];
    let rest = select(0u, len % params.interleave, (mark & 1u) != 0u);
    return (whole / params.blocks * params.owned + mark / 2u) * params.interleave + rest;
}

// Whether this rank holds a token of a whole sequence.
fn is_local(token: u32) -> bool {
    return params.blocks == 0u || (marks[token / params.interleave % params.blocks] & 1u) != 0u;
}

// Tokens of a whole sequence; 0 for a negative length.
fn whole_len_of(sequence: u32) -> u32 {
    return u32(max(seq_lens[sequence], 0));
}

// Tokens of a sequence that this rank holds.
fn len_of(sequence: u32) -> u32 {
    return local_of(whole_len_of(sequence));
}

// How many keys of the whole a query token attends to, by the causal mask aligned bottom-right: its own position and those before. 0 for a
// token of another sequence, or before the first key.
fn whole_visible_of(sequence: u32, token: u32) -> u32 {
    let begin = query_start_loc[sequence];
    let end = query_start_loc[sequence + 1u];
    let t = i32(token);
    let len = i32(whole_len_of(sequence));
    if t < begin || t >= end || begin < 0 || end - t > len {
        return 0u;
    }
    return u32(len - (end - t) + 1);
}

// How many of them this rank holds.
fn visible_of(sequence: u32, token: u32) -> u32 {
    return local_of(whole_visible_of(sequence, token));
}

// The page id of a block of a sequence; past the table, an id that no pool has.
fn page_at(sequence: u32, block: u32) -> u32 {
    if block >= params.max_pages {
        return 0xFFFFFFFFu;
    }
    return u32(block_table[sequence * params.max_pages + block]);
}
