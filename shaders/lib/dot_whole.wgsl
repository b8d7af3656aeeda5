// The dot product of a score by whole octs (8 consecutive elements), and its order of additions.
alias Part = mat2x4<f32>;

fn part_of(oct: mat2x4<f32>, part: u32) -> Part {
    return oct;
}

fn dot_onto(q: Part, k: Part, sum: f32) -> f32 {
    let first = fma(q[0].w, k[0].w, fma(q[0].z, k[0].z, fma(q[0].y, k[0].y, fma(q[0].x, k[0].x, sum))));
    return fma(q[1].w, k[1].w, fma(q[1].z, k[1].z, fma(q[1].y, k[1].y, fma(q[1].x, k[1].x, first))));
}
