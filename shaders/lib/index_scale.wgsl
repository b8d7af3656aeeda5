// Index keys that are codes: a page is the codes of its tokens, then a scale a token. Concatenated with: lib/index_row.

fn put_scale(at: u32, bits: u32) {
    kv[at] = bits;
}
