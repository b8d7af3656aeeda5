// Lookups in a decode step's tables, for mla_decode.wgsl and mla_decode_coop.wgsl: the query token and head of a query row, and the
// address of a token in the paged cache. Concatenated with: lib/tables, lib/layer. Constants: ROW_OCTS, CLAMP_PAGES.
struct Query {
    token: u32,
    head: u32,
    visible: u32, // it attends to the keys before this position
}

// Query row `row` of a work item whose first one is `first_row`.
fn query_of(first_row: u32, row: u32) -> Query {
    let index = first_row + row;
    let at = slice.queries_at + (index / layer.num_heads) * 2u;
    return Query(bound_token(tables[at]), index % layer.num_heads, tables[at + 1u]);
}

// First oct, of 8 elements, of a token in the cache.
fn cache_row(page_begin: u32, token: u32) -> u32 {
    return page_row(pages[page_begin + token / slice.page_size], token % slice.page_size);
}

// First oct of the token at `offset` in page `id`. Ids written on the device are clamped to the pool (CLAMP_PAGES).
fn page_row(id: u32, offset: u32) -> u32 {
    var page = id;
    if (CLAMP_PAGES) {
        page = min(page, slice.num_pages - 1u);
    }
    return layer.kv_at + page * layer.kv_block_stride + offset * ROW_OCTS;
}
