// The layer's cache and the step's tables, read-only; the page list is in lib/read_pages.wgsl. lib/pinned.wgsl is the alternative.
@group(0) @binding(2) var<storage, read> kv: array<KvOct>; // [num_pages, page_size, (L + R) / 8]
@group(1) @binding(0) var<storage, read> tables: array<u32>; // [Header, items, queries, merges, merge_partials]
