// Merges the partial results of one query row: out = sum 2^(lse_i - max) out_i / sum 2^(lse_i - max).
//
// A workgroup takes one token and head, a thread one oct of columns. An empty partial weighs exactly 0 and a single
// one that is not empty exactly 1, so how often a row was split around it changes no bit.

@compute @workgroup_size(LATENT_OCTS)
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
    let token = tables[merge_at];
    let begin = tables[MERGE_SLOTS_AT] + tables[merge_at + 1u];
    let end = tables[MERGE_SLOTS_AT] + tables[merge_at + 2u];

    var largest = EMPTY;
    for (var i = begin; i < end; i++) {
        largest = max(largest, partials[(tables[i] + head) * PARTIAL_QUADS + 2u * LATENT_OCTS].x);
    }
    var sum = 0.0;
    var low = vec4<f32>(0.0);
    var high = vec4<f32>(0.0);
    for (var i = begin; i < end; i++) {
        let at = (tables[i] + head) * PARTIAL_QUADS;
        let base_2 = partials[at + 2u * LATENT_OCTS].x;
        if (base_2 > EMPTY) {
            let weight = exp2_exact(base_2 - largest);
            sum += weight;
            low = fma(vec4<f32>(weight), partials[at + 2u * thread], low);
            high = fma(vec4<f32>(weight), partials[at + 2u * thread + 1u], high);
        }
    }
    // A single partial is passed on as it is: 1 / 1 need not be 1 on a device.
    let many = sum > 0.0 && sum != 1.0;
    let share = select(1.0, 1.0 / select(1.0, sum, many), many);
    store_out(token, head, thread, mat2x4<f32>(low, high) * share);
    if (thread == 0u) {
        let shift = select(0.0, log2(select(1.0, sum, many)), many);
        store_lse(token, head, largest + shift, sum > 0.0);
    }
}
