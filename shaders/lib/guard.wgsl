// Counts what rounding loses, for kernels with a guard: their lines that end in `// guarded`, which other kernels do not have.
//
// An invocation counts what it rounds, and adds to the row of the op at its end: counts that are not 0, and a magnitude that is above the
// one that is there. Where nothing is lost that is one load. All is integer arithmetic on bits, whose order for x >= 0 is that of the
// numbers, so subnormals count, and no device may assume that there is no NaN.
//
// Concatenated with: lib/round, and a binding of `guard`: array<atomic<u32>>, [rows, 4] of saturated, NaN, flushed, bits of amax.

var<private> lost: vec4<u32>; // as a row

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

// To be called once, behind all that an invocation rounds.
fn add_lost(row: u32) {
    let at = 4u * row;
    for (var i = 0u; i < 3u; i++) {
        if lost[i] > 0u {
            atomicAdd(&guard[at + i], lost[i]);
        }
    }
    if lost.w > 0u {
        if lost.w > atomicLoad(&guard[at + 3u]) {
            atomicMax(&guard[at + 3u], lost.w);
        }
    }
}
