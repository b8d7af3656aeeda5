// Merges any number of partial attention states (sets), as merge_states.wgsl: variant `words`, for any head_size, offset and stride.
//
//   top = max over sets of lse; weight = base^(lse - top); output = sum(weight * state) / sum(weight); lse = top + log(sum(weight))
//   one set with a weight: its bits unchanged; none: 0 and -inf; a weight of 0 leaves a state out, whatever it holds
//
// Tile: one word of the output a thread, whose elements may belong to two rows: see lib/words. Words of tokens that a step does not
// merge are left as they are. Sums are in levels where lines end in `all f32`, as in merge_states.wgsl.
//
// Concatenated with: lib/grid, lib/round, lib/sets, lib/words, lib/in_*, lib/out_*. Constants: GROUP, and those of lib/words.

@group(0) @binding(0) var<storage, read> table: array<u32>; // [3] num_tokens, first token, num_sets
@group(1) @binding(0) var<uniform> params: MergeSetsParams;
@group(1) @binding(1) var<storage, read> states: array<u32>; // [sets, tokens, heads, HEAD_SIZE] elements, strided
@group(1) @binding(2) var<storage, read> lse: array<u32>; // f32 bits [sets, tokens, heads], strided
@group(1) @binding(3) var<storage, read_write> output: array<u32>; // [tokens, heads, HEAD_SIZE] elements, strided
@group(1) @binding(4) var<storage, read_write> output_lse: array<u32>; // [tokens, heads], strided; unused without writes_lse

// What the sets of a row merge to.
struct Merge {
    some: u32, // number of sets with a weight
    only: u32, // the last of them
    top: f32, // the largest LSE
    sum: f32, // of weights relative to it
}

fn merge_of(o: Owner, num_sets: u32) -> Merge {
    var m = Merge(0u, 0u, bitcast<f32>(LOWEST), 0.0);
    for (var number = 0u; number < num_sets; number++) {
        let bits = lse[at(params.lse, number, o.token, o.head)];
        if weighs(bits) {
            m.top = max(m.top, bitcast<f32>(bits));
            m.some += 1u;
            m.only = number;
        }
    }
    var mid = 0.0; // all f32
    var far = 0.0; // all f32
    for (var number = 0u; number < num_sets; number++) {
        if number % 32u == 0u { // all f32
            mid += m.sum; // all f32
            m.sum = 0.0; // all f32
            if number % 1024u == 0u { // all f32
                far += mid; // all f32
                mid = 0.0; // all f32
            } // all f32
        } // all f32
        let bits = lse[at(params.lse, number, o.token, o.head)];
        if weighs(bits) {
            m.sum += exp_below(bitcast<f32>(bits), m.top);
        }
    }
    m.sum = far + (mid + m.sum); // all f32
    return m;
}

fn state_code(o: Owner, number: u32) -> u32 {
    let element = at(params.states, number, o.token, o.head) + o.d;
    return code_at(states[element / PER_WORD], element);
}

// The bits of one merged element.
fn merged(o: Owner, m: Merge, num_sets: u32) -> u32 {
    if m.some == 0u {
        return 0u;
    }
    if m.some == 1u && params.output_scale == 1.0 {
        return state_code(o, m.only);
    }
    var x = 0.0;
    var mid = 0.0; // all f32
    var far = 0.0; // all f32
    for (var number = 0u; number < num_sets; number++) {
        if number % 32u == 0u { // all f32
            mid += x; // all f32
            x = 0.0; // all f32
            if number % 1024u == 0u { // all f32
                far += mid; // all f32
                mid = 0.0; // all f32
            } // all f32
        } // all f32
        let bits = lse[at(params.lse, number, o.token, o.head)];
        if weighs(bits) {
            let weight = exp_below(bitcast<f32>(bits), m.top);
            if weight > 0.0 {
                x += weight * bitcast<f32>(in_bits(state_code(o, number)));
            }
        }
    }
    x = far + (mid + x); // all f32
    return out_code(bitcast<u32>(x * (1.0 / m.sum) * params.output_scale));
}

fn write_lse(o: Owner, m: Merge) {
    var bits = NOTHING;
    if m.some > 1u {
        bits = bitcast<u32>(m.top + log(m.sum) * params.per_ln);
    } else if m.some == 1u {
        bits = lse[at(params.lse, m.only, o.token, o.head)];
    }
    output_lse[at(params.output_lse, 0u, o.token, o.head)] = bits;
}

@compute @workgroup_size(GROUP)
fn merge_states(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    if item >= params.num_words {
        return;
    }
    let num_sets = min(table[2], params.max_sets);
    let word_index = params.first_word + item;
    var value = 0u;
    var ours = 0u; // mask of the bits that this thread writes
    for (var half = 0u; half < PER_WORD; half++) {
        let o = owner_of(word_index * PER_WORD + half);
        // Wraps to a large number for a token before the first.
        if o.is_in && o.token < params.max_tokens && o.token - table[1] < table[0] {
            let m = merge_of(o, num_sets);
            value |= merged(o, m, num_sets) << (16u * half);
            ours |= CODE_MASK << (16u * half);
            if o.d == 0u && params.writes_lse != 0u {
                write_lse(o, m);
            }
        }
    }
    if ours == 0u {
        return;
    }
    // Read-modify-write without a race: no other thread of this dispatch writes this word.
    if ours != 0xFFFFFFFFu {
        value |= output[word_index] & ~ours;
    }
    output[word_index] = value;
}
