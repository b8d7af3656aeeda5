// The cache of a layer and the step's tables.
@group(0) @binding(2) var<storage, read> kv: array<KvOct>; // [num_pages, page_size, (L + R) / 8]
@group(1) @binding(0) var<storage, read> tables: array<u32>; // [Header, items, queries, merges, merge_slots, pages]
