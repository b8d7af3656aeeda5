// Totals of a long tile of mla_prefill.wgsl, where all is f32: a quad of a row's sums lies where its output will be. Only the thread that
// stored it loads it.
fn store_total(tile: Tile, row: u32, column_quad: u32, total: vec4<f32>) {
    out[total_at(tile, row) + column_quad] = bitcast<vec4<u32>>(total);
}

fn load_total(tile: Tile, row: u32, column_quad: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(out[total_at(tile, row) + column_quad]);
}

// First quad of a row's output.
fn total_at(tile: Tile, row: u32) -> u32 {
    return params.out_at + output_row(tile, row) * params.out_token_stride + tile.head * params.out_head_stride;
}
