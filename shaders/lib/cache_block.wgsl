// The cache loads of mla_decode_coop.wgsl: the addresses of a block of TOKENS tokens, its load into registers (`load_block`), and its
// conversion to f16 in the staging buffer `keys` (`stage_block`). An oct is 8 consecutive elements, a unit what a thread loads at a time:
// an oct, or 16 codes of a record.
//
// Concatenated with: lib/pinned, lib/key_<dtype>, lib/key_plain or lib/key_record, lib/query, mla_decode_coop. Constants:
// src/gpu/kernels/decode/coop.rs. Lines that end in `lists` or `records` are compiled for lists of slots, and for caches of records.

// A run is RUN tokens that are contiguous in the cache: a whole block where the page size is a multiple of TOKENS, else one token.
// `row_at` holds the addresses of PLACES runs, which are BLOCKS blocks, and is refilled in rounds: an entry's next run is PLACES further.

// First token of an entry's run. Entries past the end repeat the last run, whose tokens are masked and weigh 0.
fn run_token(first_block: u32, round: u32, entry: u32, kv_end: u32) -> u32 {
    return min(first_block + (round * PLACES + entry) * RUN, (kv_end - 1u) / RUN * RUN);
}

// Fills this thread's entry of `row_at` for the first blocks. The result is what the page list has for its next run.
fn find_first_runs(item: Item, thread: u32, first_block: u32) -> u32 {
    if (thread >= PLACES) {
        return 0u;
    }
    let token = run_token(first_block, 0u, thread, item.kv_end);
    row_at[thread] = place_of_entry(entry_of_token(item.page_begin, token), token);
    return entry_of_token(item.page_begin, run_token(first_block, 1u, thread, item.kv_end));
}

// After block `number`, refills half of `row_at` at a time, that of blocks which are done: by `next_entry`, which was loaded a round ahead.
fn find_runs(item: Item, thread: u32, first_block: u32, number: u32, next_entry: u32) -> u32 {
    if ((number + 2u) % (BLOCKS / 2u) != 0u || thread / (PLACES / 2u) != number / (BLOCKS / 2u) % 2u) {
        return next_entry;
    }
    let round = number / BLOCKS + 1u;
    row_at[thread] = place_of_entry(next_entry, run_token(first_block, round, thread, item.kv_end));
    return entry_of_token(item.page_begin, run_token(first_block, round + 1u, thread, item.kv_end));
}

const NO_ROW = 0xFFFFFFFFu; // in `row_at`, of an entry that is no token

fn place_of_entry(entry: u32, token: u32) -> u32 {
    return select(NO_ROW, row_of_entry(entry, token), is_token(entry));
}

// First unit of token `token` of block `block` of those in `row_at`.
fn row_of(block: u32, token: u32) -> u32 {
    if (RUN == 1u) {
        return row_at[block * TOKENS + token];
    }
    return row_at[block] + token * ROW_UNITS;
}

// A thread's registers for a block, between the cache and the staging buffer.
struct Block {
    latent: array<KvOct, LATENT_LOADS>,
    rope: array<RopeOct, ROPE_LOADS_PADDED>, // in records a unit of scales too
    tokens: u32, // lists: bit i is whether latent load i is of a token
    rope_tokens: u32, // lists: the same of rotary loads
}

// The token, and the unit in its latent, of load `i` of a thread. Written so that the addresses of a thread's loads differ by constants
// only.
fn latent_token(thread: u32, i: u32) -> u32 {
    if (THREADS >= LATENT_UNITS) {
        return i * (THREADS / LATENT_UNITS) + thread / LATENT_UNITS;
    }
    return (i * THREADS + thread) / LATENT_UNITS;
}

fn latent_unit(thread: u32, i: u32) -> u32 {
    if (THREADS >= LATENT_UNITS) {
        return thread % LATENT_UNITS;
    }
    return (i * THREADS + thread) % LATENT_UNITS;
}

fn load_block(thread: u32, block: u32) -> Block {
    var loaded: Block;
    if (RUN > 1u && THREADS >= LATENT_UNITS) {
        // One address plus constants: a compiler would keep an address for each load in registers otherwise.
        let at = row_of(block, latent_token(thread, 0u)) + latent_unit(thread, 0u); // one dtype
        let at = row_of(block, latent_token(thread, 0u)) / 2u + latent_unit(thread, 0u); // records
        for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
            loaded.latent[i] = kv[at + i * (THREADS / LATENT_UNITS) * ROW_UNITS]; // one dtype
            loaded.latent[i] = kv[at + i * (THREADS / LATENT_UNITS) * (ROW_UNITS / 2u)]; // records
        }
    } else {
        for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
            var row = row_of(block, latent_token(thread, i));
            loaded.tokens |= u32(row != NO_ROW) << i; // lists
            row = select(row, layer.kv_at, row == NO_ROW); // lists
            loaded.latent[i] = kv[row + latent_unit(thread, i)]; // one dtype
            loaded.latent[i] = kv[row / 2u + latent_unit(thread, i)]; // records
        }
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u); // one dtype
        var row = row_of(block, at / max(ROPE_OCTS, 1u)); // one dtype
        var row = row_of(block, unit_token(thread, i)); // records
        loaded.rope_tokens |= u32(row != NO_ROW) << i; // lists
        row = select(row, layer.kv_at, row == NO_ROW); // lists
        loaded.rope[i] = load_rope(row, at % max(ROPE_OCTS, 1u)); // one dtype
        loaded.rope[i] = load_rope(row, unit_part(thread, i)); // records
    }
    return loaded;
}

