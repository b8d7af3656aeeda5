// The maximum and the sum over the SOFTMAX_LANES lanes that share a row in the softmax: mla_decode_coop.wgsl and mla_prefill_coop.wgsl.
fn row_largest(x: f32) -> f32 {
    var largest = x;
    for (var lanes = 1u; lanes < SOFTMAX_LANES; lanes *= 2u) {
        largest = max(largest, subgroupShuffleXor(largest, lanes));
    }
    return largest;
}

fn row_total(x: f32) -> f32 {
    var sum = x;
    for (var lanes = 1u; lanes < SOFTMAX_LANES; lanes *= 2u) {
        sum += subgroupShuffleXor(sum, lanes);
    }
    return sum;
}
