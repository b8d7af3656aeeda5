// Logits of a lightning indexer, variant `coop`, on cooperative matrices (tensor cores), f16 x f16 + f32: keys are a matrix's rows, heads
// its columns, so that a logit is a weighted sum over a row.
//
//   logits[row][j] = k_scale[j] * sum over heads h of weights[token][h] * relu(q[token][h] . k[j])
//
// A workgroup takes a run (lib/indexer_logits.wgsl), a block of KEYS keys at a time. Subgroups are HEAD_SPLIT shares of the heads times
// groups of SUB_KEYS keys, one for each lane. A subgroup keeps the queries of its heads in registers for the whole run. For each block:
//   1. scores   loads of the next block are issued; KEY_TILES x HEAD_TILES matrices of scores += keys x queries
//   2. sums     one of PARTS strips of a column of matrices at a time goes through the subgroup's part of `scores`; PARTS lanes add up a
//               key's row
//   3. logits   the next block is staged as f16; the shares of the heads are added and written
//
// Scores take one strip and a block few keys because NVIDIA's driver grants the workgroups of a multiprocessor about 48 KiB together: with
// 64 heads three of them fit. Other tiles are in docs/tried.md. The size of every workgroup variable and every pitch are multiples of 16
// bytes: otherwise that driver loads matrices wrongly.
//
// A block is loaded and staged in one iteration: NVIDIA's compiler copies values that are carried to the next, and so would wait for
// loads. Staged rows of keys past the run's end or of another slab are zeros. What is not finite: see lib/index_odd.wgsl.
//
// Concatenated with: lib/half_oct, lib/indexer_logits, lib/index_key_*, lib/index_chunk_*, lib/index_halves_*, lib/index_odd,
// lib/index_odd_*, decoders; see src/gpu/kernels/indexer.rs.
// Constants: TILE, TILE_OCTS, TILE_QUADS, SUBGROUP, THREADS, KEYS, SUB_KEYS, KEY_TILES, HEAD_TILES, HEAD_SPLIT, SUB_HEADS, DEPTH_TILES,
// PARTS, STRIP_TILES, STRIP_KEYS, PART_STEPS, PART_QUADS, SCORE_PITCH, SUB_SCORES, SCORES, STAGED, LANES, LANE_STEPS, LOADS,
// CHUNK_OCTS, Q_LOADS, QUERIES, ACC_TILES, SUMS, WEIGHT_QUADS.

var<workgroup> staged: array<HalfOct, STAGED>; // [KEYS or SUB_HEADS, PITCH]
var<workgroup> scores: array<vec4<f32>, SCORES>; // [subgroups, STRIP_KEYS, SCORE_PITCH]
var<workgroup> weight_tile: array<vec4<f32>, WEIGHT_QUADS>; // [HEAD_SPLIT * SUB_HEADS / 4]
var<workgroup> sums: array<f32, SUMS>; // [HEAD_SPLIT, KEYS]
var<workgroup> odd_row: array<atomic<u32>, 4>; // [0]: whether an element of the queries or a weight is not finite

// Octs of f16 (16 bytes) from a staged key or query to the next: 16, and one against bank conflicts.
const PITCH = 17u;

struct Block {
    chunks: array<Chunk, LOADS>,
}

// A thread's chunks of a key.
fn load_block(place: Place, column: u32) -> Block {
    var block: Block;
    if (place.at != NOWHERE) {
        for (var i = 0u; i < LOADS; i++) { // unroll
            block.chunks[i] = load_chunk(place.at, column + i * LANES);
        }
    }
    return block;
}

// 1 where one of them has an element that is not finite.
fn stage_block(block: Block, row: u32, column: u32) -> u32 {
    var odd = false;
    for (var i = 0u; i < LOADS; i++) { // unroll
        odd = stage_chunk(row * PITCH + (column + i * LANES) * CHUNK_OCTS, block.chunks[i]) || odd;
    }
    return select(0u, 1u, odd);
}

fn weight_or_zero(token: u32, head: u32) -> f32 {
    if (head < HEADS) {
        return weight_of(token, head);
    }
    return 0.0;
}

