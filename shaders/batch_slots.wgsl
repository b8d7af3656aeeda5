// The slot of each new token, where `kv_append` looks for it, from a batch that only the device knows.
//
//   for token: its sequence s is the last that begins at or before it
//     slots[token] = page * PAGE_SIZE + offset of position seq_len - (query_start_loc[s + 1] - token)
//
// A token of no sequence has no slot, nor has one whose page is not of the pool: a write to another page would be worse.
//
// Prelude: GROUP, PAGE_SIZE, NUM_PAGES. Libs: grid, device_batch.

@group(0) @binding(0) var<storage, read_write> table: array<u32>; // [1 + tokens] num_tokens, which the host wrote, then the slots

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
    // Whatever the array holds, this ends, inside of it.
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
    let visible = visible_of(sequence, token);
    if visible > 0u {
        let position = visible - 1u;
        let page = page_at(sequence, position / PAGE_SIZE);
        if page < NUM_PAGES {
            slot = page * PAGE_SIZE + position % PAGE_SIZE;
        }
    }
    table[1u + token] = slot;
}
