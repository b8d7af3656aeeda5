// A unit of a row [token, head] of x, rotated, to y. Prelude: UNITS; QueryQuad and how it is read and rounded. Libs: rotate, rope_apart or
// rope_in_place.

@group(1) @binding(3) var<storage, read_write> y: array<QueryQuad>; // [tokens, heads, 2 * UNITS], strided

// `unit` counts those of all heads of the token. All is read before it is asked whether the item is one, so that no load waits for
// another but the angles for the position.
fn rotate_unit(token: u32, position: i32, unit: u32, params: RopeParams, is_item: bool) {
    let head = unit / UNITS;
    let first = first_quad(unit % UNITS);
    let second = second_quad(unit % UNITS);
    let x_row = params.x_base_quads + token * params.x_token_stride_quads + head * params.x_head_stride_quads;
    let y_row = params.y_base_quads + token * params.y_token_stride_quads + head * params.y_head_stride_quads;
    let quads = TwoQuads(query_bits(x_quad(x_row + first)), query_bits(x_quad(x_row + second)));
    let turned = rotated(quads, angles_of(position, unit % UNITS, params.max_position));
    if is_item {
        y[y_row + first] = query_quad(turned.first);
        y[y_row + second] = query_quad(turned.second);
    }
}
