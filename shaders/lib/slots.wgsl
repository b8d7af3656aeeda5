// Where a slot of the paged cache is, for ops that take slots. Slot `page * PAGE_SIZE + offset` is the token at `offset` in `page`.
// Constants: PAGE_SIZE, SLOT_QUADS (quads from a slot to the next; of a record, words).

// First quad (4 elements) of a slot's token, in pages that begin at `base` and are `page_stride` quads apart.
fn row_of_slot(slot: u32, base: u32, page_stride: u32) -> u32 {
    return base + slot / PAGE_SIZE * page_stride + slot % PAGE_SIZE * SLOT_QUADS;
}
