// The lengths of lists of slots, in the lists' buffer, where a device binds no more than eight. lib/lengths_apart.wgsl is the alternative.
fn list_length(at: u32) -> u32 {
    return indices[at];
}
