// convert from an e4m3 cache: code * k_scale in f32, then rounded to the output's dtype, to nearest even. Exact rounding takes many
// integer instructions and there are 256 codes only, so each workgroup tabulates them, one entry a thread, and looks them up.
// Concatenated with: lib/in_e4m3, lib/out_*, lib/pack_*. Constants: GROUP = 256.
var<workgroup> results: array<u32, 256>; // [256] by code: table_entry of the result

fn begin_convert(lane: u32, scale: E4m3Scale) {
    results[lane] = table_entry(out_code(in_bits4_scaled(lane, scale).x));
    workgroupBarrier();
}

fn convert(q: InQuad, scale: E4m3Scale) -> OutQuad {
    return pack(results[q & 0xFFu], results[(q >> 8u) & 0xFFu], results[(q >> 16u) & 0xFFu], results[q >> 24u]);
}
