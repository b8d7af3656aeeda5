// Weights of head_project that lie one by one. `row` counts octs (8 consecutive elements). Concatenated with: decode_w, lib/oct_*,
// lib/project.

// Oct `oct` of the row of a matrix that begins at `row`.
fn read_w(row: u32, oct: u32) -> mat2x4<f32> {
    return decode_w(weight[row + oct]);
}
