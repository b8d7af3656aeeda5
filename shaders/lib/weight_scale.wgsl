// Sums of head_project over e4m3 codes: a scale for each head, or one for all. Concatenated with: lib/oct_e4m3 or lib/oct_e4m3_f16,
// lib/project.

@group(1) @binding(4) var<storage, read> head_scales: array<f32>; // [H], strided

fn head_factor(head: u32) -> f32 {
    return head_scales[params.head_scale_base + head * params.head_scale_stride] * SCALE_E4M3;
}
