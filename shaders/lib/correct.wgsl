// What both shaders of correct_attn_out share: parameters, and the weight of a row.
// Concatenated with: lib/sets.

struct CorrectParams {
    // out and the output in the shader's unit (quads or elements), LSEs in elements
    input: SetStrides, // set_stride: 0
    lses: SetStrides, // of ranks
    output: SetStrides, // set_stride: 0
    output_lse: SetStrides, // set_stride: 0
    max_tokens: u32, // at least 1
    world: u32, // at least 1
    rank: u32, // below world
    num_heads: u32,
    writes_lse: u32,
    ln_base: f32, // of the base that LSEs are in: 1 or ln 2
    per_ln: f32, // its reciprocal
    // only for the shader by words: the words of the output, and how to find the row of one of its elements
    first_word: u32,
    num_words: u32,
    inner_is_token: u32,
    inner_stride: u32,
    outer_stride: u32,
}

@group(0) @binding(0) var<storage, read> table: array<u32>; // [2] num_tokens, first token
@group(1) @binding(0) var<uniform> params: CorrectParams;
@group(1) @binding(2) var<storage, read> lses: array<u32>; // f32 bits [world, tokens, heads], strided
@group(1) @binding(4) var<storage, read_write> output_lse: array<u32>; // [tokens, heads], strided; unused without writes_lse

// How this rank's output counts in a row of the combined output.
struct Correction {
    weight: f32, // 0: nothing, whatever `out` holds
    is_only: bool, // no other rank weighs anything: its bits are kept
    lse_bits: u32, // of the whole
}

fn correction_of(token: u32, head: u32) -> Correction {
    var some = 0u; // number of ranks with a weight
    var only = NOTHING; // the LSE of the last of them, as it is
    var top = bitcast<f32>(LOWEST);
    for (var rank = 0u; rank < params.world; rank++) {
        let bits = lses[at(params.lses, rank, token, head)];
        if weighs(bits) {
            some += 1u;
            only = bits;
            top = max(top, bitcast<f32>(bits));
        }
    }
    var sum = 0.0;
    for (var rank = 0u; rank < params.world; rank++) {
        let bits = lses[at(params.lses, rank, token, head)];
        if weighs(bits) {
            sum += exp_below(bitcast<f32>(bits), top);
        }
    }
    let mine = lses[at(params.lses, params.rank, token, head)];
    if some < 2u {
        return Correction(f32(weighs(mine)), true, only);
    }
    let lse_bits = bitcast<u32>(top + log(sum) * params.per_ln);
    if !weighs(mine) {
        return Correction(0.0, false, lse_bits);
    }
    return Correction(exp_below(bitcast<f32>(mine), top) * (1.0 / sum), false, lse_bits);
}

fn write_lse(token: u32, head: u32, c: Correction) {
    if params.writes_lse != 0u {
        output_lse[at(params.output_lse, 0u, token, head)] = c.lse_bits;
    }
}
