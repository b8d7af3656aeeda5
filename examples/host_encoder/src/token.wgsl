// The host's own work: a toy model that invents the new cache rows and the query of a step.

struct Step {
    number: u32,
    num_rows: u32,
}

@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read_write> rows: array<f32>; // [num_rows, 512 + 64]
@group(0) @binding(2) var<storage, read_write> query: array<f32>; // [4, 16, 512 + 64]

const ROW = 576u;
const QUERY = 4u * 16u * ROW;

// Numbers in -1..1 that look random (PCG).
fn noise(seed: u32) -> f32 {
    let state = seed * 747796405u + 2891336453u;
    let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return f32((word >> 22u) ^ word) / 2147483648.0 - 1.0;
}

@compute @workgroup_size(64)
fn token(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let stride = groups.x * 64u;
    for (var i = id.x; i < step.num_rows * ROW; i += stride) {
        let row = step.number * 7919u + i / ROW;
        let wave = cos(f32(i % ROW) * (0.01 + 0.002 * f32(row % 31u)));
        rows[i] = 0.7 * wave + 0.3 * noise(row * ROW + i % ROW);
    }
    for (var i = id.x; i < QUERY; i += stride) {
        let head = i / ROW;
        query[i] = 2.0 * cos(f32(i % ROW) * (0.01 + 0.004 * f32(head % 16u)) + 0.2 * f32(step.number));
    }
}
