// The cache of a layer.
@group(0) @binding(2) var<storage, read> kv: array<KvOct>; // [num_pages, page_size, (L + R) / 8]
