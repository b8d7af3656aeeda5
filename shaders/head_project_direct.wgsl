// Batched GEMM, one matrix a head: variant `direct`, without workgroup memory, for software devices. On lavapipe re-reading W beats a
// barrier, which is a switch between coroutines there.
//
//   for token, head: y[token][head][:] = x[token][head][:] . W[head]
//
// Tile: ROWS tokens x 8 columns a thread where W is [k, n], x 4 columns where it is [n, k], over all of k. An oct is 8 consecutive
// elements, a quad 4: k, n and all offsets and strides are multiples of 8.
// Measured on lavapipe: for one token and 8 heads a tenth of the staged kernel's time (benches/results/h200-generate-2026-11-22.md).
//
// Concatenated with: decoders read_x and decode_w, lib/oct_*, lib/round, lib/out_*, lib/project, lib/weight_*.
// Constants: GROUP, ROWS, K_OCTS, PARTS (threads for a head's columns), K_FIRST (1: W is [k, n], 0: [n, k]).

@group(1) @binding(3) var<storage, read_write> y: array<OutQuad>; // [tokens, H, n / 4], strided

@compute @workgroup_size(GROUP)
fn head_project(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tokens = step_tokens();
    let end = tokens.y;
    let first = tokens.x + group.z * ROWS;
    let part = group.x * GROUP + lane;
    if first >= end || part >= PARTS {
        return;
    }
    let w_head = params.w_base + group.y * params.w_head_stride;
    let x_head = params.x_base + group.y * params.x_head_stride;
    var low: array<vec4<f32>, ROWS>;
    var high: array<vec4<f32>, ROWS>; // columns 4 to 7, where W is [k, n]
    for (var r = 0u; r < ROWS; r++) { // unroll
        low[r] = vec4<f32>(0.0);
        high[r] = vec4<f32>(0.0);
    }
    for (var k = 0u; k < K_OCTS; k++) {
        if K_FIRST == 1u {
            for (var half = 0u; half < 2u; half++) { // unroll
                let w_row = w_head + (k * 8u + half * 4u) * params.w_row_stride;
                let w_0 = read_w(w_row, part);
                let w_1 = read_w(w_row + params.w_row_stride, part);
                let w_2 = read_w(w_row + 2u * params.w_row_stride, part);
                let w_3 = read_w(w_row + 3u * params.w_row_stride, part);
                for (var r = 0u; r < ROWS; r++) { // unroll
                    // Rows past the last token repeat it; their sums are not stored.
                    let v = read_x(x[x_head + min(first + r, end - 1u) * params.x_token_stride + k])[half];
                    low[r] += mat4x4<f32>(w_0[0], w_1[0], w_2[0], w_3[0]) * v;
                    high[r] += mat4x4<f32>(w_0[1], w_1[1], w_2[1], w_3[1]) * v;
                }
            }
        } else {
            let w_row = w_head + part * 4u * params.w_row_stride;
            let w_0 = read_w(w_row, k);
            let w_1 = read_w(w_row + params.w_row_stride, k);
            let w_2 = read_w(w_row + 2u * params.w_row_stride, k);
            let w_3 = read_w(w_row + 3u * params.w_row_stride, k);
            for (var r = 0u; r < ROWS; r++) { // unroll
                let v = read_x(x[x_head + min(first + r, end - 1u) * params.x_token_stride + k]);
                low[r] += v[0] * mat4x4<f32>(w_0[0], w_1[0], w_2[0], w_3[0]);
                low[r] += v[1] * mat4x4<f32>(w_0[1], w_1[1], w_2[1], w_3[1]);
            }
        }
    }
    let factor = head_factor(group.y);
    for (var r = 0u; r < ROWS; r++) { // unroll
        if first + r < end {
            let at = 2u * (params.y_base + (first + r) * params.y_token_stride + group.y * params.y_head_stride);
            note_lost(product_bits(low[r] * factor), params.guard_flushed, params.guard_top); // guarded
            if K_FIRST == 1u {
                note_lost(product_bits(high[r] * factor), params.guard_flushed, params.guard_top); // guarded
                y[at + 2u * part] = out_quad(bitcast<vec4<u32>>(scaled(low[r] * factor)), params.out_scale);
                y[at + 2u * part + 1u] = out_quad(bitcast<vec4<u32>>(scaled(high[r] * factor)), params.out_scale);
            } else {
                y[at + part] = out_quad(bitcast<vec4<u32>>(scaled(low[r] * factor)), params.out_scale);
            }
        }
    }
    add_lost_alone(params.guard_row); // guarded
}
