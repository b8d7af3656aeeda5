// begin_convert of the conversions without a table: nothing to do.
fn begin_convert(lane: u32, scale: E4m3Scale) {}
