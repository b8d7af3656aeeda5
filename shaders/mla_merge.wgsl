// Merges the partial results of one query row: weight_i = sum_i 2^(max_i - max), out = sum weight_i out_i / sum weight_i. Weights are in
// units of the largest sum.
//
// Partial result i belongs to group i % MERGE_GROUPS. A group adds its partial results in order, then the groups of each half are added
// in order, then the halves. The order is the same for both shapes of a workgroup, and so are the bits. A workgroup takes MERGE_OCTS
// octs of one token and head. Its threads form teams of MERGE_OCTS threads; a team takes TEAM_GROUPS groups, and a thread one oct of
// columns. For many rows a workgroup has two teams and takes a whole row; for few rows it has as many teams as there are groups.
//   1. all threads find the largest maximum and the largest sum, while the first partial results are being loaded
//   2. each team weighs its partial results, BATCH at a time, and adds them
//   3. team 0 adds the teams' sums and stores the row
// A partial result of a row that has NaN (NO_NUMBER) makes the row NaN. NaN in single columns stays NaN even with weight 0.
// An empty partial result has weight exactly 0, and one that is not empty by itself exactly 1: splits without visible keys change no
// bit.

// Arrays of f32, not of vectors: on some drivers, threads that write components of one vector overwrite each other's.
var<workgroup> maxima: array<f32, MERGE_THREADS>; // the largest maximum that each thread found
var<workgroup> sums: array<f32, MERGE_THREADS>; // and the largest sum
var<workgroup> sixteenths: array<f32, MERGE_SIXTEENTHS>; // the largest maximum of 16 threads each
var<workgroup> sixteenth_sums: array<f32, MERGE_SIXTEENTHS>;
var<workgroup> ends: array<vec2<f32>, MERGE_CHUNK>; // maximum and factor of each partial result
var<workgroup> end_sums: array<f32, MERGE_CHUNK>;
var<workgroup> team_sum: array<f32, MERGE_GROUPS>; // of MERGE_TEAMS
var<workgroup> team_value: array<mat2x4<f32>, MERGE_THREADS>; // [MERGE_TEAMS, MERGE_OCTS]

// The offset of the partial result at index `i` of the merged ones.
fn partial_at(i: u32, head: u32) -> u32 {
    return (tables[i] + head) * PARTIAL_QUADS;
}

// Its largest base-2 logit, or EMPTY and the like, its factor, which is negative where it may hold NaN, and its sum.
fn partial_end(at: u32) -> vec3<f32> {
    return partials[at + 2u * LATENT_OCTS].xyz;
}

// A maximum and a sum.
fn largest_of_16(first: u32) -> vec2<f32> {
    var largest = vec2<f32>(EMPTY, 0.0);
    for (var i = 0u; i < 16u; i++) { // unroll
        largest = max(largest, vec2<f32>(maxima[first + i], sums[first + i]));
    }
    return largest;
}

// What a thread loads at a time: one oct of BATCH partial results.
struct Batch {
    low: array<vec4<f32>, BATCH>,
    high: array<vec4<f32>, BATCH>,
}

// Their offsets: of partial results `first`, `first + step`, .. up to `last`, which replaces those past it.
fn batch_at(begin: u32, first: u32, step: u32, last: u32, head: u32) -> array<u32, BATCH> {
    var at: array<u32, BATCH>;
    for (var i = 0u; i < BATCH; i++) { // unroll
        at[i] = partial_at(begin + min(first + i * step, last), head);
    }
    return at;
}

