// Computes the cache slot of each new token (vLLM's slot_mapping) on the device, in the table that `kv_append` reads.
//
//   for token: s = the last sequence with query_start_loc[s] <= token
//     position = seq_lens[s] - (query_start_loc[s + 1] - token); of a rank with a share of the tokens: its index among the rank's
//     slots[token] = block_table[s][position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
//
// A token of no sequence or of another rank gets NO_SLOT, and so does one whose page lies outside the pool: clamping the id would overwrite
// another page.
//
// Tile: one thread a token.
// Concatenated with: lib/grid, lib/device_batch. Constants: GROUP, PAGE_SIZE, NUM_PAGES.

@group(0) @binding(0) var<storage, read_write> table: array<u32>; // [1 + tokens] num_tokens, which the host wrote, then slots

const NO_SLOT = 0xFFFFFFFFu;

@compute @workgroup_size(GROUP)
fn batch_slots(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let token = item_of(group, groups, lane);
    if token >= table[0] {
        return;
    }
    // Binary search. It terminates inside the array even if query_start_loc is not sorted.
    var sequence = 0u;
    var end = params.batch;
    while end - sequence > 1u {
        let middle = (sequence + end) / 2u;
        if query_start_loc[middle] <= i32(token) {
            sequence = middle;
        } else {
            end = middle;
        }
    }
    var slot = NO_SLOT;
    let visible = whole_visible_of(sequence, token);
    if visible > 0u && is_local(visible - 1u) {
        let position = local_of(visible - 1u);
        let page = page_at(sequence, position / PAGE_SIZE);
        if page < NUM_PAGES {
            slot = page * PAGE_SIZE + position % PAGE_SIZE;
        }
    }
    table[1u + token] = slot;
}
