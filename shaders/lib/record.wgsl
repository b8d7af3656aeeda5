// Where the parts of a record are: a token with f32 scales of its own, as fp8_ds_mla's 656 bytes.
//
//   words 0 to RECORD_SCALES          e4m3 codes of the latent, 4 a word
//   RECORD_SCALES to RECORD_ROPE      f32 scales, one for each RECORD_GROUP codes: latent = code * scale
//   RECORD_ROPE to RECORD_WORDS       bf16 rotary elements, 2 a word
//
// A quad is 4 consecutive elements: a word of codes, two words of the rotary part. Kernels that load more at a time divide: each section
// begins at a multiple of 16 bytes. Constants, in words but for the last: RECORD_WORDS, RECORD_SCALES, RECORD_ROPE, RECORD_GROUP.

const GROUP_QUADS = RECORD_GROUP / 4u;

// Words from a record's first to a quad of the latent, to the quad's scale, and to a quad of the rotary part.
fn latent_word(quad: u32) -> u32 {
    return quad;
}

fn scale_word(quad: u32) -> u32 {
    return RECORD_SCALES + quad / GROUP_QUADS;
}

fn rope_word(quad: u32) -> u32 {
    return RECORD_ROPE + 2u * quad;
}
