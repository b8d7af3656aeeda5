// Batched GEMM, one matrix a head: variant `coop`, on cooperative matrices (tensor cores), f16 x f16 + f32.
//
//   for token, head: y[token][head][:] = x[token][head][:] . W[head]
//
// Tile: TOKENS tokens x COLUMNS columns of one head a workgroup, so W is read once for TOKENS tokens. All loads of x and W are issued
// first and stay in registers; then, for each chunk of CHUNK values of k:
//
//   stage     x and W become f16 in workgroup memory, scaled by powers of two so that f16 holds them: each row of x by its own largest
//             element, W by a fixed guess that suits a model's weights (GUESS); an f32 row of x is split into a high and a low f16 part
//   multiply  subgroups divide the tile by rows (ROW_TILES) and columns (COLUMN_TILES); K_SPLIT subgroups divide the chunk's k
//
// The epilogue stores accumulators to workgroup memory, adds the K_SPLIT partial sums, undoes the scales and writes y. If the largest
// weight is outside the guess's range, the workgroup repeats everything with the scale that this weight needs (ATTEMPTS = 2).
//
// Measured on an H200, with what was tried and was no faster: benches/results/h200-project-2026-11-22.md.
// An oct is 8 consecutive elements, a quad 4: all offsets and strides are multiples of 8. k is a multiple of CHUNK, n of COLUMNS.
//
// Concatenated with: lib/half_oct, decoders, lib/oct_*, lib/part_*, lib/store_*, lib/round, lib/project, lib/weight_*; see
// src/gpu/kernels/project.rs.
// Constants: TILE, TILE_OCTS, SUBGROUP, SUBGROUPS, THREADS, TOKENS, COLUMNS, COLUMN_OCTS, CHUNK, CHUNK_OCTS, CHUNKS, COLUMN_SPLIT,
// K_SPLIT, ROW_TILES, COLUMN_TILES, SHARE_TILES, ACC_TILES, X_PARTS, X_ROWS, X_PITCH, X_TILE, X_SCALED, X_LOADS, CHUNK_X_LOADS,
// ROW_LANES, W_PITCH, W_TILE, W_SCALED, W_LOADS, CHUNK_W_LOADS, K_FIRST, SUM_QUADS,
// SHARE_QUADS, SUMS, ATTEMPTS, GUESS.

@group(1) @binding(3) var<storage, read_write> y: array<OutOct>; // [tokens, H, n / 8], strided

var<workgroup> x_tile: array<HalfOct, X_TILE>; // [X_PARTS, TOKENS, X_PITCH]
var<workgroup> w_tile: array<HalfOct, W_TILE>; // [CHUNK or COLUMNS, W_PITCH]
var<workgroup> sums: array<vec4<f32>, SUMS>; // [K_SPLIT, TOKENS, SUM_QUADS]
var<workgroup> factors: array<f32, TOKENS>; // [TOKENS] inverse of each row's scale
var<workgroup> tops: array<u32, SUBGROUPS>; // [SUBGROUPS] bits of each subgroup's largest |weight|

// The guess: where a workgroup's largest |bf16 weight| is in [LEAST_GUESSED, MOST_GUESSED), a scale of 2^14 (GUESS is its f32 exponent)
// fits. f16 then holds every weight of at least 2^-31 exactly, and smaller ones within 2^-39, which is 2^-33 of the largest; 2^-22
// where the device flushes f16 subnormals.
const LEAST_GUESSED = 0x3C800000u; // 2^-6, as the bits of an f32
const MOST_GUESSED = 0x40800000u; // 4

// The power of two that brings a largest magnitude into [2^14, 2^15), as a biased f32 exponent; clamped so that its inverse is normal.
fn exponent_for(top: u32) -> u32 {
    return clamp(268u - (top >> 23u), 1u, 253u);
}

fn power_of_two(exponent: u32) -> f32 {
    return bitcast<f32>(exponent << 23u);
}

