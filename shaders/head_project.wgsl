// Batched GEMM, one matrix a head: variant `plain`, in f32 without tensor cores, for every device.
//
//   for token, head: y[token][head][:] = x[token][head][:] . W[head]
//
// Tile: TOKENS tokens x 64 columns of one head a workgroup, k in chunks of 16 staged in workgroup memory as f32; a thread accumulates
// ROWS tokens x 4 columns. An oct is 8 consecutive elements, a quad 4: k, n and all offsets and strides are multiples of 8.
//
// Concatenated with: decoders read_x and decode_w, lib/oct_*, lib/round, lib/out_*, lib/project, lib/weight_*.
// Constants: GROUP, TOKENS = 16 * ROWS, ROWS, K, N_OCTS, K_FIRST (1: W is [k, n], 0: [n, k]).

@group(1) @binding(3) var<storage, read_write> y: array<OutQuad>; // [tokens, H, n / 4], strided

const COLUMNS = 64u;
const CHUNK = 16u;
// What a thread stores lies apart: FXC, DX12's compiler of shader model 5, fails on stores to neighbours. Pitches spread banks.
const X_PITCH = TOKENS + 2u;
const W_PITCH = 68u;
const COLUMN_PITCH = 17u;

var<workgroup> x_tile: array<f32, CHUNK * X_PITCH>; // [CHUNK, TOKENS]
var<workgroup> w_tile: array<f32, CHUNK * W_PITCH>; // [CHUNK, 4, COLUMNS / 4]: column 4 q + c at [c, q]

// Stages one oct of x as f32; zeros past the end of k.
fn stage_x(item: u32, head: u32, first: u32, last: u32, chunk: u32) {
    let row = item / 2u;
    let column = chunk + item % 2u * 8u;
    var value = mat2x4<f32>();
    if column < K {
        let token = min(first + row, last);
        value = read_x(x[params.x_base + token * params.x_token_stride + head * params.x_head_stride + column / 8u]);
    }
    let at = item % 2u * 8u * X_PITCH + row;
    for (var i = 0u; i < 4u; i++) { // unroll
        x_tile[at + i * X_PITCH] = value[0][i];
        x_tile[at + (4u + i) * X_PITCH] = value[1][i];
    }
}

// Stages one oct of the head's matrix as f32, [k, n] in either order of W; zeros past its end.
fn stage_w(item: u32, head: u32, first: u32, chunk: u32) {
    let base = params.w_base + head * params.w_head_stride;
    var value = mat2x4<f32>();
    if K_FIRST == 1u {
        let k = chunk + item / 8u;
        let oct = first / 8u + item % 8u;
        if k < K && oct < N_OCTS {
            value = read_w(base + k * params.w_row_stride, oct);
        }
        let at = item / 8u * W_PITCH + item % 8u * 2u;
        for (var i = 0u; i < 4u; i++) { // unroll
            w_tile[at + i * COLUMN_PITCH] = value[0][i];
            w_tile[at + 1u + i * COLUMN_PITCH] = value[1][i];
        }
    } else {
        let n = first + item / 2u;
        let k = chunk + item % 2u * 8u;
        if k < K && n < N_OCTS * 8u {
            value = read_w(base + n * params.w_row_stride, k / 8u);
        }
        let column = item / 2u;
        let at = item % 2u * 8u * W_PITCH + column % 4u * COLUMN_PITCH + column / 4u;
        for (var i = 0u; i < 4u; i++) { // unroll
            w_tile[at + i * W_PITCH] = value[0][i];
            w_tile[at + (4u + i) * W_PITCH] = value[1][i];
        }
    }
}

@compute @workgroup_size(GROUP)
fn head_project(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tokens = step_tokens();
    let end = tokens.y;
    let first = tokens.x + group.z * TOKENS;
    if first >= end {
        return;
    }
    begin_lost(lane); // guarded
    let head = group.y;
    let first_column = group.x * COLUMNS;
    let quad = lane % 16u;
    let row = lane / 16u * ROWS;
    var sums: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < ROWS; r++) { // unroll
        sums[r] = vec4<f32>(0.0);
    }
    for (var chunk = 0u; chunk < K; chunk += CHUNK) {
        for (var item = lane; item < TOKENS * 2u; item += GROUP) {
            stage_x(item, head, first, end - 1u, chunk);
        }
        // Weights are dealt from the last thread down: with few tokens the first threads stage x, the last ones W.
        let w_item = GROUP - 1u - lane;
        if w_item < CHUNK * COLUMNS / 8u {
            stage_w(w_item, head, first_column, chunk);
        }
        workgroupBarrier();
        for (var k = select(0u, CHUNK, first + row >= end); k < CHUNK; k++) { // skipped by a thread without tokens
            let at = k * W_PITCH + quad;
            let w = vec4<f32>(w_tile[at], w_tile[at + COLUMN_PITCH], w_tile[at + 2u * COLUMN_PITCH], w_tile[at + 3u * COLUMN_PITCH]);
            for (var r = 0u; r < ROWS; r++) { // unroll
                sums[r] += x_tile[k * X_PITCH + row + r] * w;
            }
        }
        workgroupBarrier();
    }
    let factor = head_factor(head);
    let column = first_column / 4u + quad;
    if column < N_OCTS * 2u {
        for (var r = 0u; r < ROWS; r++) { // unroll
            if first + row + r < end {
                let at = 2u * (params.y_base + (first + row + r) * params.y_token_stride + head * params.y_head_stride);
                y[at + column] = out_quad(bitcast<vec4<u32>>(scaled(sums[r] * factor)), params.out_scale);
                note_lost(product_bits(sums[r] * factor), params.guard_flushed, params.guard_top); // guarded
            }
        }
    }
    add_lost(lane, params.guard_row, 0u); // guarded
}
