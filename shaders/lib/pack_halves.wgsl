// 4 outputs of 16 bits from a table that has each in both halves.
fn table_entry(code: u32) -> u32 {
    return code | (code << 16u);
}

fn pack(a: u32, b: u32, c: u32, d: u32) -> OutQuad {
    return vec2<u32>((a & 0xFFFFu) | (b & 0xFFFF0000u), (c & 0xFFFFu) | (d & 0xFFFF0000u));
}
