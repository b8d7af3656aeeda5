// Rotates a unit of query head [token, head] of x into y.
// Concatenated with: lib/rotate, lib/rope_apart or lib/rope_in_place, query_bits and query_quad. Constants: UNITS; aliases
// QueryQuad, of x, and QueryOut, of y.

@group(1) @binding(3) var<storage, read_write> y: array<QueryOut>; // [tokens, heads, 2 * UNITS], strided

// `unit` counts the units of all heads of the token. Loads come before the test of is_item, so that only the angles wait for another load,
// that of the position.
fn rotate_unit(token: u32, position: i32, unit: u32, params: RopeParams, is_item: bool) {
    let head = unit / UNITS;
    let first = first_quad(unit % UNITS);
    let second = second_quad(unit % UNITS);
    let x_row = params.x_base_quads + token * params.x_token_stride_quads + head * params.x_head_stride_quads;
    let y_row = params.y_base_quads + token * params.y_token_stride_quads + head * params.y_head_stride_quads;
    let quads = TwoQuads(query_bits(x_quad(x_row + first)), query_bits(x_quad(x_row + second)));
    let angles = angles_of(position, unit % UNITS, params.max_position);
    let turned = rotated(quads, Angles(angles.cos * params.scale, angles.sin * params.scale));
    if is_item {
        y[y_row + first] = query_quad(turned.first);
        y[y_row + second] = query_quad(turned.second);
        note_lost(turned.first, params.guard_flushed, params.guard_top); // guarded queries
        note_lost(turned.second, params.guard_flushed, params.guard_top); // guarded queries
    }
}