@compute @workgroup_size(THREADS)
fn indexer_logits(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let run = load_run(group.y * groups.x + group.x);
    let thread = subgroup * SUBGROUP + lane;
    let head_share = subgroup % HEAD_SPLIT;
    let first_key = subgroup / HEAD_SPLIT * SUB_KEYS; // of the subgroup, in a block
    let row = thread / LANES; // LANES threads stage a key
    let column = thread % LANES;
    let strip_key = lane % STRIP_KEYS; // of a strip, whose scores a lane adds up, and the lane's part of them
    let part = lane / STRIP_KEYS;
    if (run.begin < run.end) {
        if (thread < 4u) {
            atomicStore(&odd_row[thread], 0u);
        }
        workgroupBarrier();
        for (var quad = thread; quad < WEIGHT_QUADS; quad += THREADS) {
            let head = quad * 4u;
            let four = vec4<f32>(
                weight_or_zero(run.token, head),
                weight_or_zero(run.token, head + 1u),
                weight_or_zero(run.token, head + 2u),
                weight_or_zero(run.token, head + 3u),
            );
            weight_tile[quad] = four;
            let bits = bitcast<vec4<u32>>(four);
            if (is_odd(bits.x) || is_odd(bits.y) || is_odd(bits.z) || is_odd(bits.w)) {
                atomicOr(&odd_row[0], 1u);
            }
        }
        var queries: array<MatrixB, QUERIES>; // [DEPTH_TILES, HEAD_TILES]
        for (var share = 0u; share < HEAD_SPLIT; share++) { // unroll
            for (var i = 0u; i < Q_LOADS; i++) { // unroll on cards
                let head = (i * THREADS + thread) / 16u;
                let oct = (i * THREADS + thread) % 16u;
                var halves = vec4<u32>();
                if (share * SUB_HEADS + head < HEADS) {
                    let stored = query_oct(run.token, share * SUB_HEADS + head, oct);
                    halves = halves_of_query(stored);
                    if (has_odd_query(stored)) {
                        atomicOr(&odd_row[0], 1u);
                    }
                }
                staged[head * PITCH + oct] = half_oct(halves);
            }
            workgroupBarrier();
            if (head_share == share) {
                for (var k = 0u; k < DEPTH_TILES; k++) { // unroll on cards
                    for (var n = 0u; n < HEAD_TILES; n++) { // unroll on cards
                        queries[k * HEAD_TILES + n] = coopLoad<MatrixB>(&staged[n * TILE * PITCH + k * TILE_OCTS].low, PITCH * 2u);
                    }
                }
            }
            workgroupBarrier();
        }
        var place = place_on(run, run.begin + row, page_of(run, run.begin + row));
        var odd = stage_block(load_block(place, column), row, column);
        var next_page = page_of(run, run.begin + KEYS + row);
        workgroupBarrier();

        for (var block = run.begin; block < run.end; block += KEYS) {
            let next = place_on(run, block + KEYS + row, next_page);
            let ahead = load_block(next, column);
            next_page = page_of(run, block + 2u * KEYS + row);
            var acc = array<MatrixC, ACC_TILES>(); // [KEY_TILES, HEAD_TILES]
            for (var k = 0u; k < DEPTH_TILES; k++) { // unroll on cards
                for (var t = 0u; t < KEY_TILES; t++) { // unroll on cards
                    let key = coopLoadT<MatrixA>(&staged[(first_key + t * TILE) * PITCH + k * TILE_OCTS].low, PITCH * 2u);
                    for (var n = 0u; n < HEAD_TILES; n++) { // unroll on cards
                        acc[t * HEAD_TILES + n] = coopMultiplyAdd(key, queries[k * HEAD_TILES + n], acc[t * HEAD_TILES + n]);
                    }
                }
            }
            var sum = array<f32, PARTS>();
            for (var n = 0u; n < HEAD_TILES; n++) { // unroll on cards
                for (var strip = 0u; strip < PARTS; strip++) { // unroll on cards
                    if (n + strip > 0u) {
                        workgroupBarrier();
                    }
                    for (var t = 0u; t < STRIP_TILES; t++) { // unroll on cards
                        coopStoreT(
                            acc[(strip * STRIP_TILES + t) * HEAD_TILES + n],
                            &scores[subgroup * SUB_SCORES + t * TILE * SCORE_PITCH],
                            SCORE_PITCH,
                        );
                    }
                    workgroupBarrier();
                    for (var i = 0u; i < PART_QUADS; i++) { // unroll on cards
                        let four = max(scores[subgroup * SUB_SCORES + strip_key * SCORE_PITCH + part * PART_QUADS + i], vec4<f32>());
                        sum[strip] += dot(four, weight_tile[(head_share * SUB_HEADS + n * TILE) / 4u + part * PART_QUADS + i]);
                    }
                }
            }
            for (var strip = 0u; strip < PARTS; strip++) { // unroll on cards
                for (var i = 0u; i < PART_STEPS; i++) { // unroll on cards
                    sum[strip] += subgroupShuffleXor(sum[strip], STRIP_KEYS << i);
                }
                if (part == 0u) {
                    sums[head_share * KEYS + first_key + strip * STRIP_KEYS + strip_key] = sum[strip];
                }
            }
            var odd_key = odd;
            for (var i = 0u; i < LANE_STEPS; i++) { // unroll
                odd_key |= subgroupShuffleXor(odd_key, 1u << i);
            }
            workgroupBarrier();
            if (column == 0u && place.at != NOWHERE) {
                var total = sums[row];
                for (var share = 1u; share < HEAD_SPLIT; share++) {
                    total += sums[share * KEYS + row];
                }
                let scale = key_scale(place.scale);
                var bits = bitcast<u32>(scale * (KEY_UNIT * QUERY_UNIT * total));
                if ((odd_key | atomicLoad(&odd_row[0])) != 0u || is_odd(bitcast<u32>(scale))) {
                    bits = odd_logit(run, place);
                }
                logits[logit_at(run, block + row)] = bits;
            }
            place = next;
            odd = stage_block(ahead, row, column);
            workgroupBarrier();
        }
    }
    for (var at = run.end + thread; at < run.fill_end; at += THREADS) {
        logits[logit_at(run, at)] = MINUS_INFINITY;
    }
}
