// Merges any number of partial attention states (sets) of the same queries, as FlashInfer's merge_states and vLLM's dcp_lse_combine.
//
//   top = max over sets of lse; weight = base^(lse - top), 0 where lse is -inf, +inf or NaN
//   output = sum(weight * state) / sum(weight), in the order of the sets; lse = top + log(sum(weight))
//   one set with a weight: its bits unchanged; none: 0 and -inf; a weight of 0 leaves a state out, whatever it holds
//
// Tile: one quad (4 consecutive elements) of a row a thread, where a row is a (token, head), heads first. Online, TURN sets at a time:
// their loads are issued together, to overlap their latency, and sums are rescaled where a turn raises `top`. Sets past the last one
// repeat it and weigh 0. Lines that end in `all f32` are compiled for sets of f32, of which 2e-6 is promised.
//
// Concatenated with: lib/grid, lib/round, lib/sets, lib/quad_*, lib/out_*. Constants: GROUP, HEAD_QUADS, TURN.

@group(0) @binding(0) var<storage, read> table: array<u32>; // [3] num_tokens, first token, num_sets
@group(1) @binding(0) var<uniform> params: MergeSetsParams;
@group(1) @binding(1) var<storage, read> states: array<OutQuad>; // [sets, tokens, heads, HEAD_QUADS], strided
// LSEs are declared as words: WGSL lets a shader assume that no infinity and no NaN exists, so an empty set is told by its bits.
@group(1) @binding(2) var<storage, read> lse: array<u32>; // [sets, tokens, heads], strided
@group(1) @binding(3) var<storage, read_write> output: array<OutQuad>; // [tokens, heads, HEAD_QUADS], strided
@group(1) @binding(4) var<storage, read_write> output_lse: array<u32>; // [tokens, heads], strided; unused without writes_lse

@compute @workgroup_size(GROUP)
fn merge_states(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    let row = item / HEAD_QUADS;
    let quad = item % HEAD_QUADS;
    let row_token = row / params.num_heads;
    let head = row % params.num_heads;
    // A step prepared again after its commands were recorded may have more tokens than the binding's buffers, which no host check can
    // see. Addresses are clamped, so that loads need no condition and are issued first: worth 1 % of a cascade on an H200.
    let outside = row_token >= table[0] || table[1] + row_token >= params.max_tokens;
    let token = min(table[1] + row_token, params.max_tokens - 1u);
    let num_sets = min(table[2], params.max_sets);

    var top = bitcast<f32>(LOWEST); // the largest LSE so far
    var some = 0u; // number of sets with a weight
    var only = 0u; // the last of them
    var sum = 0.0; // of weights relative to exp(top), as `merged`
    var merged = vec4<f32>(0.0);
    // Sums in levels, as a running sum of 65,536 sets would be off by 8e-4: of a turn, of 16 turns, of 21 such sums, of all of these.
    var mid_sum = 0.0; // all f32
    var mid = vec4<f32>(0.0); // all f32
    var far_sum = 0.0; // all f32
    var far = vec4<f32>(0.0); // all f32
    for (var first = 0u; first == 0u || first < num_sets; first += TURN) {
        var bits: array<u32, TURN>;
        var state: array<OutQuad, TURN>;
        for (var i = 0u; i < TURN; i++) { // unroll
            let number = min(first + i, max(num_sets, 1u) - 1u);
            bits[i] = lse[at(params.lse, number, token, head)];
            state[i] = states[at(params.states, number, token, head) + quad];
        }
        let old = top;
        for (var i = 0u; i < TURN; i++) { // unroll
            bits[i] = select(NOTHING, bits[i], first + i < num_sets);
            let is_some = weighs(bits[i]);
            top = max(top, bitcast<f32>(select(LOWEST, bits[i], is_some)));
            some += select(0u, 1u, is_some);
            only = select(only, first + i, is_some);
        }
        let factor = exp_below(old, top);
        sum *= factor;
        merged = select(vec4<f32>(0.0), merged * factor, factor > 0.0);
        mid_sum *= factor; // all f32
        mid = select(vec4<f32>(0.0), mid * factor, factor > 0.0); // all f32
        far_sum *= factor; // all f32
        far = select(vec4<f32>(0.0), far * factor, factor > 0.0); // all f32
        if first % (16u * TURN) == 0u { // all f32
            mid_sum += sum; // all f32
            mid += merged; // all f32
            sum = 0.0; // all f32
            merged = vec4<f32>(0.0); // all f32
            if first % (336u * TURN) == 0u { // all f32
                far_sum += mid_sum; // all f32
                far += mid; // all f32
                mid_sum = 0.0; // all f32
                mid = vec4<f32>(0.0); // all f32
            } // all f32
        } // all f32
        let sum_before = sum; // all f32
        let before = merged; // all f32
        sum = 0.0; // all f32
        merged = vec4<f32>(0.0); // all f32
        for (var i = 0u; i < TURN; i++) { // unroll
            if weighs(bits[i]) {
                let weight = exp_below(bitcast<f32>(bits[i]), top);
                sum += weight;
                if weight > 0.0 {
                    merged += weight * decode_quad(bitcast<Quad>(state[i]));
                }
            }
        }
        sum += sum_before; // all f32
        merged += before; // all f32
    }
    sum = far_sum + (mid_sum + sum); // all f32
    merged = far + (mid + merged); // all f32
    // A state that is not finite may have got in by a weight that a later turn made 0: added up once more, by the last weights.
    if num_sets > TURN && any((bitcast<vec4<u32>>(merged) & vec4<u32>(F32_INF)) == vec4<u32>(F32_INF)) {
        merged = vec4<f32>(0.0);
        mid = vec4<f32>(0.0); // all f32
        far = vec4<f32>(0.0); // all f32
        for (var number = 0u; number < num_sets; number++) {
            if number % 32u == 0u { // all f32
                mid += merged; // all f32
                merged = vec4<f32>(0.0); // all f32
                if number % 1024u == 0u { // all f32
                    far += mid; // all f32
                    mid = vec4<f32>(0.0); // all f32
                } // all f32
            } // all f32
            let lse_bits = lse[at(params.lse, number, token, head)];
            if weighs(lse_bits) {
                let weight = exp_below(bitcast<f32>(lse_bits), top);
                if weight > 0.0 {
                    let quad_bits = states[at(params.states, number, token, head) + quad];
                    merged += weight * decode_quad(bitcast<Quad>(quad_bits));
                }
            }
        }
        merged = far + (mid + merged); // all f32
    }

    if outside {
        return;
    }
    let to = at(params.output, 0u, token, head) + quad;
    var lse_bits = NOTHING;
    if some > 1u || (some == 1u && params.output_scale != 1.0) {
        output[to] = out_quad(bitcast<vec4<u32>>(merged * (1.0 / sum) * params.output_scale), UNSCALED);
    } else if some == 1u {
        output[to] = states[at(params.states, only, token, head) + quad];
    } else {
        output[to] = OutQuad();
    }
    if some > 1u {
        lse_bits = bitcast<u32>(top + log(sum) * params.per_ln);
    } else if some == 1u {
        lse_bits = lse[at(params.lse, only, token, head)];
    }
    if params.writes_lse != 0u && quad == 0u {
        output_lse[at(params.output_lse, 0u, token, head)] = lse_bits;
    }
}
