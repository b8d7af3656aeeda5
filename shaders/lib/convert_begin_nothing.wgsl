// A conversion that needs no table.
fn begin_convert(lane: u32, scale: E4m3Scale) {}
