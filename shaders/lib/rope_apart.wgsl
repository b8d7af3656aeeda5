// Rows to rotate are in another buffer than rotated ones.
@group(1) @binding(4) var<storage, read> x: array<QueryQuad>; // [tokens, heads, 2 * UNITS], strided

fn x_quad(at: u32) -> QueryQuad {
    return x[at];
}
