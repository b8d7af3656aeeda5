// The scales of a record as FlashMLA's quantiser has them: of each RECORD_GROUP elements, 2^ceil(log2(max(amax / 448, 1e-4))).
//
// GROUP_QUADS consecutive invocations have a group's quads, for each token of a lane. All is integer arithmetic on bits, whose order for
// x >= 0 is that of the numbers, so subnormals count, and infinities and NaNs are above all numbers: their group's scale is 2^120.
//
// Concatenated with: lib/round, lib/record, lib/code_e4m3, lib/out_e4m3. Constants: GROUP, TOKENS_PER_LANE.

const GROUPS = GROUP / GROUP_QUADS; // groups of a token in a workgroup

var<workgroup> largest: array<atomic<u32>, GROUPS * TOKENS_PER_LANE>; // [TOKENS_PER_LANE, GROUPS] bits of amax

// To be called by all invocations, before and after `add_largest`.
fn begin_largest(lane: u32) {
    if lane < GROUPS * TOKENS_PER_LANE {
        atomicStore(&largest[lane], 0u);
    }
    workgroupBarrier();
}

fn end_largest() {
    workgroupBarrier();
}

// Takes a quad into the amax of its group; `token` is one of the lane's.
fn add_largest(lane: u32, token: u32, bits: vec4<u32>) {
    let magnitude = bits & vec4<u32>(0x7FFFFFFFu);
    let pair = max(magnitude.xy, magnitude.zw);
    atomicMax(&largest[token * GROUPS + lane / GROUP_QUADS], max(pair.x, pair.y));
}

// The biased exponent of the group's scale. 448 is 1.75 * 2^8, so the exponent of amax is 8 more, or 7 where its mantissa is past 1.75;
// 1e-4 is between 2^-14 and 2^-13, whose biased exponent is 114.
fn scale_exponent(lane: u32, token: u32) -> u32 {
    let amax = min(atomicLoad(&largest[token * GROUPS + lane / GROUP_QUADS]), F32_INF);
    return max((amax + 0x1FFFFFu) >> 23u, 122u) - 8u;
}

// 4 codes of x / 2^(exponent - 127). No number saturates, so only infinities and NaNs are past what the fast path takes; the inverse is
// normal for every exponent from 114 to 247.
fn codes_of(bits: vec4<u32>, exponent: u32, two_to_24: f32) -> u32 {
    let inverse = bitcast<f32>((261u - exponent) << 23u); // 128 / scale
    let scale = E4m3Scale(1.0, i32(exponent) - 127, 0x800000u, F32_INF - 1u, inverse, inverse, two_to_24, 0u);
    return out_quad(bits, scale);
}
