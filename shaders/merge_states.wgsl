// Merges any number of partial attention states of the same queries: an invocation makes a quad of a row of the output.
//
//   top = the largest LSE of the row's sets; a set weighs exp(lse - top), and nothing where its LSE is -inf, +inf or NaN
//   output = sum of weight * state / sum of weights, in the order of the sets; lse = top + ln(sum of weights)
//   where one set only weighs something: its bits; where none does: 0 and -inf
//
// A row is a (token, head), heads first. TURN sets at a time are asked for before any of them is waited for; past the last one, it is
// read again and weighs nothing. A turn that has a larger LSE rescales what is summed.
//
// Prelude: GROUP, HEAD_QUADS, TURN. Libs: grid, round, quad_*, out_*.

// element (set, token, head, 0) of an array is at offset + set * set_stride + token * token_stride + head * head_stride
struct SetStrides {
    offset: u32,
    set_stride: u32,
    token_stride: u32,
    head_stride: u32,
}

struct MergeSetsParams {
    // states and the output in quads, LSEs in elements
    states: SetStrides,
    lse: SetStrides,
    output: SetStrides,
    output_lse: SetStrides,
    max_tokens: u32, // at least 1
    max_sets: u32, // at least 1
    num_heads: u32,
    writes_lse: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // tokens, the first of them, sets
@group(1) @binding(0) var<uniform> params: MergeSetsParams;
@group(1) @binding(1) var<storage, read> states: array<OutQuad>; // [sets, tokens, heads, HEAD_QUADS], strided
// LSEs are words: only their bits tell an empty set, as a shader may assume that no infinity and no NaN exists
@group(1) @binding(2) var<storage, read> lse: array<u32>; // [sets, tokens, heads], strided
@group(1) @binding(3) var<storage, read_write> output: array<OutQuad>; // [tokens, heads, HEAD_QUADS], strided
@group(1) @binding(4) var<storage, read_write> output_lse: array<u32>; // [tokens, heads], strided; unused without writes_lse

const NOTHING = 0xFF800000u; // the LSE of a set that weighs nothing: -inf
const LOWEST = 0xFF7FFFFFu; // of all finite f32

fn at(s: SetStrides, number: u32, token: u32, head: u32) -> u32 {
    return s.offset + number * s.set_stride + token * s.token_stride + head * s.head_stride;
}

// Halves first, so that the difference of any two finite values is finite; under -120 exp is 0 in any case. 1 where both are equal.
fn exp_below(x: f32, top: f32) -> f32 {
    return select(exp(2.0 * max(0.5 * x - 0.5 * top, -60.0)), 1.0, x == top);
}

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
    // A step may be prepared again, with more than the binding has, after its commands were recorded: no host check can see that. What is
    // read is asked for first, under no condition: 1 % of a cascade on an H200.
    let outside = row_token >= table[0] || table[1] + row_token >= params.max_tokens;
    let token = min(table[1] + row_token, params.max_tokens - 1u);
    let num_sets = min(table[2], params.max_sets);

    var top = bitcast<f32>(LOWEST); // the largest LSE so far
    var some = 0u; // sets that weigh something
    var only = 0u; // the last of them
    var sum = 0.0; // in units of exp(top), as what is merged
    var merged = vec4<f32>(0.0);
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
            let weighs = (bits[i] & F32_INF) != F32_INF;
            top = max(top, bitcast<f32>(select(LOWEST, bits[i], weighs)));
            some += select(0u, 1u, weighs);
            only = select(only, first + i, weighs);
        }
        let factor = exp_below(old, top);
        sum *= factor;
        merged *= factor;
        for (var i = 0u; i < TURN; i++) { // unroll
            if (bits[i] & F32_INF) != F32_INF {
                let weight = exp_below(bitcast<f32>(bits[i]), top);
                sum += weight;
                merged += weight * decode_quad(bitcast<Quad>(state[i]));
            }
        }
    }

    if outside {
        return;
    }
    let to = at(params.output, 0u, token, head) + quad;
    var lse_bits = NOTHING;
    if some > 1u {
        output[to] = out_quad(bitcast<vec4<u32>>(merged * (1.0 / sum)), UNSCALED);
        lse_bits = bitcast<u32>(top + log(sum));
    } else if some == 1u {
        output[to] = states[at(params.states, only, token, head) + quad];
        lse_bits = lse[at(params.lse, only, token, head)];
    } else {
        output[to] = OutQuad();
    }
    if params.writes_lse != 0u && quad == 0u {
        output_lse[at(params.output_lse, 0u, token, head)] = lse_bits;
    }
}
