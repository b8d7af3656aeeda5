// Merges the partial results of one query row: out = sum 2^(lse_i - max) out_i / sum 2^(lse_i - max).
//
// A workgroup takes MERGE_OCTS octs of one token and head. Its threads form MERGE_GROUPS groups; group g takes the partials
// g, g + MERGE_GROUPS, .. and a thread one oct of columns:
//   1. all threads find the largest LSE
//   2. MERGE_THREADS partials at a time: each thread weighs one, then each group adds up its weighted ones
//   3. group 0 adds up the groups and writes
// An empty partial weighs exactly 0 and a single one that is not empty exactly 1, so how often a row was split around it
// changes no bit.

var<workgroup> thread_max: array<f32, MERGE_THREADS>;
var<workgroup> weights: array<vec2<f32>, MERGE_THREADS>; // of the LSE, and what to multiply the partial with
var<workgroup> places: array<u32, MERGE_THREADS>; // where each partial begins, in quads
var<workgroup> group_sum: array<f32, MERGE_GROUPS>;
var<workgroup> group_value: array<mat2x4<f32>, MERGE_THREADS>; // [MERGE_GROUPS, MERGE_OCTS]

// Where the partial result begins that entry `i` of the merge slots names.
fn partial_at(i: u32, head: u32) -> u32 {
    return (tables[i] + head) * PARTIAL_QUADS;
}

// Its base-2 LSE, and what it is yet to be multiplied with.
fn partial_end(at: u32) -> vec2<f32> {
    return partials[at + 2u * LATENT_OCTS].xy;
}

@compute @workgroup_size(MERGE_THREADS)
fn mla_merge(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) num_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = group_id.y * num_groups.x + group_id.x;
    let row = index / MERGE_PARTS;
    let merge = row / layer.num_heads;
    let head = row % layer.num_heads;
    if (merge >= tables[NUM_MERGES]) {
        return;
    }
    let merge_at = tables[MERGES_AT] + merge * 3u;
    let token = bound_token(tables[merge_at]);
    let begin = tables[MERGE_SLOTS_AT] + tables[merge_at + 1u];
    let end = tables[MERGE_SLOTS_AT] + tables[merge_at + 2u];
    let group = thread / MERGE_OCTS;
    let column_oct = index % MERGE_PARTS * MERGE_OCTS + thread % MERGE_OCTS;

    // 1. the largest LSE
    var largest = EMPTY;
    var at = 0u; // this thread's first partial
    var lse_scale = vec2<f32>(EMPTY, 0.0);
    if (begin + thread < end) {
        at = partial_at(begin + thread, head);
        lse_scale = partial_end(at);
        largest = max(largest, lse_scale.x);
    }
    for (var i = begin + thread + MERGE_THREADS; i < end; i += MERGE_THREADS) {
        largest = max(largest, partial_end(partial_at(i, head)).x);
    }
    thread_max[thread] = largest;
    workgroupBarrier();
    for (var others = MERGE_THREADS / 2u; others > 0u; others /= 2u) {
        if (thread < others) {
            thread_max[thread] = max(thread_max[thread], thread_max[thread + others]);
        }
        workgroupBarrier();
    }
    largest = thread_max[0];

    // 2. this group's share
    var sum = 0.0;
    var low = vec4<f32>(0.0);
    var high = vec4<f32>(0.0);
    for (var first = begin; first < end; first += MERGE_THREADS) {
        let count = min(end - first, MERGE_THREADS);
        if (thread < count) {
            if (first != begin) {
                at = partial_at(first + thread, head);
                lse_scale = partial_end(at);
            }
            let weight = select(0.0, exp2_exact(lse_scale.x - largest), lse_scale.x > EMPTY);
            places[thread] = at;
            weights[thread] = vec2<f32>(weight, weight * lse_scale.y);
        }
        workgroupBarrier();
        // Four at a time, so that four loads are on their way.
        for (var i = group; i < count; i += 4u * MERGE_GROUPS) {
            for (var k = 0u; k < 4u; k++) { // unroll
                let partial = min(i + k * MERGE_GROUPS, count - 1u);
                let quad = places[partial] + 2u * column_oct;
                let weight = select(vec2<f32>(0.0), weights[partial], i + k * MERGE_GROUPS < count);
                let first_quad = partials[quad];
                let second_quad = partials[quad + 1u];
                if (weight.x > 0.0) {
                    sum += weight.x;
                    low = fma(vec4<f32>(weight.y), first_quad, low);
                    high = fma(vec4<f32>(weight.y), second_quad, high);
                }
            }
        }
        workgroupBarrier();
    }
    group_value[thread] = mat2x4<f32>(low, high);
    if (thread % MERGE_OCTS == 0u) {
        group_sum[group] = sum;
    }
    workgroupBarrier();

    // 3. the sum of the groups
    if (group == 0u) {
        for (var g = 1u; g < MERGE_GROUPS; g++) {
            sum += group_sum[g];
            low += group_value[g * MERGE_OCTS + thread][0];
            high += group_value[g * MERGE_OCTS + thread][1];
        }
        // A single partial is passed on as it is: 1 / 1 need not be 1 on a device.
        let many = sum > 0.0 && sum != 1.0;
        let divisor = select(1.0, sum, many);
        store_out(token, head, column_oct, mat2x4<f32>(low, high) * select(1.0, 1.0 / divisor, many));
        if (column_oct == 0u) {
            store_lse(token, head, largest + select(0.0, log2(divisor), many), sum > 0.0);
        }
    }
}
