// Totals of a long work item of mla_decode.wgsl, where all is f32: an oct of a row's sums lies where its output or its partial result will
// be. Only the thread that stored it loads it.
fn store_total(first_row: u32, row: u32, partial: u32, column_oct: u32, total: mat2x4<f32>) {
    if (partial == DIRECT) {
        out[total_at(first_row, row) + column_oct] = total;
    } else {
        let at = (partial + row) * PARTIAL_QUADS + 2u * column_oct;
        partials[at] = total[0];
        partials[at + 1u] = total[1];
    }
}

fn load_total(first_row: u32, row: u32, partial: u32, column_oct: u32) -> mat2x4<f32> {
    if (partial == DIRECT) {
        return out[total_at(first_row, row) + column_oct];
    }
    let at = (partial + row) * PARTIAL_QUADS + 2u * column_oct;
    return mat2x4<f32>(partials[at], partials[at + 1u]);
}

// First oct of a row's output.
fn total_at(first_row: u32, row: u32) -> u32 {
    let query = query_of(first_row, row);
    return layer.out_at + query.token * layer.out_token_stride + query.head * layer.out_head_stride;
}
