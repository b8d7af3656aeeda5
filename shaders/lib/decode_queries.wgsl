// The query rows of mla_decode_coop.wgsl: from memory to matrices. An oct is 8 consecutive elements.
// Concatenated with: lib/half_oct, lib/query, mla_decode_coop. Constants: src/gpu/kernels/decode/coop.rs.
// Lines that end in `records` are compiled for caches of records, and those that end in `one dtype` for others.

// Eight elements of a query row.
fn query_oct(query: Query, oct: u32) -> QueryOct {
    if (oct < LATENT_OCTS) {
        return q_nope[layer.q_nope_at + query.token * layer.q_nope_token_stride + query.head * layer.q_nope_head_stride + oct];
    }
    let at = layer.q_pe_at + query.token * layer.q_pe_token_stride + query.head * layer.q_pe_head_stride;
    return q_pe[at + oct - LATENT_OCTS];
}

// An f32 in f16's range is the sum of part 0, which f16 holds, and part 1, the rest. Computed by bits, since a compiler may remove a
// conversion to f16 and back.
fn query_part(x: vec4<f32>, part: u32) -> vec4<f16> {
    if (QUERY_PARTS == 1u) {
        return vec4<f16>(x);
    }
    let high = bitcast<vec4<f32>>(bitcast<vec4<u32>>(x) & vec4<u32>(0xFFFFE000u));
    if (part == 0u) {
        return vec4<f16>(high);
    }
    return vec4<f16>(x - high);
}

// The first oct of tile `k` of a subgroup's share of a row's columns: LATENT_KEY_TILES of the latent, then rotary ones, which in records
// one share has all of.
fn key_oct(share: u32, k: u32) -> u32 {
    if (k < LATENT_KEY_TILES) {
        return (share * LATENT_KEY_TILES + k) * TILE_OCTS;
    }
    return LATENT_OCTS + (share * ROPE_KEY_TILES + k - LATENT_KEY_TILES) * TILE_OCTS; // one dtype
    return LATENT_OCTS + (k - LATENT_KEY_TILES) * TILE_OCTS; // records
}

// Loads the subgroup's share of the query rows into registers: through the staging buffer, as many rows as fit it at a time. Each lane
// loads some octs of its row, which is scaled by a power of two, whose exponent is the result.
fn load_queries(queries: ptr<function, array<MatrixA, QUERY_TILES>>, worker: Worker, query: Query) -> u32 {
    var octs: array<QueryOct, LANE_QUERY_OCTS>;
    var magnitude = vec4<f32>(0.0);
    for (var i = 0u; i < LANE_QUERY_OCTS; i++) { // unroll on cards
        octs[i] = query_oct(query, min(i * SOFTMAX_LANES + worker.column, ROW_OCTS - 1u));
        let value = decode_query(octs[i]);
        magnitude = max(magnitude, max(abs(value[0]), abs(value[1])));
    }
    let largest = row_largest(max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
    let exponent = clamp(268u - (bitcast<u32>(largest) >> 23u), 1u, 253u);
    for (var part = 0u; part < QUERY_PARTS; part++) { // unroll
        for (var chunk = 0u; chunk < QUERY_CHUNKS; chunk++) { // unroll
            if (worker.row / QUERY_CHUNK_ROWS == chunk) {
                for (var i = 0u; i < LANE_QUERY_OCTS; i++) { // unroll on cards
                    let value = decode_query(octs[i]) * bitcast<f32>(exponent << 23u);
                    let half = HalfOct(query_part(value[0], part), query_part(value[1], part));
                    let oct = min(i * SOFTMAX_LANES + worker.column, ROW_OCTS - 1u); // the last one more than once
                    keys[worker.row % QUERY_CHUNK_ROWS * KEY_PITCH + oct] = half;
                }
            }
            workgroupBarrier();
            for (var r = 0u; r < SCORE_ROW_TILES; r++) { // unroll
                let staged = worker.score_row + r * TILE - chunk * QUERY_CHUNK_ROWS;
                if (staged < QUERY_CHUNK_ROWS) {
                    for (var k = 0u; k < LATENT_KEY_TILES; k++) { // unroll
                        let at = staged * KEY_PITCH + key_oct(worker.key_share, k);
                        (*queries)[(part * SCORE_ROW_TILES + r) * KEY_TILES + k] = coopLoadT<MatrixA>(&keys[at].low, KEY_PITCH * 2u);
                    }
                    if (worker.has_rope) {
                        for (var k = 0u; k < ROPE_KEY_TILES; k++) { // unroll
                            let at = staged * KEY_PITCH + key_oct(worker.key_share, LATENT_KEY_TILES + k);
                            (*queries)[(part * SCORE_ROW_TILES + r) * KEY_TILES + LATENT_KEY_TILES + k] = coopLoadT<MatrixA>(&keys[at].low, KEY_PITCH * 2u);
                        }
                    }
                }
            }
            workgroupBarrier();
        }
    }
    return exponent;
}
