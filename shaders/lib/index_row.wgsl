// A row of an indexer, a key or a head's query: 128 elements that are rotated and quantised by 16 consecutive invocations.
//
//   x[0..64] = RoPE(x[0..64]); x = x H_128 / 128^1/2; scale = max(amax, 1e-4) / 448, or the power of two from there on
//
// A quad is 4 consecutive elements. Part p of a row has two quads that are 8 apart, quad_of(p) and quad_of(p) + 8: in either layout of RoPE
// both elements of a pair are of one part. The format is the same for all invocations, so branches on it may have barriers.
//
// Concatenated with: lib/round, lib/in_*, lib/out_*, and a kernel that binds cos_sin.
// Constants: GROUP, PARTS (16, the invocations of a row).

const ROWS = GROUP / PARTS; // rows of a workgroup
const ROW_QUADS = 32u;
// The exchange array's floats: 8 of 40 lie between blocks of 8 quads and 4 between rows, so that columns of a row are in different banks.
const BLOCK_FLOATS = 40u;
const ROW_FLOATS = 4u * BLOCK_FLOATS + 4u;
const ROOT_OF_128TH = 0.08838834764831845;
const LEAST_AMAX = 0x38D1B717u; // bits of 1e-4
const NAN_BITS = 0x7FC00000u;

