// What a thread loads at a time of a key: 16 codes. Concatenated with: lib/index_key_quads.
alias Chunk = vec4<u32>;

fn load_chunk(at: u32, chunk: u32) -> Chunk {
    return cache[at + chunk];
}

// Stages a chunk as f16; whether it has an element that is not finite.
fn stage_chunk(to: u32, chunk: Chunk) -> bool {
    staged[to] = half_oct(halves_of_key(chunk.xy));
    staged[to + 1u] = half_oct(halves_of_key(chunk.zw));
    return has_odd_key(chunk.xy) || has_odd_key(chunk.zw);
}
