// The dot product of a score by halves of an oct (8 consecutive elements): where four whole octs of keys in f32 exceed a thread's
// registers. The same sums in the same order as lib/dot_whole.wgsl.
alias Part = vec4<f32>;

fn part_of(oct: mat2x4<f32>, part: u32) -> Part {
    return select(oct[1], oct[0], part == 0u);
}

fn dot_onto(q: Part, k: Part, sum: f32) -> f32 {
    return fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sum))));
}
