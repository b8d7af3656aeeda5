// Puts gathered parts of several ranks back in the order of their tokens, as raw bits (vLLM's reorg_kvcache).
//
//   for (first, begin, out_row) of the chunks, for t < its tokens: token = begin + t
//     block = token / interleave % blocks, turn = token / interleave / blocks, rank = owners[block]
//     index = (turn * owned[rank] + before[block]) * interleave + token % interleave    the token's index among the rank's
//     out[out_row + t] = gathered[rank][sources[chunk][rank] + index]
//
// Tile: one Unit, 4 elements of a row, a thread; rows of all chunks one after the other.
// Concatenated with: lib/grid. Constants: GROUP, ROW_UNITS; alias Unit.

struct ReorgParams {
    gathered_base_units: u32,
    gathered_stride_units: u32,
    rank_stride_units: u32,
    out_base_units: u32,
    out_stride_units: u32,
    max_rows: u32,
    max_local_rows: u32,
    world: u32,
}

// [5] num_tokens, num_chunks, world, interleave, blocks; then of each chunk [num_chunks] its first token's number in the step, [num_chunks]
// begin, [num_chunks] out_row, [num_chunks, world] sources; of the pattern [blocks] owners, [blocks] before, [world] owned
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(1) @binding(0) var<uniform> params: ReorgParams;
@group(1) @binding(1) var<storage, read> gathered: array<Unit>; // [world, local rows, ROW_UNITS], ranks and rows strided
@group(1) @binding(2) var<storage, read_write> out: array<Unit>; // [rows, ROW_UNITS], strided

@compute @workgroup_size(GROUP)
fn reorg_kvcache(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let number = item / ROW_UNITS;
    let unit = item % ROW_UNITS;
    if number >= table[0] {
        return;
    }
    let num_chunks = table[1];
    let world = table[2];
    let interleave = table[3];
    let blocks = table[4];
    let begins = 5u + num_chunks;
    let out_rows = begins + num_chunks;
    let sources = out_rows + num_chunks;
    let owners = sources + num_chunks * world;
    let before = owners + blocks;
    let owned = before + blocks;
    // Binary search for the last chunk that begins at or before this token.
    var chunk = 0u;
    var end = num_chunks;
    while end - chunk > 1u {
        let middle = (chunk + end) / 2u;
        if table[5u + middle] <= number {
            chunk = middle;
        } else {
            end = middle;
        }
    }
    let t = number - table[5u + chunk];
    let token = table[begins + chunk] + t;
    let turn = token / interleave / blocks;
    let block = token / interleave % blocks;
    let rank = table[owners + block];
    let index = (turn * table[owned + rank] + table[before + block]) * interleave + token % interleave;
    let local_row = table[sources + chunk * world + rank] + index;
    let row = table[out_rows + chunk] + t;
    // A step prepared again after its commands were recorded may have more rows than the binding's buffers.
    if rank >= params.world || local_row >= params.max_local_rows || row >= params.max_rows {
        return;
    }
    let at = params.gathered_base_units + rank * params.rank_stride_units + local_row * params.gathered_stride_units;
    out[params.out_base_units + row * params.out_stride_units + unit] = gathered[at + unit];
}
