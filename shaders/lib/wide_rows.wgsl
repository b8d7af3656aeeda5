// Computes an item in f32: for keys beyond f16's range and inputs that are not finite. Slow. A subgroup takes a row, a lane LANE_OCTS
// octs of its columns.
fn wide_rows(item: Item, subgroup: u32, lane: u32) {
    for (var row = subgroup; row < item.num_rows; row += THREADS / SUBGROUP) {
        let query = query_of(item.first_row, row);
        let end = min(item.kv_end, query.visible);
        var row_max = EMPTY;
        var row_sum = 0.0;
        var is_nan = false;
        var acc: array<mat2x4<f32>, LANE_OCTS>;
        for (var token = item.kv_begin; token < end; token++) {
            let entry = entry_of_token(item.page_begin, token);
            if (!is_token(entry)) {
                continue;
            }
            let at = row_of_entry(entry, token);
            var part = vec4<f32>(0.0);
            for (var oct = lane; oct < ROW_OCTS; oct += SUBGROUP) {
                let q = decode_query(query_oct(query, oct));
                let k = float_oct(at, oct);
                part += q[0] * k[0] + q[1] * k[1];
            }
            let score = subgroup_total((part.x + part.y) + (part.z + part.w)) * layer.logit_scale;
            let counts = is_number(vec4<f32>(score)).x;
            is_nan = is_nan || (!counts && has_weight(vec4<f32>(score)).x);
            let logit = select(EMPTY, score, counts);
            let top = max(row_max, logit);
            let factor = exp2_exact(row_max - top);
            let weight = select(0.0, exp2_exact(logit - top), counts);
            row_max = top;
            row_sum = row_sum * factor + weight;
            for (var i = 0u; i < LANE_OCTS; i++) { // unroll
                let value = float_oct(at, i * SUBGROUP + lane);
                let sum = acc[i] * factor + value * weight;
                // Told by its bits: 0 times an infinite value is NaN.
                acc[i] = mat2x4<f32>(with_nan(sum[0], is_odd(value[0])), with_nan(sum[1], is_odd(value[1])));
            }
        }
        let sum = select(row_sum, -1.0, is_nan);
        // A number that stands for an LSE is so large that adding the sum does not change it.
        let top = part_lse(row_max, sum, sum <= 0.0 && has_tokens(item.page_begin, item.kv_begin, end));
        let row_end = finish_row(query.head, top, sum, 1.0, sum > 0.0);
        var factor = row_end.factor;
        if (SINKS && item.partial == DIRECT) {
            factor *= share_of_keys(query.head, row_end.lse);
        }
        for (var i = 0u; i < LANE_OCTS; i++) { // unroll
            let value = acc[i] * factor;
            write_oct(item, row, i * SUBGROUP + lane, nan_if(value, item.partial == DIRECT && is_nan_row(top)));
        }
        if (lane == 0u) {
            write_lse(item, row, query, row_end.lse, top, -1.0, max(sum, 0.0));
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
