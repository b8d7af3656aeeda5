// Shortens the tables of a decode planned for upper bounds to the sequence lengths that only the device knows (seq_lens).
//
// Where a rank holds a share of the tokens, all of these count its own.
//
//   for each work item:             kv_end = min(planned kv_end, seq_len); an empty range becomes [0, 0)
//   for each query token:           visible = min(planned visible, its causal limit), which counts the keys that it attends to
//   for each word of the page list: the page id from block_table, clamped to the pool; 0 past the sequence's end
//
// Items and query tokens are copied whole from a template that the host checked, and ranges only shrink. So whatever the batch holds,
// and whatever plan the tables held before, every entry stays inside the bounds that the host proved.
//
// Tile: one thread an item, a query token and a word of the page list, whichever of these exist at its index.
// Concatenated with: lib/grid, lib/device_batch. Constants: GROUP, PAGE_SIZE, NUM_PAGES.

// [8] num_items, num_queries, num_words, items_at, queries_at (in `tables`), batch, unused; then
// [num_items, 8] work items, [num_items] their sequences, [num_queries, 2] query tokens, [num_queries] their sequences,
// [batch + 1] where each sequence's pages begin
@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(2) @binding(0) var<storage, read_write> tables: array<u32>; // [Header, items, queries, merges, merge_partials], the step's
@group(2) @binding(1) var<storage, read_write> pages: array<u32>; // [num_words] page ids, the step's

@compute @workgroup_size(GROUP)
fn batch_lists(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = item_of(group, groups, lane);
    let num_items = plan[0];
    let num_queries = plan[1];
    let batch = min(plan[5], params.batch);
    let item_sequences = 8u + num_items * 8u;
    let queries = item_sequences + num_items;
    let query_sequences = queries + num_queries * 2u;
    let page_begin = query_sequences + num_queries;

    if index < num_items {
        let to = plan[3] + index * 8u;
        for (var i = 0u; i < 8u; i++) { // unroll
            tables[to + i] = plan[8u + index * 8u + i];
        }
        let kv_begin = plan[8u + index * 8u + 3u];
        let kv_end = min(plan[8u + index * 8u + 4u], len_of(min(plan[item_sequences + index], batch - 1u)));
        // An empty item begins at 0: kernels that round kv_begin down to a whole block of tokens would run a block otherwise.
        tables[to + 3u] = select(0u, kv_begin, kv_begin < kv_end);
        tables[to + 4u] = select(0u, kv_end, kv_begin < kv_end);
    }
    if index < num_queries {
        let to = plan[4] + index * 2u;
        let token = plan[queries + index * 2u];
        let planned = plan[queries + index * 2u + 1u];
        tables[to] = token;
        tables[to + 1u] = min(planned, visible_of(min(plan[query_sequences + index], batch - 1u), token));
    }
    if index < plan[2] {
        // Binary search for the last sequence whose pages begin at or before this word.
        var sequence = 0u;
        var end = batch;
        while end - sequence > 1u {
            let middle = (sequence + end) / 2u;
            if plan[page_begin + middle] <= index {
                sequence = middle;
            } else {
                end = middle;
            }
        }
        let block = index - min(plan[page_begin + sequence], index);
        let is_used = block < (len_of(sequence) + PAGE_SIZE - 1u) / PAGE_SIZE;
        pages[index] = select(0u, min(page_at(sequence, block), NUM_PAGES - 1u), is_used);
    }
}
