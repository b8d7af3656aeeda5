// The rotary rotation of four pairs, shared by rope and rope_append so that both give the same bits.
//
// A quad is 4 consecutive elements. Unit u of a head is the two quads that hold its pairs 4u to 4u + 3: adjacent in the interleaved
// layout, UNITS quads apart in the half-split one. Constants: UNITS = R / 8; INTERLEAVED, 1 or 0.

@group(1) @binding(1) var<storage, read> positions: array<i32>; // [tokens]
@group(1) @binding(2) var<storage, read> cos_sin: array<vec4<f32>>; // [max_position, 2 * UNITS]: cosines, then sines

struct RopeParams {
    x_base_quads: u32,
    x_token_stride_quads: u32,
    x_head_stride_quads: u32,
    max_position: u32,
    y_base_quads: u32,
    y_token_stride_quads: u32,
    y_head_stride_quads: u32,
    max_tokens: u32,
    scale: f32, // of what is rotated
    guard_flushed: u32, // as the next of rotated queries that are codes and counted: see lib/guard
    guard_top: u32,
    reserved: u32,
}

struct Angles {
    cos: vec4<f32>,
    sin: vec4<f32>,
}

struct TwoQuads {
    first: vec4<u32>,
    second: vec4<u32>,
}

// Positions written on the device are seen by no host check: they are clamped to the table's 0 to max_position - 1.
fn angles_of(position: i32, unit: u32, max_position: u32) -> Angles {
    let row = min(u32(max(position, 0)), max_position - 1u);
    let at = row * (2u * UNITS) + unit;
    return Angles(cos_sin[at], cos_sin[at + UNITS]);
}

fn first_quad(unit: u32) -> u32 {
    return select(unit, 2u * unit, INTERLEAVED == 1u);
}

fn second_quad(unit: u32) -> u32 {
    return select(UNITS + unit, 2u * unit + 1u, INTERLEAVED == 1u);
}

// f32 bits to f32 bits. Explicit fma: one product is rounded and the other is not. Compilers may contract as they like otherwise, and two
// shaders could differ in some bits.
fn rotated(quads: TwoQuads, angles: Angles) -> TwoQuads {
    let a = quads.first;
    let b = quads.second;
    let is_interleaved = INTERLEAVED == 1u;
    let x_bits = select(a, vec4<u32>(a.xz, b.xz), is_interleaved);
    let y_bits = select(b, vec4<u32>(a.yw, b.yw), is_interleaved);
    // WGSL may assume that there is no NaN and no infinity, so these are told by their bits, and give NaN.
    let exponent = vec4<u32>(0x7F800000u);
    let is_number = ((x_bits & exponent) != exponent) & ((y_bits & exponent) != exponent);
    let x = bitcast<vec4<f32>>(select(vec4<u32>(0u), x_bits, is_number));
    let y = bitcast<vec4<f32>>(select(vec4<u32>(0u), y_bits, is_number));
    let x_new = fma(x, angles.cos, -(y * angles.sin));
    let y_new = fma(y, angles.cos, x * angles.sin);
    let nan = vec4<u32>(0x7FC00000u);
    let xs = select(nan, bitcast<vec4<u32>>(x_new), is_number);
    let ys = select(nan, bitcast<vec4<u32>>(y_new), is_number);
    return TwoQuads(
        select(xs, vec4<u32>(xs.x, ys.x, xs.y, ys.y), is_interleaved),
        select(ys, vec4<u32>(xs.z, ys.z, xs.w, ys.w), is_interleaved),
    );
}
