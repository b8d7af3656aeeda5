//! Rounding, every 16-bit code and hard f32 patterns.

use super::*;

const ROUND_TEST: &str = "
@group(0) @binding(0) var<storage, read> x: array<u32>; // [n] f32 bits, or a 16-bit code
@group(0) @binding(1) var<storage, read_write> y: array<vec4<u32>>; // [n] f16 and bf16, e4m3, f32 of f16, f32 of bf16

// Any bits as a number from 2^-14 up to 65520.
fn in_range(bits: u32) -> u32 {
    let exponent = 113u + (bits >> 23u) % 30u;
    let below_65520 = select(0x7FFFFFu, 0x7FEFFFu, exponent == 142u);
    return (bits & 0x80000000u) | (exponent << 23u) | min(bits & 0x7FFFFFu, below_65520);
}

fn bf16_pairs(low: vec4<u32>, high: vec4<u32>) -> vec4<u32> {
    return vec4<u32>(bf16_bits(low.x), bf16_bits(low.y), bf16_bits(low.z), bf16_bits(low.w))
        | (vec4<u32>(bf16_bits(high.x), bf16_bits(high.y), bf16_bits(high.z), bf16_bits(high.w)) << vec4<u32>(16u));
}

@compute @workgroup_size(64)
fn round_test(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    for (var i = id.x; i < arrayLength(&x); i += groups.x * 64u) {
        let b = x[i];
        // eight at once must equal one by one; usual and rare values are mixed among neighbours
        let n = arrayLength(&x);
        let low = vec4<u32>(b, x[(i + 1u) % n], x[(i + 2u) % n], x[(i + 3u) % n]);
        let high = vec4<u32>(x[(i + 4u) % n], x[(i + 5u) % n], x[(i + 6u) % n], x[(i + 7u) % n]);
        let pair = vec2<u32>(in_range(b), in_range(~b));
        if any(bf16_words(low, high) != bf16_pairs(low, high)) || f16_pair(pair) != (f16_bits(pair.x) | (f16_bits(pair.y) << 16u)) {
            y[i] = vec4<u32>(0xDEADu);
            continue;
        }
        y[i] = vec4<u32>(f16_bits(b) | (bf16_bits(b) << 16u), e4m3_bits(b), f32_bits_of_f16(b & 0xFFFFu), f32_bits_of_bf16(b & 0xFFFFu));
    }
}";

fn every_rounding_is_that_of_the_host() -> Outcome {
    let gpu = gpu()?;
    let mut patterns = hard_patterns();
    patterns.extend(0..=0xFFFF); // every 16-bit code, for the decoders
    let mut random = Random(1);
    patterns.extend((0..1 << 20).map(|_| random.bits()));

    let text = [include_str!("../../../shaders/lib/round.wgsl"), ROUND_TEST].concat();
    let module = gpu.device().create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(text.into()),
    });
    let pipeline = gpu.device().create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: Default::default(),
        cache: None,
    });
    let x = upload(gpu, bytemuck::cast_slice(&patterns));
    let y = upload(gpu, &vec![0; patterns.len() * 16]);
    let group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[
            wgpu::BindGroupEntry { binding: 0, resource: x.as_entire_binding() },
            wgpu::BindGroupEntry { binding: 1, resource: y.as_entire_binding() },
        ],
    });
    gpu.submit(|mut pass| {
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(1024, 1, 1);
        Ok(())
    })
    .expect("runs");
    let got = download(gpu, &y);
    let got: &[[u32; 4]] = bytemuck::cast_slice(&got);
    for (&bits, got) in patterns.iter().zip(got) {
        let value = f32::from_bits(bits);
        let code = bits as u16;
        let want = [
            u32::from(f16::from_f32(value).to_bits()) | (u32::from(bf16::from_f32(value).to_bits()) << 16),
            u32::from(e4m3_encode(value)),
            f16::from_bits(code).to_f32().to_bits(),
            bf16::from_bits(code).to_f32().to_bits(),
        ];
        assert_eq!(*got, want, "{bits:#010x}: {got:x?} instead of {want:x?}");
    }
    Ok(())
}

crate::tests![every_rounding_is_that_of_the_host,];
