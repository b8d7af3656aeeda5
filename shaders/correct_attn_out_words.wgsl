// Weights one rank's attention output by the LSEs of all ranks, as correct_attn_out.wgsl: variant `words`, for any head_size, offset and
// stride.
//
//   output = base^(lse of this rank - top) / sum * out, with the weights of lib/correct
//
// Tile: one word of the output a thread, whose elements may belong to two rows: see lib/words. Words of tokens that a step does not
// have are left as they are.
//
// Concatenated with: lib/grid, lib/round, lib/sets, lib/correct, lib/words, lib/in_*, lib/out_*. Constants: GROUP, and those of lib/words.

@group(1) @binding(1) var<storage, read> input: array<u32>; // `out` [tokens, heads, HEAD_SIZE] elements, strided
@group(1) @binding(3) var<storage, read_write> output: array<u32>; // [tokens, heads, HEAD_SIZE] elements, strided

// The bits of one weighted element.
fn corrected(o: Owner, c: Correction) -> u32 {
    if c.weight == 0.0 {
        return 0u;
    }
    let element = at(params.input, 0u, o.token, o.head) + o.d;
    let code = code_at(input[element / PER_WORD], element);
    if c.is_only {
        return code;
    }
    return out_code(bitcast<u32>(c.weight * bitcast<f32>(in_bits(code))));
}

@compute @workgroup_size(GROUP)
fn correct_attn_out(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    if item >= params.num_words {
        return;
    }
    let word_index = params.first_word + item;
    var value = 0u;
    var ours = 0u; // mask of the bits that this thread writes
    for (var half = 0u; half < PER_WORD; half++) {
        let o = owner_of(word_index * PER_WORD + half);
        // Wraps to a large number for a token before the first.
        if o.is_in && o.token < params.max_tokens && o.token - table[1] < table[0] {
            let c = correction_of(o.token, o.head);
            value |= corrected(o, c) << (16u * half);
            ours |= CODE_MASK << (16u * half);
            if o.d == 0u {
                write_lse(o.token, o.head, c);
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