// Offset in the head's matrix, in octs, of load `i` of a thread; `staged_place` is its offset in w_tile.
fn weight_place(i: u32, thread: u32) -> u32 {
    let chunk = i / CHUNK_W_LOADS;
    let item = i % CHUNK_W_LOADS * THREADS + thread;
    if (K_FIRST == 1u) {
        return (chunk * CHUNK + item / COLUMN_OCTS) * params.w_row_stride + item % COLUMN_OCTS;
    }
    return item / CHUNK_OCTS * params.w_row_stride + chunk * CHUNK_OCTS + item % CHUNK_OCTS;
}

fn staged_place(i: u32, thread: u32) -> u32 {
    let item = i * THREADS + thread;
    if (K_FIRST == 1u) {
        return item / COLUMN_OCTS * W_PITCH + item % COLUMN_OCTS;
    }
    return item / CHUNK_OCTS * W_PITCH + item % CHUNK_OCTS;
}

@compute @workgroup_size(THREADS)
fn head_project(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let tokens = step_tokens();
    let end = tokens.y;
    let first = tokens.x + group.z * TOKENS;
    if (first >= end) {
        return;
    }
    let head = group.y;
    let thread = subgroup * SUBGROUP + lane;
    begin_lost(thread); // guarded
    let row = thread / ROW_LANES; // of x: ROW_LANES threads stage one row
    let column = thread % ROW_LANES;
    let k_share = subgroup % K_SPLIT;
    let first_column = subgroup / K_SPLIT % COLUMN_SPLIT * COLUMN_TILES; // in tiles, as first_row
    let first_row = subgroup / (K_SPLIT * COLUMN_SPLIT) * ROW_TILES;

    var w_at = params.w_base + head * params.w_head_stride;
    if (K_FIRST == 1u) {
        w_at += group.x * COLUMN_OCTS;
    } else {
        w_at += group.x * COLUMNS * params.w_row_stride;
    }
    var w_exponent = GUESS;
    for (var attempt = 0u; attempt < ATTEMPTS; attempt++) {
        var ws: array<WOct, W_LOADS>;
        for (var i = 0u; i < W_LOADS; i++) { // unroll on cards
            ws[i] = weight[w_at + weight_place(i, thread)];
        }
        // Rows past the last token are zeros and are not read: clamping would have all workgroups of a head load the same row at once.
        var xs: array<XOct, X_LOADS>;
        if (first + row < end) {
            let x_at = params.x_base + (first + row) * params.x_token_stride + head * params.x_head_stride + column;
            for (var i = 0u; i < X_LOADS; i++) { // unroll on cards
                xs[i] = x[x_at + i * ROW_LANES];
            }
        }

        var x_exponent = 127u;
        if (X_SCALED == 1u) {
            var top = 0u;
            for (var i = 0u; i < X_LOADS; i++) { // unroll on cards
                top = max(top, top_x(xs[i]));
            }
            for (var lanes = 1u; lanes < ROW_LANES; lanes *= 2u) {
                top = max(top, subgroupShuffleXor(top, lanes));
            }
            x_exponent = exponent_for(top);
        }
        if (column == 0u) {
            factors[row] = power_of_two(254u - x_exponent);
        }
        var acc = array<MatrixC, ACC_TILES>(); // [ROW_TILES, COLUMN_TILES]
        var top = 0u;
        for (var chunk = 0u; chunk < CHUNKS; chunk++) { // unroll on cards
            if (chunk > 0u) {
                workgroupBarrier();
            }
            for (var i = 0u; i < CHUNK_X_LOADS; i++) { // unroll on cards
                for (var part = 0u; part < X_PARTS; part++) { // unroll
                    let at = (part * TOKENS + row) * X_PITCH + i * ROW_LANES + column;
                    x_tile[at] = half_x(xs[chunk * CHUNK_X_LOADS + i], part, power_of_two(x_exponent));
                }
            }
            for (var i = 0u; i < CHUNK_W_LOADS; i++) { // unroll on cards
                if (W_SCALED == 1u) {
                    top = max(top, top_w(ws[chunk * CHUNK_W_LOADS + i]));
                }
                w_tile[staged_place(i, thread)] = half_w(ws[chunk * CHUNK_W_LOADS + i], 0u, power_of_two(w_exponent));
            }
            if (W_SCALED == 1u && chunk + 1u == CHUNKS) {
                top = subgroupMax(top);
                if (lane == 0u) {
                    tops[subgroup] = top;
                }
            }
            workgroupBarrier();
            for (var t = 0u; t < SHARE_TILES; t++) {
                let k = k_share * SHARE_TILES + t;
                var rows: array<MatrixA, X_ROWS>; // [X_PARTS, ROW_TILES]
                for (var r = 0u; r < X_ROWS; r++) { // unroll
                    let x_row = r / ROW_TILES * TOKENS + (first_row + r % ROW_TILES) * TILE;
                    rows[r] = coopLoadT<MatrixA>(&x_tile[x_row * X_PITCH + k * TILE_OCTS].low, X_PITCH * 2u);
                }
                for (var c = 0u; c < COLUMN_TILES; c++) { // unroll
                    var columns: MatrixB;
                    if (K_FIRST == 1u) {
                        columns = coopLoadT<MatrixB>(&w_tile[k * TILE * W_PITCH + (first_column + c) * TILE_OCTS].low, W_PITCH * 2u);
                    } else {
                        columns = coopLoad<MatrixB>(&w_tile[(first_column + c) * TILE * W_PITCH + k * TILE_OCTS].low, W_PITCH * 2u);
                    }
                    for (var r = 0u; r < X_ROWS; r++) { // unroll
                        acc[r % ROW_TILES * COLUMN_TILES + c] = coopMultiplyAdd(rows[r], columns, acc[r % ROW_TILES * COLUMN_TILES + c]);
                    }
                }
            }
        }
        // `tops` is visible: each subgroup wrote its entry before the last chunk's barrier.
        if (W_SCALED == 1u && attempt == 0u) {
            for (var i = 0u; i < SUBGROUPS; i++) { // unroll
                top = max(top, tops[i]);
            }
            if (top > 0u && (top < LEAST_GUESSED || top >= MOST_GUESSED)) {
                w_exponent = exponent_for(top);
                workgroupBarrier();
                continue;
            }
        }
        let w_factor = power_of_two(254u - w_exponent) * head_factor(head);
        for (var i = 0u; i < ACC_TILES; i++) { // unroll
            let at = k_share * SHARE_QUADS + (first_row + i / COLUMN_TILES) * TILE * SUM_QUADS + (first_column + i % COLUMN_TILES) * (TILE / 4u);
            coopStoreT(acc[i], &sums[at], SUM_QUADS);
        }
        workgroupBarrier();
        for (var item = thread; item < TOKENS * COLUMN_OCTS; item += THREADS) {
            let out_row = item / COLUMN_OCTS;
            let oct = item % COLUMN_OCTS;
            let at = out_row * SUM_QUADS + oct * 2u;
            var value = mat2x4<f32>(sums[at], sums[at + 1u]);
            for (var share = 1u; share < K_SPLIT; share++) {
                value += mat2x4<f32>(sums[share * SHARE_QUADS + at], sums[share * SHARE_QUADS + at + 1u]);
            }
            // Two multiplications: the product of the factors alone may overflow f32 where the scaled sum does not.
            value = value * w_factor * factors[out_row];
            if (first + out_row < end) {
                note_lost(product_bits(value[0]), params.guard_flushed, params.guard_top); // guarded
                note_lost(product_bits(value[1]), params.guard_flushed, params.guard_top); // guarded
                let to = params.y_base + (first + out_row) * params.y_token_stride + head * params.y_head_stride;
                y[to + group.x * COLUMN_OCTS + oct] = encode_out(mat2x4<f32>(scaled(value[0]), scaled(value[1])));
            }
        }
        break;
    }
    add_lost(thread, params.guard_row, 0u); // guarded
}
