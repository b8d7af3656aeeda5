// f16 queries, keys and values of mla_prefill_coop.wgsl: used as they are. Concatenated with: lib/half_oct.
const KEY_UNIT = 1.0; // scale of a staged key
const SCALES_QUERIES = false;
const NOTICES_ODD = false;

fn half_key(oct: Unit) -> HalfOct {
    return half_oct(oct);
}

fn half_value(oct: Unit) -> HalfOct {
    return half_oct(oct);
}

fn half_query(oct: Unit, factor: f32) -> HalfOct {
    return half_oct(oct);
}

fn magnitude_of(oct: Unit) -> f32 {
    return 0.0;
}

fn odd_key(oct: Unit) -> u32 {
    return 0u;
}

fn odd_value(oct: Unit) -> u32 {
    return 0u;
}

// Never called: every f16 element fits.
fn wide_rows(tile: Tile, subgroup: u32, lane: u32) {}
