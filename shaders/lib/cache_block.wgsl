// How mla_decode_coop.wgsl gets a block of the cache: where its rows are, from the cache to registers, from there to the staging
// buffer.

// A run is RUN tokens whose rows lie one after the other in the cache: a block's where pages hold whole blocks, else one. `row_at` holds
// PLACES runs, BLOCKS blocks; then each entry is about the run PLACES further on, in its next round.

// First token of an entry's run; of the last run for those past the end, where any row of the item will do: it weighs 0.
fn run_token(first_block: u32, round: u32, entry: u32, kv_end: u32) -> u32 {
    return min(first_block + (round * PLACES + entry) * RUN, (kv_end - 1u) / RUN * RUN);
}

// The id of a token's page.
fn page_of(page_begin: u32, token: u32) -> u32 {
    return pages[page_begin + token / slice.page_size];
}

// First oct of the row of a token of block `block` of those in `row_at`.
fn row_of(block: u32, token: u32) -> u32 {
    if (RUN == 1u) {
        return row_at[block * TOKENS + token];
    }
    return row_at[block] + token * ROW_OCTS;
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

fn load_block(thread: u32, block: u32) -> Block {
    var loaded: Block;
    if (RUN > 1u && THREADS >= LATENT_OCTS) {
        // Addresses that share all but a constant; what each had of its own, a compiler would keep in registers.
        let at = row_of(block, latent_token(thread, 0u)) + latent_oct(thread, 0u);
        for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
            loaded.latent[i] = kv[at + i * (THREADS / LATENT_OCTS) * ROW_OCTS];
        }
    } else {
        for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
            loaded.latent[i] = kv[row_of(block, latent_token(thread, i)) + latent_oct(thread, i)];
        }
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u);
        loaded.rope[i] = kv[row_of(block, at / max(ROPE_OCTS, 1u)) + LATENT_OCTS + at % max(ROPE_OCTS, 1u)];
    }
    return loaded;
}

// Makes it f16. Not 0 under ODD if the thread met a key that f16 does not hold. Of the block's tokens only the first `count` are the
// item's: behind a sequence's end a page may hold anything, even NaN, which a weight of 0 would not keep out.
fn stage_block(thread: u32, block: Block, count: u32) -> u32 {
    var odd = 0u;
    for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
        keys[latent_token(thread, i) * KEY_PITCH + latent_oct(thread, i)] = half_key(block.latent[i]);
        odd |= odd_bits(block.latent[i]);
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u); // the last one more than once
        keys[at / max(ROPE_OCTS, 1u) * KEY_PITCH + LATENT_OCTS + at % max(ROPE_OCTS, 1u)] = half_key(block.rope[i]);
        odd |= odd_bits(block.rope[i]);
    }
    if (RUN > 1u && count < TOKENS) {
        clear_tokens(thread, count);
        odd = odd_tokens(thread, block, count);
    }
    return odd;
}

// A thread clears what it staged itself of the tokens from `first` on.
fn clear_tokens(thread: u32, first: u32) {
    for (var i = 0u; i < LATENT_LOADS; i++) {
        if (latent_token(thread, i) >= first) {
            keys[latent_token(thread, i) * KEY_PITCH + latent_oct(thread, i)] = HalfOct();
        }
    }
    for (var i = 0u; i < ROPE_LOADS; i++) {
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u);
        if (at / max(ROPE_OCTS, 1u) >= first) {
            keys[at / max(ROPE_OCTS, 1u) * KEY_PITCH + LATENT_OCTS + at % max(ROPE_OCTS, 1u)] = HalfOct();
        }
    }
}

// What is odd of the tokens before `end`.
fn odd_tokens(thread: u32, block: Block, end: u32) -> u32 {
    var odd = 0u;
    if (ODD != 0u) {
        for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
            odd |= select(0u, odd_bits(block.latent[i]), latent_token(thread, i) < end);
        }
        for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
            let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u);
            odd |= select(0u, odd_bits(block.rope[i]), at / max(ROPE_OCTS, 1u) < end);
        }
    }
    return odd;
}
