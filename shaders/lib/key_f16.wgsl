// Keys for cooperative matrices from an f16 cache: an oct (8 consecutive elements, two a word) is used as it is.
alias KvOct = vec4<u32>;

const KEY_UNIT = 1.0; // scale of a staged key
const SCORES_SHOW_ODD_KEYS = false;

fn half_key(oct: KvOct) -> HalfOct {
    return half_oct(oct);
}

fn odd_bits(oct: KvOct) -> u32 {
    return 0u;
}

const ODD = 0u;

// Never reached: f16 holds every key.
fn wide_rows(first_row: u32, num_rows: u32, page_begin: u32, kv_begin: u32, kv_end: u32, slot: u32, subgroup: u32, lane: u32) {}
