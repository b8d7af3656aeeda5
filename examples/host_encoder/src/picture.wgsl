// Draws `out`: a line a head, the sequences one below the other; blue is negative and orange positive.

@group(0) @binding(0) var<storage, read> out: array<f32>; // [4, 16, 512]

const HEADS = 64u;
const LATENT = 512u;

struct Corner {
    @builtin(position) position: vec4<f32>,
    @location(0) uv: vec2<f32>,
}

// One triangle that covers the viewport.
@vertex
fn corner(@builtin(vertex_index) index: u32) -> Corner {
    let uv = vec2<f32>(f32(index & 1u), f32(index >> 1u)) * 2.0;
    return Corner(vec4<f32>(uv.x * 2.0 - 1.0, 1.0 - uv.y * 2.0, 0.0, 1.0), uv);
}

@fragment
fn pixel(@location(0) uv: vec2<f32>) -> @location(0) vec4<f32> {
    let at = vec2<u32>(saturate(uv) * vec2<f32>(f32(LATENT), f32(HEADS)));
    let value = clamp(out[min(at.y, HEADS - 1u) * LATENT + min(at.x, LATENT - 1u)] * 1.5, -1.0, 1.0);
    let colour = select(vec3<f32>(0.2, 0.5, 1.0), vec3<f32>(1.0, 0.6, 0.1), value > 0.0);
    return vec4<f32>(colour * abs(value), 1.0);
}
