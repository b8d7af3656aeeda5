// How a cooperative matrix gets its keys: here they are binary16 already.
alias KvOct = vec4<u32>;

const KEY_UNIT = 1.0; // what a staged key has to be multiplied with
const SCORES_SHOW_ODD_KEYS = false;

fn half_key(oct: KvOct) -> HalfOct {
    return half_oct(oct);
}

fn odd_bits(oct: KvOct) -> u32 {
    return 0u;
}

const ODD = 0u;

fn wide_rows(first_row: u32, num_rows: u32, page_begin: u32, kv_begin: u32, kv_end: u32, slot: u32, subgroup: u32, lane: u32) {}