// Converts a block to f16 and stages it. The result has a bit of ODD if f16 does not hold some key. Only the first `count` tokens are
// the item's; the others are zeroed, as a page may hold anything past a sequence's end, and 0 x NaN is NaN.
fn stage_block(thread: u32, block: Block, count: u32) -> u32 {
    var odd = 0u;
    for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
        var key = half_key(block.latent[i]); // one dtype
        var codes = block.latent[i]; // records
        let odd_key = odd_bits(block.latent[i]); // one dtype
        let odd_key = odd_codes(block.latent[i]); // records
        let is_one = ((block.tokens >> i) & 1u) != 0u; // lists
        if (!is_one) { // lists
            key = HalfOct(); // lists and one dtype
            codes = vec4<u32>(0u); // lists and records
        } // lists
        if (latent_unit(thread, i) == 0u) { // lists
            note_token(latent_token(thread, i), is_one); // lists
        } // lists
        odd |= select(0u, odd_key, is_one); // lists
        keys[latent_token(thread, i) * KEY_PITCH + latent_unit(thread, i)] = key; // one dtype
        stage_codes(thread, latent_token(thread, i) * KEY_PITCH + 2u * latent_unit(thread, i), codes); // records
        odd |= odd_key; // pages
    }
    for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u); // past the end, the last one again // one dtype
        var key = half_rope(block.rope[i]); // one dtype
        var unit = block.rope[i]; // records
        let is_one = ((block.rope_tokens >> i) & 1u) != 0u; // lists
        if (!is_one) { // lists
            key = HalfOct(); // lists and one dtype
            unit = RopeOct(); // lists and records
        } // lists
        odd |= select(0u, odd_rope(block.rope[i]), is_one); // lists and one dtype
        odd |= select(0u, odd_unit(block.rope[i], unit_part(thread, i)), is_one); // lists and records
        keys[at / max(ROPE_OCTS, 1u) * KEY_PITCH + LATENT_OCTS + at % max(ROPE_OCTS, 1u)] = key; // one dtype
        stage_unit(unit_token(thread, i), unit_part(thread, i), unit); // records
        odd |= odd_rope(block.rope[i]); // pages and one dtype
        odd |= odd_unit(block.rope[i], unit_part(thread, i)); // pages and records
    }
    if (RUN > 1u && count < TOKENS) {
        clear_tokens(thread, count);
        odd = odd_tokens(thread, block, count);
    }
    return odd;
}

// Zeroes the tokens from `first` on, each thread what it staged itself, so no barrier is needed.
fn clear_tokens(thread: u32, first: u32) {
    for (var i = 0u; i < LATENT_LOADS; i++) {
        if (latent_token(thread, i) >= first) {
            keys[latent_token(thread, i) * KEY_PITCH + latent_unit(thread, i)] = HalfOct(); // one dtype
            stage_codes(thread, latent_token(thread, i) * KEY_PITCH + 2u * latent_unit(thread, i), vec4<u32>(0u)); // records
        }
    }
    for (var i = 0u; i < ROPE_LOADS; i++) {
        let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u); // one dtype
        if (at / max(ROPE_OCTS, 1u) >= first) { // one dtype
            keys[at / max(ROPE_OCTS, 1u) * KEY_PITCH + LATENT_OCTS + at % max(ROPE_OCTS, 1u)] = HalfOct(); // one dtype
        if (unit_token(thread, i) >= first) { // records
            stage_unit(unit_token(thread, i), unit_part(thread, i), RopeOct()); // records
        }
    }
}

// The bits of ODD of the tokens before `end` only.
fn odd_tokens(thread: u32, block: Block, end: u32) -> u32 {
    var odd = 0u;
    if (ODD != 0u) {
        for (var i = 0u; i < LATENT_LOADS; i++) { // unroll on cards
            let odd_key = odd_bits(block.latent[i]); // one dtype
            let odd_key = odd_codes(block.latent[i]); // records
            odd |= select(0u, odd_key, latent_token(thread, i) < end);
        }
        for (var i = 0u; i < ROPE_LOADS; i++) { // unroll on cards
            let at = min(i * THREADS + thread, TOKENS * ROPE_OCTS - 1u); // one dtype
            odd |= select(0u, odd_rope(block.rope[i]), at / max(ROPE_OCTS, 1u) < end); // one dtype
            odd |= select(0u, odd_unit(block.rope[i], unit_part(thread, i)), unit_token(thread, i) < end); // records
        }
    }
    return odd;
}
