// The cache of a layer, for a kernel that loads a block well before it uses it. It is not written, but declared as if it were:
// NVIDIA's compiler moves a load from a read-only buffer down to its use, past barriers, and its latency is then waited for.
@group(0) @binding(2) var<storage, read_write> kv: array<KvOct>; // [num_pages, page_size, (L + R) / 8]
