// bf16 queries, keys and values of mla_prefill_coop.wgsl, converted to f16 by octs (8 consecutive elements).
//
// Keys are multiplied by 64: exact from 2^-23 to 1020, within 2^-31 below, which large queries need. Values are exact from 2^-17 to
// 65280, within 2^-25 below. Larger ones are detected, and the tile is recomputed in f32 (`wide_rows`), slowly. Each query row is scaled
// by a power of two that brings its largest element just below 2^15. Concatenated with: lib/oct_bf16, lib/half_oct.
const KEY_UNIT = 0.015625; // scale of a staged key: 1/64
const SCALES_QUERIES = true;
const NOTICES_ODD = true;

// Both elements of a word are multiplied by 64 at once, by adding 6 to their exponents. 0 becomes 2^-121, which is 0 in f16 again.
// Magnitudes from 2^122 on become infinite or carry into the sign; `odd_key` detects them.
fn half_key(oct: Unit) -> HalfOct {
    let x = decode_bf16(oct + vec4<u32>(0x03000300u));
    return HalfOct(vec4<f16>(x[0]), vec4<f16>(x[1]));
}

fn half_value(oct: Unit) -> HalfOct {
    let x = decode_bf16(oct);
    return HalfOct(vec4<f16>(x[0]), vec4<f16>(x[1]));
}

fn half_query(oct: Unit, factor: f32) -> HalfOct {
    let x = decode_bf16(oct) * factor;
    return HalfOct(vec4<f16>(x[0]), vec4<f16>(x[1]));
}

fn magnitude_of(oct: Unit) -> f32 {
    let x = decode_bf16(oct);
    let largest = max(abs(x[0]), abs(x[1]));
    return max(max(largest.x, largest.y), max(largest.z, largest.w));
}

// The result is not 0 if a magnitude of the oct is 1024 (0x4480) or more.
fn odd_key(oct: Unit) -> u32 {
    return carries(oct, 0x3B803B80u);
}

// The result is not 0 if a magnitude of the oct is 65536 (0x4780) or more.
fn odd_value(oct: Unit) -> u32 {
    return carries(oct, 0x38803880u);
}

// The result is not 0 if adding `added` to some magnitude carries into its sign bit; it cannot carry beyond.
fn carries(oct: Unit, added: u32) -> u32 {
    let sums = (oct & vec4<u32>(0x7FFF7FFFu)) + vec4<u32>(added);
    return ((sums.x | sums.y) | (sums.z | sums.w)) & 0x80008000u;
}

// Recomputes a tile in f32, right for every bf16: a subgroup takes a row, a lane LANE_OCTS octs of its output; softmax is online, by key.
fn wide_rows(tile: Tile, subgroup: u32, lane: u32) {
    for (var row = subgroup; row < tile.num_rows; row += THREADS / SUBGROUP) {
        let visible = visible_to(tile, row);
        var row_max = EMPTY;
        var row_sum = 0.0;
        var acc: array<mat2x4<f32>, LANE_OCTS>;
        for (var number = 0u; number < visible; number++) {
            let key = key_of(tile, number);
            var part = vec4<f32>(0.0);
            for (var oct = lane; oct < ROW_OCTS; oct += SUBGROUP) {
                let q = decode_bf16(query_oct(tile, row, oct));
                let k = decode_bf16(key_oct(tile, key, oct));
                part += q[0] * k[0] + q[1] * k[1];
            }
            let score = subgroup_total((part.x + part.y) + (part.z + part.w)) * params.logit_scale;
            let top = max(row_max, score);
            let factor = exp2_exact(row_max - top);
            let weight = exp2_exact(score - top);
            row_max = top;
            row_sum = row_sum * factor + weight;
            for (var i = 0u; i < LANE_OCTS; i++) { // unroll
                acc[i] = acc[i] * factor + decode_bf16(value_oct(tile, key, min(i * SUBGROUP + lane, V_OCTS - 1u))) * weight;
            }
        }
        let any = row_sum > 0.0;
        let row_end = finish_row(tile.head, row_max, row_sum, 1.0, any);
        for (var i = 0u; i < LANE_OCTS; i++) { // unroll
            let oct = i * SUBGROUP + lane;
            if (oct < V_OCTS) {
                let value = acc[i] * row_end.factor;
                store_quad(tile, row, 2u * oct, value[0]);
                store_quad(tile, row, 2u * oct + 1u, value[1]);
            }
        }
        if (lane == 0u) {
            store_lse(tile, row, row_end.lse, any);
        }
    }
}

fn subgroup_total(x: f32) -> f32 {
    var sum = x;
    for (var lanes = 1u; lanes < SUBGROUP; lanes *= 2u) {
        sum += subgroupShuffleXor(sum, lanes);
    }
    return sum;
}

fn key_oct(tile: Tile, key: u32, oct: u32) -> Unit {
    if (oct < NOPE_OCTS) {
        return k_nope[params.k_nope_at + key * params.k_nope_token_stride + tile.head * params.k_nope_head_stride + oct];
    }
    return k_pe[params.k_pe_at + key * params.k_pe_token_stride + tile.head * params.k_pe_head_stride + oct - NOPE_OCTS];
}

fn value_oct(tile: Tile, key: u32, oct: u32) -> Unit {
    return v[params.v_at + key * params.v_token_stride + tile.head * params.v_head_stride + oct];
}
