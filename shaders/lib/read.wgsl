// The layer's cache, the step's tables and its page list, read-only. lib/pinned.wgsl is the alternative.
@group(0) @binding(2) var<storage, read> kv: array<KvOct>; // [num_pages, page_size, (L + R) / 8]
@group(1) @binding(0) var<storage, read> tables: array<u32>; // [Header, items, queries, merges, merge_partials]
@group(1) @binding(3) var<storage, read> pages: array<u32>; // [num_words] page ids, those of a sequence consecutive
