// The end of a softmax row, in every kernel of attention: what its output is multiplied by, and its LSE.
struct RowEnd {
    factor: f32, // of the sum of weighted values
    lse: f32, // in base 2
}

// Ends a row of head `head`. `top` is its largest base-2 logit, and `sum` the sum of its weights 2^(logit - top), in units of `unit`. Where
// not `any`, the row has no weight: its factor is 1 and its LSE `top`.
fn finish_row(head: u32, top: f32, sum: f32, unit: f32, any: bool) -> RowEnd {
    let divisor = select(1.0, sum, any);
    return RowEnd(1.0 / divisor, top + log2(divisor * unit));
}
