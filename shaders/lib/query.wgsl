// What both bodies of mla_decode ask of the tables: whose row it is, and where a token lies.
struct Query {
    token: u32,
    head: u32,
    visible: u32, // keys before this position are seen
}

// Row `row` of the item, of which `first_row` is the first.
fn query_of(first_row: u32, row: u32) -> Query {
    let index = first_row + row;
    let at = slice.queries_at + (index / layer.num_heads) * 2u;
    return Query(bound_token(tables[at]), index % layer.num_heads, tables[at + 1u]);
}

// First oct of a token's cache row.
fn cache_row(page_begin: u32, token: u32) -> u32 {
    return page_row(pages[page_begin + token / slice.page_size], token % slice.page_size);
}

// First oct of a cache row of a page.
fn page_row(id: u32, offset: u32) -> u32 {
    var page = id;
    if (CLAMP_PAGES) {
        page = min(page, slice.num_pages - 1u);
    }
    return layer.kv_at + page * layer.kv_block_stride + offset * ROW_OCTS;
}
