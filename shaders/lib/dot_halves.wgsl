// What a score takes at a time: half an oct, where four keys in f32 are more than a thread's registers hold. The sums are
// those of lib/dot_whole.wgsl, in the same order.
alias Part = vec4<f32>;

fn part_of(oct: mat2x4<f32>, part: u32) -> Part {
    return select(oct[1], oct[0], part == 0u);
}

fn dot_onto(q: Part, k: Part, sum: f32) -> f32 {
    return fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sum))));
}
