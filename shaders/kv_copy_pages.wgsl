// Copies whole pages inside one layer's pool, as raw bits.
//
//   for (from, to) in copies: kv[to] = kv[from]
//
// Where a pool is cut into slabs, a dispatch copies from one slab to another, or within one.
//
// The host checked that no page is both read and written, and none written twice, so the copies need no order.
//
// Tile: one Unit a thread, 16 bytes where the strides allow it, else a word.
// Concatenated with: lib/grid, lib/copy_within or lib/copy_between. Constants: GROUP, PAGE_UNITS; alias Unit.

struct CopyParams {
    kv_base_units: u32, // of both slabs, as the next
    kv_block_stride_units: u32,
    from_first_page: u32, // of the slab that is read; 0 where it is the whole pool
    from_num_pages: u32, // of that slab
    to_first_page: u32, // of the slab that is written
    to_num_pages: u32,
    target_base_units: u32,
    reserved_0: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + 2 * copies] num_copies, then (from, to) of each
@group(1) @binding(0) var<uniform> params: CopyParams;
@group(1) @binding(1) var<storage, read_write> kv: array<Unit>; // [num_pages, PAGE_UNITS], pages strided

@compute @workgroup_size(GROUP)
fn kv_copy_pages(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let copy = item / PAGE_UNITS;
    let unit = item % PAGE_UNITS;
    if copy >= table[0] {
        return;
    }
    let source = table[1u + 2u * copy] - params.from_first_page;
    let target_page = table[2u + 2u * copy] - params.to_first_page;
    // Copies between other slabs are left to their dispatch. The host checked the ids; the bound also covers a table made for a larger
    // pool.
    if source >= params.from_num_pages || target_page >= params.to_num_pages {
        return;
    }
    let value = load_unit(params.kv_base_units + source * params.kv_block_stride_units + unit);
    kv[params.target_base_units + target_page * params.kv_block_stride_units + unit] = value;
}
