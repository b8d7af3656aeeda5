// Merges two attention states (FlashInfer's merge_state): variant `words`, for any head_size, offset and stride.
//
//   output = prefix * w.prefix + suffix * w.suffix, the weights of lib/merge_weights.wgsl
//
// A thread owns a word of the output, and finds the row of each element in it: see lib/words.
//
// Tile: one word of the output a thread.
// Concatenated with: lib/grid, lib/round, lib/merge_weights, lib/words, lib/in_*, lib/out_*.
// Constants: GROUP, and those of lib/words.

@group(0) @binding(1) var<storage, read> prefix_output: array<u32>; // [tokens, heads, HEAD_SIZE] elements, strided
@group(0) @binding(2) var<storage, read> suffix_output: array<u32>; // [tokens, heads, HEAD_SIZE] elements, strided
@group(0) @binding(3) var<storage, read_write> output: array<u32>; // [tokens, heads, HEAD_SIZE] elements, strided

// The bits of one merged element.
fn merged(o: Owner, w: Weights) -> u32 {
    let pe = at(params.prefix, o.token, o.head) + o.d;
    let se = at(params.suffix, o.token, o.head) + o.d;
    let p_code = code_at(prefix_output[pe / PER_WORD], pe);
    let s_code = code_at(suffix_output[se / PER_WORD], se);
    if !w.is_copy {
        let p = bitcast<f32>(select(0u, in_bits(p_code), w.has_prefix));
        let s = bitcast<f32>(select(0u, in_bits(s_code), w.has_suffix));
        return out_code(bitcast<u32>(w.prefix * p + w.suffix * s));
    }
    return select(select(0u, s_code, w.has_suffix), p_code, w.has_prefix);
}

@compute @workgroup_size(GROUP)
fn merge_state(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let item = item_of(group, groups, lane);
    if item >= params.num_items {
        return;
    }
    let word_index = params.first_word + item;
    var value = 0u;
    var ours = 0u; // mask of the bits that this thread writes
    for (var half = 0u; half < PER_WORD; half++) {
        let element = word_index * PER_WORD + half;
        let o = owner_of(element);
        if o.is_in && o.token < params.num_tokens {
            let prefix_bits = prefix_lse[at(params.prefix_lse, o.token, o.head)];
            let suffix_bits = suffix_lse[at(params.suffix_lse, o.token, o.head)];
            let w = weigh(prefix_bits, suffix_bits);
            value |= merged(o, w) << (16u * half);
            ours |= CODE_MASK << (16u * half);
            if o.d == 0u {
                write_lse(o.token, o.head, prefix_bits, suffix_bits, w);
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
