// Lookups in a decode step's tables, for mla_decode.wgsl and mla_decode_coop.wgsl: a work item, and the query token and head of a row.
// Concatenated with: lib/tables, lib/layer.

// A tile of query rows over a range of tokens of one sequence.
struct Item {
    first_row: u32, // of the batch's query rows, [query token, head]
    num_rows: u32,
    page_begin: u32, // where the list begins that says where its tokens are, of pages or slots
    kv_begin: u32, // tokens
    kv_end: u32,
    partial: u32, // the partial result of its first row, or DIRECT
}

fn load_item(number: u32) -> Item {
    let at = slice.items_at + number * 8u;
    var item: Item;
    item.first_row = tables[at];
    item.num_rows = tables[at + 1u];
    item.page_begin = tables[at + 2u];
    item.kv_begin = tables[at + 3u];
    item.kv_end = tables[at + 4u];
    item.partial = tables[at + 5u];
    return found_item(item);
}

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
