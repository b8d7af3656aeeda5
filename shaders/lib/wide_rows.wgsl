// The rows of an item some of whose keys f16 cannot hold, in f32: right for every bf16 and e4m3, and slow. A subgroup takes a row, a
// lane LANE_OCTS octs of its columns.
fn wide_rows(first_row: u32, num_rows: u32, page_begin: u32, kv_begin: u32, kv_end: u32, partial: u32, subgroup: u32, lane: u32) {
    for (var row = subgroup; row < num_rows; row += THREADS / SUBGROUP) {
        let query = query_of(first_row, row);
        let end = min(kv_end, query.visible);
        var row_max = EMPTY;
        var row_sum = 0.0;
        var acc: array<mat2x4<f32>, LANE_OCTS>;
        for (var token = kv_begin; token < end; token++) {
            let at = cache_row(page_begin, token);
            var part = vec4<f32>(0.0);
            for (var oct = lane; oct < ROW_OCTS; oct += SUBGROUP) {
                let q = decode_query(query_oct(query, oct));
                let k = float_key(kv[at + oct]);
                part += q[0] * k[0] + q[1] * k[1];
            }
            let score = subgroup_total((part.x + part.y) + (part.z + part.w)) * layer.logit_scale;
            let top = max(row_max, score);
            let factor = exp2_exact(row_max - top);
            let weight = exp2_exact(score - top);
            row_max = top;
            row_sum = row_sum * factor + weight;
            for (var i = 0u; i < LANE_OCTS; i++) { // unroll
                acc[i] = acc[i] * factor + float_key(kv[at + i * SUBGROUP + lane]) * weight;
            }
        }
        let any = row_sum > 0.0;
        let divisor = select(1.0, row_sum, any);
        for (var i = 0u; i < LANE_OCTS; i++) { // unroll
            write_oct(first_row, row, partial, i * SUBGROUP + lane, acc[i] * (1.0 / divisor));
        }
        if (lane == 0u) {
            write_lse(query, row, partial, select(EMPTY, row_max + log2(divisor), any), any, 1.0);
        }
    }
}

fn subgroup_total(x: f32) -> f32 {
    var sum = x;
    for (var lanes = 1u; lanes < SUBGROUP; lanes *= 2u) {
        sum += subgroupShuffleXor(sum, lanes);
    }
    return sum;
}
