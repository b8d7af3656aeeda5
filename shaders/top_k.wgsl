// The positions of the k largest logits of each row, exactly: by value, then by lower index; written as ascending indices, or as the slots
// of these tokens, and -1 behind them.
//
// A workgroup chooses of a row. It reads the row four times: for each digit of the threshold, and to write what is chosen in its order.
// See lib/top_k.
//
// Concatenated with: lib/top_k. Constants: GROUP.

@compute @workgroup_size(GROUP)
fn top_k(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.y * groups.x + group.x;
    // A step prepared again after its commands were recorded may have more rows than the binding's buffers.
    if row >= min(table[0], params.max_rows) || table[1] + row >= params.out_rows {
        return;
    }
    let length = length_of(row);
    if length <= params.k {
        write_all(lane, GROUP, row, length);
        return;
    }
    count_digit(lane, row, 0u, length, 0u, 0u, 21u);
    find_digit(lane, 8u, params.k);
    var threshold = found.x << 21u;
    var left = found.y;
    count_digit(lane, row, 0u, length, threshold, 0xFFE00000u, 10u);
    find_digit(lane, 8u, left);
    threshold |= found.x << 10u;
    left = found.y;
    count_digit(lane, row, 0u, length, threshold, 0xFFFFFC00u, 0u);
    find_digit(lane, 4u, left);
    threshold |= found.x;
    left = found.y;
    write_chosen(lane, row, 0u, length, threshold, left, 0u, 0u);
}
