// How mla_decode_coop.wgsl gets a block of the cache: where its rows are, from the cache to registers, from there to the staging
// buffer.

// Where a token's cache row is.
struct Place {
    token: u32,
    listed: u32, // where its page's id is in the page list
    offset: u32, // in the page
    page: u32, // its page's id
}

fn place_of(page_begin: u32, token: u32) -> Place {
    let page_size = tables[PAGE_SIZE];
    let listed = page_begin + token / page_size;
    return Place(token, listed, token % page_size, pages[listed]);
}

// The place PLACES tokens on; the same one past the end, where any row of the item will do: it weighs 0.
fn next_place(place: Place, page_size: u32, kv_end: u32) -> Place {
    var next = place;
    if (place.token + PLACES < kv_end) {
        next.token += PLACES;
        next.listed += (place.offset + PLACES) / page_size;
        next.offset = (place.offset + PLACES) % page_size;
    }
    next.page = pages[next.listed];
    return next;
}

// What a thread holds of a block on its way from the cache to the staging buffer.
struct Block {
    latent: array<KvOct, LATENT_LOADS>,
    rope: array<KvOct, ROPE_LOADS_PADDED>,
}

// Of a thread's load `i` of the latents of a block: which token's, and which oct of its row. Written so that all loads of a thread share
// their addresses but for a constant.
fn latent_token(thread: u32, i: u32) -> u32 {
    if (THREADS >= LATENT_OCTS) {
        return i * (THREADS / LATENT_OCTS) + thread / LATENT_OCTS;
    }
    return (i * THREADS + thread) / LATENT_OCTS;
}

fn latent_oct(thread: u32, i: u32) -> u32 {
    if (THREADS >= LATENT_OCTS) {
        return thread % LATENT_OCTS;
    }
    return (i * THREADS + thread) % LATENT_OCTS;
}

// Block `block` of those whose rows are in `row_at`.
fn load_block(thread: u32, block: u32) -> Block {
    let first = block * TOKENS;
    var loaded: Block;
    for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
        loaded.latent[i] = kv[row_at[first + latent_token(thread, i)] + latent_oct(thread, i)];
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u);
        loaded.rope[i] = kv[row_at[first + at / max(ROPE_OCTS, 1u)] + LATENT_OCTS + at % max(ROPE_OCTS, 1u)];
    }
    return loaded;
}

// Makes it f16.
fn stage_block(thread: u32, block: Block) {
    for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
        keys[latent_token(thread, i) * KEY_PITCH + latent_oct(thread, i)] = half_key(block.latent[i]);
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u); // the last one more than once
        keys[at / max(ROPE_OCTS, 1u) * KEY_PITCH + LATENT_OCTS + at % max(ROPE_OCTS, 1u)] = half_key(block.rope[i]);
    }
}
