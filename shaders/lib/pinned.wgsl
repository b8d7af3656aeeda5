// The cache of a layer, the step's tables and its page list, for a kernel that loads from them well before it uses what it loads. They
// are not written, but declared as if they were: NVIDIA's compiler moves a load from a read-only buffer down to its use, past barriers,
// and its latency is then waited for.
@group(0) @binding(2) var<storage, read_write> kv: array<KvOct>; // [num_pages, page_size, (L + R) / 8]
@group(1) @binding(0) var<storage, read_write> tables: array<u32>; // [Header, items, queries, merges, merge_partials]
@group(1) @binding(3) var<storage, read_write> pages: array<u32>; // ids, one after the other for each sequence
