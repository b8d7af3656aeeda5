// x_quad of rotations out of place: x has a buffer of its own.
@group(1) @binding(4) var<storage, read> x: array<QueryQuad>; // [tokens, heads, 2 * UNITS], strided

fn x_quad(at: u32) -> QueryQuad {
    return x[at];
}
