// What every kernel of top_k has in common: a row of the table, the order of logits, counts of a digit, and what is chosen in its order.
//
// Logits are bits. A key is greater the earlier a logit is chosen: by value, the two zeros alike, NaN last with the key 0. The key of the
// last that is chosen, the threshold, is found digit by digit, 11 bits, 11 and 10: the digit's value at which counts from above reach what
// is left to choose. Logits above the threshold are chosen, and those at it, ties, by index up to how many are left.
//
// Constants: GROUP, LOADS, RUN, ROW_WORDS, which is 1 for indices and 3 for slots.

struct TopKParams {
    logits_base: u32,
    logits_stride: u32,
    indices_base: u32,
    indices_stride: u32,
    values_base: u32,
    values_stride: u32,
    columns: u32,
    max_rows: u32,
    out_rows: u32,
    writes_values: u32,
    most_slices: u32,
    k: u32,
    page_size: u32,
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

// rows, the row of `indices` of row 0, then for each row: its length, or UNKNOWN where `lengths` has it, and with slots the place of its
// first page in the words after the first one and how many pages it has; then the pages, UNKNOWN for one that is not in the pool
@group(0) @binding(0) var<storage, read> table: array<u32>; // [2 + rows * ROW_WORDS + pages]
@group(1) @binding(0) var<uniform> params: TopKParams;
@group(1) @binding(1) var<storage, read> logits: array<u32>; // [max_rows, columns] bits of f32, rows strided
@group(1) @binding(2) var<storage, read> lengths: array<u32>; // [max_rows] bits of i32
@group(1) @binding(3) var<storage, read_write> indices: array<u32>; // [out_rows, k] bits of i32, rows strided
@group(1) @binding(4) var<storage, read_write> values: array<u32>; // [out_rows, k] bits of f32, rows strided

const UNKNOWN = 0xFFFFFFFFu;
const MINUS_INFINITY = 0xFF800000u;
const BINS = 2048u;

var<workgroup> counts: array<atomic<u32>, 2048>; // [BINS] of a digit
var<workgroup> sums: array<u32, GROUP>; // [GROUP] of a scan
var<workgroup> found: vec2<u32>; // the value of a digit, and how many of those that have it are left to choose

fn key_of(bits: u32) -> u32 {
    if (bits & 0x7FFFFFFFu) > 0x7F800000u {
        return 0u;
    }
    return select(bits | 0x80000000u, ~bits, bits > 0x80000000u);
}

// What the host has was checked, and what the device has is clamped.
fn length_of(row: u32) -> u32 {
    let known = table[2u + row * ROW_WORDS];
    let length = select(known, u32(max(bitcast<i32>(lengths[row]), 0)), known == UNKNOWN);
    return min(length, params.columns);
}

// The sum of `value` over the lanes before this one; that of all is then in the last of `sums`.
fn sum_before(lane: u32, value: u32) -> u32 {
    workgroupBarrier();
    sums[lane] = value;
    workgroupBarrier();
    for (var step = 1u; step < GROUP; step *= 2u) {
        let before = select(0u, sums[max(lane, step) - step], lane >= step);
        workgroupBarrier();
        sums[lane] += before;
        workgroupBarrier();
    }
    return sums[lane] - value;
}

// Counts a digit of the keys of logits begin..end whose bits under `mask` are `known`: that of the other bits, from `shift` on. Gives the
// number of this lane's keys that are greater in these bits.
fn count_digit(lane: u32, row: u32, begin: u32, end: u32, known: u32, mask: u32, shift: u32) -> u32 {
    workgroupBarrier();
    for (var bin = lane; bin < BINS; bin += GROUP) {
        atomicStore(&counts[bin], 0u);
    }
    workgroupBarrier();
    let first = params.logits_base + row * params.logits_stride;
    var above = 0u;
    for (var item = begin + lane; item < end; item += GROUP * LOADS) {
        var bits: array<u32, LOADS>;
        for (var i = 0u; i < LOADS; i++) { // unroll
            bits[i] = logits[first + min(item + i * GROUP, end - 1u)];
        }
        for (var i = 0u; i < LOADS; i++) { // unroll
            let key = key_of(bits[i]);
            if item + i * GROUP < end {
                if (key & mask) == known {
                    atomicAdd(&counts[(key & ~mask) >> shift], 1u);
                }
                above += u32((key & mask) > known);
            }
        }
    }
    workgroupBarrier();
    return above;
}

// Puts into `found` where the counts of a digit of GROUP * per values reach `left` from above.
fn find_digit(lane: u32, per: u32, left: u32) {
    if lane == 0u {
        found = vec2<u32>(0u, left);
    }
    let top = (GROUP - lane) * per - 1u;
    var sum = 0u;
    for (var i = 0u; i < per; i++) {
        sum += atomicLoad(&counts[top - i]);
    }
    let before = sum_before(lane, sum);
    if before < left && left <= before + sum {
        var rest = left - before;
        var bin = top;
        for (var i = 1u; i < per; i++) {
            let count = atomicLoad(&counts[bin]);
            if rest <= count {
                break;
            }
            rest -= count;
            bin -= 1u;
        }
        found = vec2<u32>(bin, rest);
    }
    workgroupBarrier();
}

// What is written for an index of a row.
fn entry_of(row: u32, index: u32) -> u32 {
    if ROW_WORDS == 1u {
        return index;
    }
    let at = 2u + row * ROW_WORDS;
    let block = index / params.page_size;
    if block >= table[at + 2u] {
        return UNKNOWN;
    }
    let page = table[1u + table[at + 1u] + block];
    return select(page * params.page_size + index % params.page_size, UNKNOWN, page == UNKNOWN);
}

fn put(row: u32, place: u32, entry: u32, bits: u32) {
    // Counts of one row agree, so a place is below k; memory is safe without that.
    if place < params.k {
        let out_row = table[1] + row;
        indices[params.indices_base + out_row * params.indices_stride + place] = entry;
        if params.writes_values != 0u {
            values[params.values_base + out_row * params.values_stride + place] = bits;
        }
    }
}

// Writes what is chosen of logits begin..end. Before them `above` logits of the row are above the threshold, and `ties` at it; `left` of
// these are chosen.
fn write_chosen(lane: u32, row: u32, begin: u32, end: u32, threshold: u32, left: u32, above: u32, ties: u32) {
    let first = params.logits_base + row * params.logits_stride;
    var above_before = above;
    var ties_before = ties;
    for (var base = begin; base < end; base += GROUP * RUN) {
        // Neighbours, so that the order of lanes is that of indices. They are at most GROUP * RUN, which half a word holds.
        let item = base + lane * RUN;
        var bits: array<u32, RUN>;
        var own = 0u;
        for (var i = 0u; i < RUN; i++) { // unroll
            bits[i] = logits[first + min(item + i, end - 1u)];
        }
        for (var i = 0u; i < RUN; i++) { // unroll
            let key = key_of(bits[i]);
            own += select(0u, u32(key > threshold) + (u32(key == threshold) << 16u), item + i < end);
        }
        let before = sum_before(lane, own);
        if own != 0u {
            var place_above = above_before + (before & 0xFFFFu);
            var place_ties = ties_before + (before >> 16u);
            for (var i = 0u; i < RUN; i++) { // unroll
                let key = key_of(bits[i]);
                if item + i < end && key >= threshold {
                    if key > threshold || place_ties < left {
                        put(row, place_above + min(place_ties, left), entry_of(row, item + i), bits[i]);
                    }
                    place_above += u32(key > threshold);
                    place_ties += u32(key == threshold);
                }
            }
        }
        let all = sums[GROUP - 1u];
        above_before += all & 0xFFFFu;
        ties_before += all >> 16u;
    }
}

// Writes all logits of begin..end, where a row has no more than k, and nothing behind them. `step` lanes share the row.
fn write_all(lane: u32, step: u32, row: u32, length: u32) {
    let first = params.logits_base + row * params.logits_stride;
    for (var index = lane; index < params.k; index += step) {
        if index < length {
            put(row, index, entry_of(row, index), logits[first + index]);
        } else {
            put(row, index, UNKNOWN, MINUS_INFINITY);
        }
    }
}
