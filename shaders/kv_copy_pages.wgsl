// Copies whole pages inside one layer's pool, as raw bits.
//
//   for (from, to) in copies: kv[to] = kv[from]
//
// The host proved that no page is both read and written, and none written twice, so the order cannot matter.
// An item is one Unit: 16 bytes where the strides allow it, else a word.
//
// Prelude: GROUP, NUM_PAGES, PAGE_UNITS, alias Unit. Libs: grid.

struct CopyParams {
    kv_base_units: u32,
    kv_block_stride_units: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [1 + 2 * copies] num_copies, then (from, to) each
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
    let source = table[1u + 2u * copy];
    let target_page = table[2u + 2u * copy];
    // the host proved this; the bound keeps a wild table harmless too
    if source >= NUM_PAGES || target_page >= NUM_PAGES {
        return;
    }
    let value = kv[params.kv_base_units + source * params.kv_block_stride_units + unit];
    kv[params.kv_base_units + target_page * params.kv_block_stride_units + unit] = value;
}
