// Index keys that are elements of a dtype, without scales. Concatenated with: lib/index_row.

fn put_scale(at: u32, bits: u32) {}