struct IndexParams {
    rope: u32, // 0: none, 1: pairs (2i, 2i + 1), 2: pairs (i, i + 32)
    hadamard: u32, // 0 or 1, as the next
    ue8m0: u32,
    max_position: u32,
    two_to_24: f32, // 2^24, unknown to the compiler: see lib/code_e4m3
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

// The two quads of a part.
struct Part {
    first: vec4<f32>,
    second: vec4<f32>,
    is_finite: bool, // of what was read
}

var<workgroup> exchange: array<f32, ROWS * ROW_FLOATS>; // [ROWS, 4 blocks, 8 quads, 4], with gaps
var<workgroup> largest: array<u32, GROUP>; // [ROWS, PARTS] bits of |x|, or all ones where an element is not finite

fn quad_of(part: u32) -> u32 {
    return part / 8u * 16u + part % 8u;
}

// Elements that are not finite are read as 0: WGSL may assume that there are none.
fn part_of(first: InQuad, second: InQuad) -> Part {
    let a = in_bits4(first);
    let b = in_bits4(second);
    let exponent = vec4<u32>(F32_INF);
    let a_finite = (a & exponent) != exponent;
    let b_finite = (b & exponent) != exponent;
    let zeros = vec4<u32>(0u);
    return Part(
        bitcast<vec4<f32>>(select(zeros, a, a_finite)),
        bitcast<vec4<f32>>(select(zeros, b, b_finite)),
        all(a_finite) & all(b_finite),
    );
}

// Positions written on the device are seen by no host check: they are clamped to the table's 0 to max_position - 1.
fn rotary(x: Part, part: u32, position: i32, params: IndexParams) -> Part {
    let at = min(u32(max(position, 0)), params.max_position - 1u) * 16u;
    if params.rope == 2u {
        let cos = cos_sin[at + part];
        let sin = cos_sin[at + 8u + part];
        return Part(x.first * cos - x.second * sin, x.second * cos + x.first * sin, x.is_finite);
    }
    return Part(
        turned_pairs(x.first, at + part / 2u, part % 2u == 1u),
        turned_pairs(x.second, at + 4u + part / 2u, part % 2u == 1u),
        x.is_finite,
    );
}

// A quad of two pairs, whose angles are the first or the second half of a quad of cosines and of one of sines.
fn turned_pairs(x: vec4<f32>, at: u32, is_second: bool) -> vec4<f32> {
    let coses = cos_sin[at];
    let sines = cos_sin[at + 8u];
    let cos = select(coses.xy, coses.zw, is_second);
    let sin = select(sines.xy, sines.zw, is_second);
    let re = x.xz * cos - x.yw * sin;
    let im = x.yw * cos + x.xz * sin;
    return vec4<f32>(re.x, im.x, re.y, im.y);
}

// The first float of a quad in the exchange array.
fn place_of(row: u32, quad: u32) -> u32 {
    return row * ROW_FLOATS + quad / 8u * BLOCK_FLOATS + quad % 8u * 4u;
}

fn put_quad(at: u32, quad: vec4<f32>) {
    exchange[at] = quad.x;
    exchange[at + 1u] = quad.y;
    exchange[at + 2u] = quad.z;
    exchange[at + 3u] = quad.w;
}

fn quad_at(at: u32) -> vec4<f32> {
    return vec4<f32>(exchange[at], exchange[at + 1u], exchange[at + 2u], exchange[at + 3u]);
}

// H_4 of a quad: the lowest two bits of an element's number.
fn hadamard_4(x: vec4<f32>) -> vec4<f32> {
    let y = vec4<f32>(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    return vec4<f32>(y.xy + y.zw, y.xy - y.zw);
}

// x H_128 / 128^1/2 in Sylvester's order: the sign of element i in result j is the parity of i & j. Bits 0, 1 and 3 + 2 are of one part,
// the others are combined in the exchange array: a part takes a column of 16 elements, of which it makes 8 results.
fn hadamard(x: Part, row: u32, part: u32) -> Part {
    let a = hadamard_4(x.first);
    let b = hadamard_4(x.second);
    let own = place_of(row, quad_of(part));
    put_quad(own, (a + b) * ROOT_OF_128TH);
    put_quad(own + BLOCK_FLOATS, (a - b) * ROOT_OF_128TH);
    workgroupBarrier();
    // Column c of 8: an element of a quad, and which of a part's two quads. The lowest bit of `part` is bit 6 of the results.
    let column = part / 2u;
    let low = row * ROW_FLOATS + column / 4u * BLOCK_FLOATS + column % 4u;
    let high = low + 2u * BLOCK_FLOATS;
    // No selection of two literals: DXC makes doubles of it.
    let sign = 1.0 - 2.0 * f32(part % 2u);
    let p = vec4<f32>(exchange[low], exchange[low + 4u], exchange[low + 8u], exchange[low + 12u])
        + sign * vec4<f32>(exchange[high], exchange[high + 4u], exchange[high + 8u], exchange[high + 12u]);
    let q = vec4<f32>(exchange[low + 16u], exchange[low + 20u], exchange[low + 24u], exchange[low + 28u])
        + sign * vec4<f32>(exchange[high + 16u], exchange[high + 20u], exchange[high + 24u], exchange[high + 28u]);
    let y = hadamard_4(p + q);
    let z = hadamard_4(p - q);
    workgroupBarrier();
    let to = select(low, high, part % 2u == 1u);
    exchange[to] = y.x;
    exchange[to + 4u] = y.y;
    exchange[to + 8u] = y.z;
    exchange[to + 12u] = y.w;
    exchange[to + 16u] = z.x;
    exchange[to + 20u] = z.y;
    exchange[to + 24u] = z.z;
    exchange[to + 28u] = z.w;
    put_largest(row, part, y, z, x.is_finite);
    workgroupBarrier();
    return Part(quad_at(own), quad_at(own + BLOCK_FLOATS), x.is_finite);
}

fn put_largest(row: u32, part: u32, x: vec4<f32>, y: vec4<f32>, is_finite: bool) {
    // The order of bits is that of numbers from 0 up.
    let quad = max(bitcast<vec4<u32>>(x) & vec4<u32>(0x7FFFFFFFu), bitcast<vec4<u32>>(y) & vec4<u32>(0x7FFFFFFFu));
    let amax = max(max(quad.x, quad.y), max(quad.z, quad.w));
    largest[row * PARTS + part] = select(0xFFFFFFFFu, amax, is_finite);
}

// The largest magnitude of a row, bits; above those of every number where an element is not finite.
fn largest_of(row: u32) -> u32 {
    var amax = LEAST_AMAX;
    for (var i = 0u; i < PARTS; i++) { // unroll
        amax = max(amax, largest[row * PARTS + i]);
    }
    return amax;
}

// RoPE and the Hadamard rotation, as the format has them; afterwards `largest_of` the row can be asked. To be called by all invocations.
fn rotated_part(x: Part, row: u32, part: u32, position: i32, params: IndexParams) -> Part {
    var y = x;
    if params.rope != 0u && part < 8u {
        y = rotary(x, part, position, params);
    }
    if params.hadamard == 1u {
        y = hadamard(y, row, part);
    } else {
        put_largest(row, part, y.first, y.second, y.is_finite);
        workgroupBarrier();
    }
    return y;
}

// A scale and its reciprocal.
struct IndexScale {
    bits: u32,
    inverse: f32,
}

// 448 is 1.75 * 2^8: the exponent of amax is 8 more than that of the power of two from amax / 448 on, or 7 where its mantissa is past 1.75.
fn scale_of(amax: u32, params: IndexParams) -> IndexScale {
    if amax >= F32_INF {
        return IndexScale(NAN_BITS, 1.0);
    }
    if params.ue8m0 == 1u {
        let exponent = ((amax + 0x1FFFFFu) >> 23u) - 8u;
        return IndexScale(exponent << 23u, bitcast<f32>((254u - exponent) << 23u));
    }
    return IndexScale(bitcast<u32>(bitcast<f32>(amax) / 448.0), 448.0 / bitcast<f32>(amax));
}

// A quad in the format's dtype: codes of x times `factor`, or x times 1. All NaN where an element of the row was not finite.
fn out_of(x: vec4<f32>, factor: f32, amax: u32, params: IndexParams) -> OutQuad {
    let bits = select(bitcast<vec4<u32>>(x * factor), vec4<u32>(NAN_BITS), amax >= F32_INF);
    return out_quad(bits, E4m3Scale(1.0, 0, 0x800000u, 0x43E40000u, 128.0, 128.0, params.two_to_24, 0u));
}
