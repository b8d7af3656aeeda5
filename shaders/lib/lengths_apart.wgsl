// The lengths of lists of slots, in a binding of their own. lib/lengths_within.wgsl is the alternative.
@group(0) @binding(7) var<storage, read> lengths: array<u32>; // i32 [total_q]

fn list_length(at: u32) -> u32 {
    return lengths[at];
}
