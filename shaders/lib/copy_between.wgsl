// kv_copy_pages from one slab of the pool to another.

@group(1) @binding(2) var<storage, read> other: array<Unit>; // [num_pages, PAGE_UNITS], pages strided

fn load_unit(at: u32) -> Unit {
    return other[at];
}
