// Entries of lib/convert_table.wgsl for outputs of 32 bits.
fn table_entry(code: u32) -> u32 {
    return code;
}

fn pack(a: u32, b: u32, c: u32, d: u32) -> OutQuad {
    return vec4<u32>(a, b, c, d);
}
