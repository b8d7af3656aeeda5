// Like top_k.wgsl, where several workgroups share a row: each has a slice of it, and what one digit's workgroups counted is read by those
// of the next, so that a step is four dispatches: three that count a digit, and one that writes what is chosen.
//
//   STAGE 0: counts the first digit
//   STAGE 1: finds it, counts the second
//   STAGE 2: finds it, counts the third, of the row and of each slice
//   STAGE 3: finds it, and so the threshold; sums what the slices before have above it and at it; writes what is chosen
//
// Counts of a row are added up by atomics, whose order does not matter. Each is 0 again when nobody reads it any more: the first two after
// a step, the third before it is counted.
//
// Concatenated with: lib/top_k. Constants: GROUP, STAGE, TARGET_GROUPS.

// For each row [2048 first digit, 2048 second digit, 1024 third digit, 8 found digits], then [slices] of
// [1 above the first two digits, 1024 at a third digit or above it, 3 unused]
@group(1) @binding(5) var<storage, read_write> work: array<atomic<u32>>; // [rows, ROW_WORK + slices * SLICE_WORK]

const SECOND = 2048u;
const THIRD = 4096u;
const FOUND = 5120u;
const ROW_WORK = 5128u;
const SLICE_WORK = 1028u;

var<workgroup> before_slice: array<atomic<u32>, 2>; // [2] logits above the threshold in the slices before this one, and ties

// Copies the row's counts of a digit of `bins` values to `counts`.
fn load_counts(lane: u32, at: u32, bins: u32) {
    for (var bin = lane; bin < bins; bin += GROUP) {
        atomicStore(&counts[bin], atomicLoad(&work[at + bin]));
    }
}

// Adds this slice's counts to the row's.
fn add_counts(lane: u32, to: u32, bins: u32) {
    for (var bin = lane; bin < bins; bin += GROUP) {
        let count = atomicLoad(&counts[bin]);
        if count > 0u {
            atomicAdd(&work[to + bin], count);
        }
    }
}

fn clear_counts(lane: u32, at: u32, bins: u32) {
    for (var bin = lane; bin < bins; bin += GROUP) {
        atomicStore(&work[at + bin], 0u);
    }
}

@compute @workgroup_size(GROUP)
fn top_k(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let rows = min(table[0], params.max_rows);
    let slices = min(TARGET_GROUPS / max(rows, 1u), params.most_slices);
    // More rows than the workspace is for are chosen by the other kernel.
    if slices < 2u {
        return;
    }
    let index = group.y * groups.x + group.x;
    let row = index / slices;
    let slice = index % slices;
    if row >= rows || table[1] + row >= params.out_rows {
        return;
    }
    let length = length_of(row);
    if length <= params.k {
        if STAGE == 3u {
            write_all(slice * GROUP + lane, slices * GROUP, row, length);
        }
        return;
    }
    let slice_length = (length + slices - 1u) / slices;
    let begin = min(slice * slice_length, length);
    let end = min(begin + slice_length, length);
    let at = row * (ROW_WORK + slices * SLICE_WORK);
    let of_slice = at + ROW_WORK + slice * SLICE_WORK;

    if STAGE == 0u {
        if slice == 0u {
            clear_counts(lane, at + THIRD, 1024u);
        }
        count_digit(lane, row, begin, end, 0u, 0u, 21u);
        add_counts(lane, at, 2048u);
    } else if STAGE == 1u {
        load_counts(lane, at, 2048u);
        workgroupBarrier();
        find_digit(lane, 8u, params.k);
        let known = found.x << 21u;
        if slice == 0u && lane == 0u {
            atomicStore(&work[at + FOUND], known);
            atomicStore(&work[at + FOUND + 1u], found.y);
        }
        count_digit(lane, row, begin, end, known, 0xFFE00000u, 10u);
        add_counts(lane, at + SECOND, 2048u);
    } else if STAGE == 2u {
        if slice == 0u {
            clear_counts(lane, at, 2048u);
        }
        load_counts(lane, at + SECOND, 2048u);
        workgroupBarrier();
        find_digit(lane, 8u, atomicLoad(&work[at + FOUND + 1u]));
        let known = atomicLoad(&work[at + FOUND]) | (found.x << 10u);
        if slice == 0u && lane == 0u {
            atomicStore(&work[at + FOUND + 2u], known);
            atomicStore(&work[at + FOUND + 3u], found.y);
        }
        let own_above = count_digit(lane, row, begin, end, known, 0xFFFFFC00u, 0u);
        add_counts(lane, at + THIRD, 1024u);
        sum_before(lane, own_above);
        if lane == 0u {
            atomicStore(&work[of_slice], sums[GROUP - 1u]);
        }
        // From the highest value of the digit down.
        let top = (GROUP - lane) * 4u - 1u;
        var own = 0u;
        for (var i = 0u; i < 4u; i++) {
            own += atomicLoad(&counts[top - i]);
        }
        var sum = sum_before(lane, own);
        for (var i = 0u; i < 4u; i++) {
            sum += atomicLoad(&counts[top - i]);
            atomicStore(&work[of_slice + 1u + top - i], sum);
        }
    } else {
        if slice == 0u {
            clear_counts(lane, at + SECOND, 2048u);
        }
        load_counts(lane, at + THIRD, 1024u);
        if lane < 2u {
            atomicStore(&before_slice[lane], 0u);
        }
        workgroupBarrier();
        find_digit(lane, 4u, atomicLoad(&work[at + FOUND + 3u]));
        let digit = found.x;
        let threshold = atomicLoad(&work[at + FOUND + 2u]) | digit;
        if lane < slice {
            let other = at + ROW_WORK + lane * SLICE_WORK;
            let from_digit = atomicLoad(&work[other + 1u + digit]);
            var above_digit = 0u;
            if digit < 1023u {
                above_digit = atomicLoad(&work[other + 2u + digit]);
            }
            atomicAdd(&before_slice[0], atomicLoad(&work[other]) + above_digit);
            atomicAdd(&before_slice[1], from_digit - above_digit);
        }
        workgroupBarrier();
        write_chosen(lane, row, begin, end, threshold, found.y, atomicLoad(&before_slice[0]), atomicLoad(&before_slice[1]));
    }
}
