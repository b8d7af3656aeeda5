// The layer's cache and the step's tables, for kernels that prefetch into registers; the page list is in lib/pinned_pages.wgsl. Never
// written, but declared read_write: NVIDIA's compiler sinks a load from a read-only buffer to its use, past barriers, which exposes its
// latency.
@group(0) @binding(2) var<storage, read_write> kv: array<KvOct>; // [num_pages, page_size, (L + R) / 8]
@group(1) @binding(0) var<storage, read_write> tables: array<u32>; // [Header, items, queries, merges, merge_partials]
