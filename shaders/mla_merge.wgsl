// Merges the partial results of one query row: out = sum 2^(lse_i - max) out_i / sum 2^(lse_i - max).
//
// A workgroup takes one token and head. Its threads form MERGE_GROUPS groups of LATENT_OCTS threads; group g takes the
// partials g, g + MERGE_GROUPS, .. and a thread one oct of columns:
//   1. all threads find the largest LSE
//   2. each group adds up its weighted partials
//   3. group 0 adds up the groups and writes
// An empty partial weighs exactly 0 and a single one that is not empty exactly 1, so how often a row was split around it
// changes no bit.

var<workgroup> thread_max: array<f32, MERGE_THREADS>;
var<workgroup> group_sum: array<f32, MERGE_GROUPS>;
var<workgroup> group_value: array<mat2x4<f32>, MERGE_THREADS>; // [MERGE_GROUPS, LATENT_OCTS]

// Base-2 LSE of the partial result that entry `i` of the merge slots names.
fn partial_lse(i: u32, head: u32) -> f32 {
    return partials[(tables[i] + head) * PARTIAL_QUADS + 2u * LATENT_OCTS].x;
}

@compute @workgroup_size(MERGE_THREADS)
fn mla_merge(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) num_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_id.y * num_groups.x + group_id.x;
    let merge = row / layer.num_heads;
    let head = row % layer.num_heads;
    if (merge >= tables[NUM_MERGES]) {
        return;
    }
    let merge_at = tables[MERGES_AT] + merge * 3u;
    let token = bound_token(tables[merge_at]);
    let begin = tables[MERGE_SLOTS_AT] + tables[merge_at + 1u];
    let end = tables[MERGE_SLOTS_AT] + tables[merge_at + 2u];
    let group = thread / LATENT_OCTS;
    let column_oct = thread % LATENT_OCTS;

    // 1. the largest LSE
    var largest = EMPTY;
    for (var i = begin + thread; i < end; i += MERGE_THREADS) {
        largest = max(largest, partial_lse(i, head));
    }
    thread_max[thread] = largest;
    workgroupBarrier();
    for (var i = 0u; i < min(end - begin, MERGE_THREADS); i++) {
        largest = max(largest, thread_max[i]);
    }

    // 2. this group's share
    var sum = 0.0;
    var low = vec4<f32>(0.0);
    var high = vec4<f32>(0.0);
    for (var i = begin + group; i < end; i += MERGE_GROUPS) {
        let base_2 = partial_lse(i, head);
        if (base_2 > EMPTY) {
            let at = (tables[i] + head) * PARTIAL_QUADS + 2u * column_oct;
            let weight = exp2_exact(base_2 - largest);
            sum += weight;
            low = fma(vec4<f32>(weight), partials[at], low);
            high = fma(vec4<f32>(weight), partials[at + 1u], high);
        }
    }
    group_value[thread] = mat2x4<f32>(low, high);
    if (column_oct == 0u) {
        group_sum[group] = sum;
    }
    workgroupBarrier();

    // 3. the sum of the groups
    if (group == 0u) {
        for (var g = 1u; g < MERGE_GROUPS; g++) {
            sum += group_sum[g];
            low += group_value[g * LATENT_OCTS + column_oct][0];
            high += group_value[g * LATENT_OCTS + column_oct][1];
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
