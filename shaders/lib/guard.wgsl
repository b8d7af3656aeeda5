// Counts what rounding loses, for kernels with a guard: their lines that end in `// guarded`, which other kernels do not have.
//
// An invocation counts what it rounds. At the end a workgroup sums what its invocations have, in workgroup memory, and adds that to the
// row of the op: counts that are not 0, and a magnitude that is above the one that is there. So a workgroup that loses nothing makes one
// load. All is integer arithmetic on bits, whose order for x >= 0 is that of the numbers, so subnormals count, and no device may assume
// that there is no NaN.
//
// Concatenated with: lib/round, and a binding of `guard`: array<atomic<u32>>, [rows, 4] of saturated, NaN, flushed, bits of amax.

var<private> lost: vec4<u32>; // as a row
var<workgroup> lost_in_group: array<atomic<u32>, 8>; // [2 rows, 4]

// A quad, 4 consecutive elements. What is up to `flushed` becomes 0, what is above `top` saturates.
fn note_lost(bits: vec4<u32>, flushed: u32, top: u32) {
    let magnitude = bits & vec4<u32>(0x7FFFFFFFu);
    let pair = max(magnitude.xy, magnitude.zw);
    let largest = max(pair.x, pair.y);
    // 0 wraps, and is above all others here.
    let before = magnitude - vec4<u32>(1u);
    let low = min(before.xy, before.zw);
    if largest <= top && min(low.x, low.y) >= flushed {
        lost.w = max(lost.w, largest);
        return;
    }
    let is_nan = magnitude > vec4<u32>(F32_INF);
    let finite = select(magnitude, vec4<u32>(0u), magnitude >= vec4<u32>(F32_INF));
    let finite_pair = max(finite.xy, finite.zw);
    lost += vec4<u32>(
        how_many((magnitude > vec4<u32>(top)) & !is_nan),
        how_many(is_nan),
        how_many(before < vec4<u32>(flushed)),
        0u,
    );
    lost.w = max(lost.w, max(finite_pair.x, finite_pair.y));
}

fn how_many(which: vec4<bool>) -> u32 {
    let ones = select(vec4<u32>(0u), vec4<u32>(1u), which);
    return ones.x + ones.y + ones.z + ones.w;
}

// To be called by all invocations, before the first counts.
fn begin_lost(lane: u32) {
    if lane < 8u {
        atomicStore(&lost_in_group[lane], 0u);
    }
    workgroupBarrier();
}

// To be called once by all invocations, behind all that they round. An invocation counted for `row`, or for the `next`: 0 or 1.
fn add_lost(lane: u32, row: u32, next: u32) {
    for (var i = 0u; i < 3u; i++) {
        if lost[i] > 0u {
            atomicAdd(&lost_in_group[4u * next + i], lost[i]);
        }
    }
    // Most are not above what others have stored, and a load is cheaper.
    if lost.w > atomicLoad(&lost_in_group[4u * next + 3u]) {
        atomicMax(&lost_in_group[4u * next + 3u], lost.w);
    }
    workgroupBarrier();
    if lane < 8u {
        add_word(4u * row + lane, lane % 4u, atomicLoad(&lost_in_group[lane]));
    }
}

// Does what add_lost does without barriers, for kernels without workgroup memory.
fn add_lost_alone(row: u32) {
    for (var i = 0u; i < 4u; i++) {
        add_word(4u * row + i, i, lost[i]);
    }
}

fn add_word(at: u32, counter: u32, count: u32) {
    if count == 0u {
        return;
    }
    if counter < 3u {
        atomicAdd(&guard[at], count);
    } else {
        if count > atomicLoad(&guard[at]) {
            atomicMax(&guard[at], count);
        }
    }
}
