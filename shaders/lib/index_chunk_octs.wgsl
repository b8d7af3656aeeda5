// What a thread loads at a time of a key: an oct (8 consecutive elements).
alias Chunk = KeyOct;

fn load_chunk(at: u32, chunk: u32) -> Chunk {
    return key_oct(at, chunk);
}

// Stages a chunk as f16; whether it has an element that is not finite.
fn stage_chunk(to: u32, chunk: Chunk) -> bool {
    staged[to] = half_oct(halves_of_key(chunk));
    return has_odd_key(chunk);
}
