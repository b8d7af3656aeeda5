// The page list, beside lib/read.wgsl.
@group(1) @binding(3) var<storage, read> pages: array<u32>; // [num_words] page ids, those of a sequence consecutive
