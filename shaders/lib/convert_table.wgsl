// The cache holds e4m3 codes: times k_scale in f32, then to nearest even. That takes many instructions, and there are 256 codes: each
// workgroup has a table of its own, of which an invocation makes an entry. Needs GROUP = 256, and pack_* of the output.
var<workgroup> results: array<u32, 256>;

fn begin_convert(lane: u32, scale: E4m3Scale) {
    results[lane] = table_entry(out_code(in_bits4_scaled(lane, scale).x));
    workgroupBarrier();
}

fn convert(q: InQuad, scale: E4m3Scale) -> OutQuad {
    return pack(results[q & 0xFFu], results[(q >> 8u) & 0xFFu], results[(q >> 16u) & 0xFFu], results[q >> 24u]);
}
