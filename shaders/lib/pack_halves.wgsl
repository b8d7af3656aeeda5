// Entries of lib/convert_table.wgsl for outputs of 16 bits: the code in both halves of a word, so that packing needs no shift.
fn table_entry(code: u32) -> u32 {
    return code | (code << 16u);
}

fn pack(a: u32, b: u32, c: u32, d: u32) -> OutQuad {
    return vec2<u32>((a & 0xFFFFu) | (b & 0xFFFF0000u), (c & 0xFFFFu) | (d & 0xFFFF0000u));
}
