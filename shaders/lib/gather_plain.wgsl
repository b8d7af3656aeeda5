// What kv_gather reads of a token of elements of one dtype. lib/gather_record.wgsl is the alternative.
alias Stored = InQuad;

fn stored_quad(row: u32, quad: u32) -> Stored {
    return kv[row + quad];
}