fn load_batch(at: array<u32, BATCH>, column_oct: u32) -> Batch {
    var batch: Batch;
    for (var i = 0u; i < BATCH; i++) { // unroll
        batch.low[i] = partials[at[i] + 2u * column_oct];
        batch.high[i] = partials[at[i] + 2u * column_oct + 1u];
    }
    return batch;
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
    if (merge >= slice.num_merges) {
        return;
    }
    let merge_at = slice.merges_at + merge * 3u;
    let token = bound_token(tables[merge_at]);
    let begin = slice.merge_partials_at + tables[merge_at + 1u];
    let end = slice.merge_partials_at + tables[merge_at + 2u];
    let count = end - begin;
    let team = thread / MERGE_OCTS;
    let column_oct = index % MERGE_PARTS * MERGE_OCTS + thread % MERGE_OCTS;
    if (count == 0u) {
        if (team == 0u) {
            store_out(token, head, column_oct, mat2x4<f32>());
            if (column_oct == 0u) {
                store_lse(token, head, EMPTY);
            }
        }
        return;
    }

    // Where no group has more than one partial result, a batch is of neighbouring groups, else of one group. The first batch is loaded
    // together with the LSEs, since dependent loads would add their latencies.
    let last = count - 1u;
    let first_group = team * TEAM_GROUPS;
    let by_groups = TEAM_GROUPS > 1u && count <= MERGE_GROUPS;
    let step = select(MERGE_GROUPS, 1u, by_groups);
    let near_at = partial_at(begin + min(thread, last), head);
    let far_at = partial_at(begin + min(thread + MERGE_THREADS, last), head);
    let first_at = batch_at(begin, first_group, step, last, head);
    let near = partial_end(near_at);
    let far = partial_end(far_at);
    var batch = load_batch(first_at, column_oct);

    // 1. the largest maximum and the largest sum
    var tops = max(near.xz, far.xz);
    if (thread < count) {
        ends[thread] = near.xy;
        end_sums[thread] = near.z;
    }
    if (thread + MERGE_THREADS < count) {
        ends[thread + MERGE_THREADS] = far.xy;
        end_sums[thread + MERGE_THREADS] = far.z;
    }
    for (var i = thread + 2u * MERGE_THREADS; i < count; i += MERGE_THREADS) {
        let more = partial_end(partial_at(begin + i, head));
        tops = max(tops, more.xz);
        if (i < MERGE_CHUNK) {
            ends[i] = more.xy;
            end_sums[i] = more.z;
        }
    }
    maxima[thread] = tops.x;
    sums[thread] = tops.y;
    workgroupBarrier();
    if (count > 16u) {
        if (thread < MERGE_SIXTEENTHS) {
            let of_16 = largest_of_16(16u * thread);
            sixteenths[thread] = of_16.x;
            sixteenth_sums[thread] = of_16.y;
        }
        workgroupBarrier();
        for (var i = 0u; i < MERGE_SIXTEENTHS; i++) { // unroll
            tops = max(tops, vec2<f32>(sixteenths[i], sixteenth_sums[i]));
        }
    } else {
        tops = largest_of_16(0u);
    }
    let largest = tops.x;
    let unit = select(1.0, tops.y, tops.y > 0.0); // of the weights
    let per_unit = 1.0 / unit;

    // 2. this team's share, without groups that are empty in all teams
    var sum = 0.0;
    var low = vec4<f32>(0.0);
    var high = vec4<f32>(0.0);
    var group_sum = 0.0;
    var group_low = vec4<f32>(0.0);
    var group_high = vec4<f32>(0.0);
    // Sums of a group in three levels, as in mla_decode.wgsl: of 16 partial results, of 32 such sums, of all of these.
    var mid_sum = 0.0; // all f32
    var mid_low = vec4<f32>(0.0); // all f32
    var mid_high = vec4<f32>(0.0); // all f32
    var far_sum = 0.0; // all f32
    var far_low = vec4<f32>(0.0); // all f32
    var far_high = vec4<f32>(0.0); // all f32
    var group = 0u; // of this team: the first group of the current batch
    var from_partial = 0u; // the group's next partial result
    while (group < min(count, TEAM_GROUPS)) {
        if (count > MERGE_CHUNK && from_partial % MERGE_CHUNK == 0u) {
            workgroupBarrier();
            for (var i = thread; i < min(count - from_partial, MERGE_CHUNK); i += MERGE_THREADS) {
                let end = partial_end(partial_at(begin + from_partial + i, head));
                ends[i] = end.xy;
                end_sums[i] = end.z;
            }
            workgroupBarrier();
        }
        if (from_partial % (16u * MERGE_GROUPS) == 0u) { // all f32
            mid_sum += group_sum; // all f32
            mid_low += group_low; // all f32
            mid_high += group_high; // all f32
            group_sum = 0.0; // all f32
            group_low = vec4<f32>(0.0); // all f32
            group_high = vec4<f32>(0.0); // all f32
            if (from_partial % (512u * MERGE_GROUPS) == 0u) { // all f32
                far_sum += mid_sum; // all f32
                far_low += mid_low; // all f32
                far_high += mid_high; // all f32
                mid_sum = 0.0; // all f32
                mid_low = vec4<f32>(0.0); // all f32
                mid_high = vec4<f32>(0.0); // all f32
            } // all f32
        } // all f32
        let first = from_partial + first_group + group;
        if (by_groups) {
            group += BATCH;
        } else {
            from_partial += BATCH * MERGE_GROUPS;
        }
        let ends_group = by_groups || from_partial >= count;
        for (var i = 0u; i < BATCH; i++) { // unroll
            let partial = first + i * step;
            let end = ends[min(partial, last) % MERGE_CHUNK];
            let end_sum = end_sums[min(partial, last) % MERGE_CHUNK];
            let counts = partial < count && end.x > EMPTY;
            // Exactly 1 where the partial result is alone.
            let units = select(end_sum * per_unit, 1.0, end_sum == tops.y);
            let weight = select(0.0, units * exp2_exact(end.x - largest), counts);
            if (weight > 0.0 || (counts && end.y < 0.0)) {
                group_sum += weight;
                group_low = fma(vec4<f32>(weight * abs(end.y)), batch.low[i], group_low);
                group_high = fma(vec4<f32>(weight * abs(end.y)), batch.high[i], group_high);
            }
            if (by_groups || (ends_group && i + 1u == BATCH)) {
                group_sum = far_sum + (mid_sum + group_sum); // all f32
                group_low = far_low + (mid_low + group_low); // all f32
                group_high = far_high + (mid_high + group_high); // all f32
                far_sum = 0.0; // all f32
                far_low = vec4<f32>(0.0); // all f32
                far_high = vec4<f32>(0.0); // all f32
                mid_sum = 0.0; // all f32
                mid_low = vec4<f32>(0.0); // all f32
                mid_high = vec4<f32>(0.0); // all f32
                sum += group_sum;
                low += group_low;
                high += group_high;
                group_sum = 0.0;
                group_low = vec4<f32>(0.0);
                group_high = vec4<f32>(0.0);
            }
        }
        if (ends_group && !by_groups) {
            from_partial = 0u;
            group += 1u;
        }
        if (group < min(count, TEAM_GROUPS)) {
            batch = load_batch(batch_at(begin, from_partial + first_group + group, step, last, head), column_oct);
        }
    }
    team_value[thread] = mat2x4<f32>(low, high);
    if (thread % MERGE_OCTS == 0u) {
        team_sum[team] = sum;
    }
    workgroupBarrier();

    // 3. the sum of the teams
    if (team == 0u) {
        sum = 0.0;
        low = vec4<f32>(0.0);
        high = vec4<f32>(0.0);
        for (var half = 0u; half < 2u; half++) {
            var half_sum = 0.0;
            var half_low = vec4<f32>(0.0);
            var half_high = vec4<f32>(0.0);
            for (var t = 0u; t < HALF_TEAMS; t++) { // unroll
                half_sum += team_sum[half * HALF_TEAMS + t];
                half_low += team_value[(half * HALF_TEAMS + t) * MERGE_OCTS + thread][0];
                half_high += team_value[(half * HALF_TEAMS + t) * MERGE_OCTS + thread][1];
            }
            sum += half_sum;
            low += half_low;
            high += half_high;
        }
        // A single partial result is not divided: 1 / 1 need not be exactly 1 on a device.
        let many = sum > 0.0 && sum != 1.0;
        // EMPTY and the like are so large that adding log2 does not change them.
        let row_end = finish_row(head, largest, sum, unit, many);
        var value = mat2x4<f32>(low, high) * select(1.0, row_end.factor, many);
        if (SINKS) {
            value = value * share_of_keys(head, row_end.lse);
        }
        store_out(token, head, column_oct, nan_if(value, is_nan_row(largest)));
        if (column_oct == 0u) {
            store_lse(token, head, row_end.lse);
        }
    }
}
