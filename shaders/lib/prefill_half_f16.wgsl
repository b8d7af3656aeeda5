// How queries, keys and values become f16: they are.
const SCALES_QUERIES = false;
const NOTICES_ODD = false;

fn half_of(oct: Unit) -> HalfOct {
    return half_oct(oct);
}

fn half_query(oct: Unit, factor: f32) -> HalfOct {
    return half_oct(oct);
}

fn magnitude_of(oct: Unit) -> f32 {
    return 0.0;
}

fn odd_bits(oct: Unit) -> u32 {
    return 0u;
}

fn wide_rows(tile: Tile, subgroup: u32, lane: u32) {}
