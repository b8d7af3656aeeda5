// Statistics of new tokens for choosing an e4m3 cache's k_scale: amax, and counts of saturating, non-finite and all elements.
//
//   for x in kv_c[tokens] ++ k_pe[tokens]:
//     amax = max(amax, |x|) if x is finite; saturated += |x| > 448 * k_scale; non_finite += x is inf or NaN; elements += 1
//
// The results are added to `stats`, so calls accumulate. Comparisons are on bit patterns, whose order for x >= 0 is that of the numbers:
// WGSL lets a shader assume that there is no NaN. A quad is 4 consecutive elements.
//
// Tile: one quad of TOKENS_PER_LANE tokens a thread; a workgroup reduces in workgroup memory, one thread adds that to `stats`.
// Concatenated with: lib/grid, lib/round, lib/in_*. Constants: GROUP, LATENT_QUADS, ROW_QUADS, TOKENS_PER_LANE.

struct CalibrateParams {
    kv_c_base_quads: u32,
    kv_c_stride_quads: u32,
    k_pe_base_quads: u32,
    k_pe_stride_quads: u32,
    max_tokens: u32,
    limit_bits: u32, // f32 bits of 448 * k_scale, which may be infinite
    reserved_0: u32,
    reserved_1: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [2] num_tokens, first token
@group(1) @binding(0) var<uniform> params: CalibrateParams;
@group(1) @binding(1) var<storage, read> kv_c: array<InQuad>; // [tokens, L / 4], strided
@group(1) @binding(2) var<storage, read> k_pe: array<InQuad>; // [tokens, R / 4], strided
@group(1) @binding(3) var<storage, read_write> stats: array<atomic<u32>>; // [8] amax, unused, then 3 counts of 64 bits, low word first

var<workgroup> sums: array<atomic<u32>, 4>; // [4] amax, saturated, non-finite, elements

@compute @workgroup_size(GROUP)
fn kv_calibrate(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    if lane < 4u {
        atomicStore(&sums[lane], 0u);
    }
    workgroupBarrier();

    let item = item_of(group, groups, lane);
    let quad = item % ROW_QUADS;
    let first = item / ROW_QUADS * TOKENS_PER_LANE;
    let begin = min(table[1], params.max_tokens);
    // A step prepared again after this was recorded may have more tokens than the binding's buffers hold.
    let num_tokens = min(table[0], params.max_tokens - begin);
    if first < num_tokens {
        var quads: array<InQuad, TOKENS_PER_LANE>;
        if quad < LATENT_QUADS {
            for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
                let token = begin + min(first + i, num_tokens - 1u);
                quads[i] = kv_c[params.kv_c_base_quads + token * params.kv_c_stride_quads + quad];
            }
        } else {
            for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
                let token = begin + min(first + i, num_tokens - 1u);
                quads[i] = k_pe[params.k_pe_base_quads + token * params.k_pe_stride_quads + quad - LATENT_QUADS];
            }
        }
        var amax = vec4<u32>(0u);
        var saturated = vec4<u32>(0u);
        var non_finite = vec4<u32>(0u);
        for (var i = 0u; i < TOKENS_PER_LANE; i++) { // unroll
            let magnitude = in_bits4(quads[i]) & vec4<u32>(0x7FFFFFFFu);
            let is_finite = magnitude < vec4<u32>(F32_INF);
            // Tokens past the end repeat the last one: that cannot change amax, and they are not counted.
            let is_counted = vec4<bool>(first + i < num_tokens);
            amax = max(amax, select(vec4<u32>(0u), magnitude, is_finite));
            saturated += vec4<u32>(is_finite & is_counted & (magnitude > vec4<u32>(params.limit_bits)));
            non_finite += vec4<u32>(!is_finite & is_counted);
        }
        atomicMax(&sums[0], max(max(amax.x, amax.y), max(amax.z, amax.w)));
        let num_saturated = saturated.x + saturated.y + saturated.z + saturated.w;
        if num_saturated > 0u {
            atomicAdd(&sums[1], num_saturated);
        }
        let num_non_finite = non_finite.x + non_finite.y + non_finite.z + non_finite.w;
        if num_non_finite > 0u {
            atomicAdd(&sums[2], num_non_finite);
        }
        atomicAdd(&sums[3], 4u * min(TOKENS_PER_LANE, num_tokens - first));
    }
    workgroupBarrier();

    if lane == 0u {
        atomicMax(&stats[0], atomicLoad(&sums[0]));
        for (var i = 0u; i < 3u; i++) { // unroll
            add(2u + 2u * i, atomicLoad(&sums[1u + i]));
        }
    }
}

// Adds to a 64-bit count, low word first. The carry is its own atomic, as WGSL has none of 64 bits.
fn add(at: u32, n: u32) {
    if n == 0u {
        return;
    }
    if atomicAdd(&stats[at], n) > 0xFFFFFFFFu - n {
        atomicAdd(&stats[at + 1u], 1u);
    }
}
