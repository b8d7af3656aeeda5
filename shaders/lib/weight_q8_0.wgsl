// Weights of head_project in Q8_0 blocks, as GGUF files hold them: 34 bytes, which are an f16 scale and 32 i8. Blocks lie along the rows.
// `row` and `w_*` of the params count half words (2 bytes), to which blocks are aligned. Concatenated with: lib/project.

const BLOCK_OCTS = 4u;
const BLOCK_HALF_WORDS = 17u;

// Oct `oct` (8 consecutive elements) of the row of a matrix that begins at `row`.
fn read_w(row: u32, oct: u32) -> mat2x4<f32> {
    let block = row + oct / BLOCK_OCTS * BLOCK_HALF_WORDS;
    let scale = unpack2x16float(weight[block / 2u] >> (block % 2u * 16u)).x;
    let first = block + 1u + oct % BLOCK_OCTS * 4u;
    let at = first / 2u;
    var codes = vec2<u32>(weight[at], weight[at + 1u]);
    if first % 2u == 1u { // half of each of three words; else the third may be past the array
        codes = (codes >> vec2<u32>(16u)) | (vec2<u32>(codes.y, weight[at + 2u]) << vec2<u32>(16u));
    }
    return mat2x4<f32>(signed_bytes(codes.x), signed_bytes(codes.y)) * scale;
}

fn signed_bytes(word: u32) -> vec4<f32> {
    let high = bitcast<vec4<i32>>(vec4<u32>(word << 24u, word << 16u, word << 8u, word));
    return vec4<f32>(high >> vec4<u32>(24u));
}
