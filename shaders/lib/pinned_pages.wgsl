// The page list, beside lib/pinned.wgsl.
@group(1) @binding(3) var<storage, read_write> pages: array<u32>; // [num_words] page ids, those of a sequence consecutive
