// Logits of a lightning indexer, variant `shared`, which runs everywhere: tiles of keys and queries in workgroup memory.
//
//   logits[row][j] = k_scale[j] * sum over heads h of weights[token][h] * relu(q[token][h] . k[j])
//
// A workgroup takes a run (lib/indexer_logits.wgsl), a block of 128 keys at a time. For each 16 of the 128 columns, keys and queries are
// decoded to f32 in workgroup memory; 16 x 16 threads have 8 keys and THREAD_HEADS heads each, whose scores stay in registers. Then each
// thread adds up its heads, and 128 threads the sums of 16.
//
// Concatenated with: lib/indexer_logits, lib/index_key_*, lib/index_odd and lib/index_odd_*, decoders; see src/gpu/kernels/indexer.rs.
// Constants: GROUP (256), KEYS (128), THREAD_HEADS, ROWS (16 THREAD_HEADS), ACC (8 THREAD_HEADS), Q_TILE, and those of the library.

var<workgroup> k_tile: array<vec4<f32>, 640>; // [KEYS, PITCH]; then sums of a thread's heads, [16, 16, 2], a component a key
var<workgroup> q_tile: array<vec4<f32>, Q_TILE>; // [ROWS, PITCH]
var<workgroup> odd_keys: array<atomic<u32>, 4>; // a bit a key of the block: whether an element is not finite
var<workgroup> odd_row: array<atomic<u32>, 4>; // [0]: whether an element of the queries or a weight is not finite

// Quads (4 consecutive elements) from a row of a tile to the next: 4, and one against bank conflicts.
const PITCH = 5u;

@compute @workgroup_size(GROUP)
fn indexer_logits(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let run = load_run(group.y * groups.x + group.x);
    let key_place = thread % 16u; // its keys are those of the block with this rest
    let head_place = thread / 16u; // as its heads
    if (run.begin < run.end) {
        if (thread < 4u) {
            atomicStore(&odd_row[thread], 0u);
        }
        workgroupBarrier();
        var weight: array<f32, THREAD_HEADS>;
        for (var h = 0u; h < THREAD_HEADS; h++) { // unroll
            let head = h * 16u + head_place;
            weight[h] = 0.0;
            if (head < HEADS) {
                weight[h] = weight_of(run.token, head);
                var odd = is_odd(bitcast<u32>(weight[h]));
                odd = odd || has_odd_query(query_oct(run.token, head, key_place));
                if (odd) {
                    atomicOr(&odd_row[0], 1u);
                }
            }
        }
        for (var block = run.begin; block < run.end; block += KEYS) {
            // Two threads stage a key, and of the queries' tile two a head.
            let staged = thread / 2u;
            let place = place_on(run, block + staged, page_of(run, block + staged));
            var acc = array<f32, ACC>(); // [THREAD_HEADS, 8]
            var odd = false;
            for (var slice = 0u; slice < 8u; slice++) {
                let oct = slice * 2u + thread % 2u;
                var k = mat2x4<f32>();
                if (place.at != NOWHERE) {
                    let stored = key_oct(place.at, oct);
                    odd = odd || has_odd_key(stored);
                    k = decode_key(stored);
                }
                var x = mat2x4<f32>();
                if (staged < HEADS) {
                    x = decode_query(query_oct(run.token, staged, oct));
                }
                workgroupBarrier();
                if (slice == 0u && thread < 4u) {
                    atomicStore(&odd_keys[thread], 0u);
                }
                k_tile[staged * PITCH + thread % 2u * 2u] = k[0];
                k_tile[staged * PITCH + thread % 2u * 2u + 1u] = k[1];
                if (staged < ROWS) {
                    q_tile[staged * PITCH + thread % 2u * 2u] = x[0];
                    q_tile[staged * PITCH + thread % 2u * 2u + 1u] = x[1];
                }
                workgroupBarrier();
                for (var quad = 0u; quad < 4u; quad++) {
                    // The heads' rows are fewer than the keys: Intel's registers do not hold both beside the scores.
                    var rows: array<vec4<f32>, THREAD_HEADS>;
                    for (var h = 0u; h < THREAD_HEADS; h++) { // unroll
                        rows[h] = q_tile[(h * 16u + head_place) * PITCH + quad];
                    }
                    for (var i = 0u; i < 8u; i++) { // unroll
                        let key = k_tile[(i * 16u + key_place) * PITCH + quad];
                        for (var h = 0u; h < THREAD_HEADS; h++) { // unroll
                            acc[h * 8u + i] += dot(key, rows[h]);
                        }
                    }
                }
            }
            var low = vec4<f32>(); // of keys 0 to 3 of the thread, and 4 to 7
            var high = vec4<f32>();
            for (var h = 0u; h < THREAD_HEADS; h++) { // unroll
                low += weight[h] * max(vec4<f32>(acc[h * 8u], acc[h * 8u + 1u], acc[h * 8u + 2u], acc[h * 8u + 3u]), vec4<f32>());
                high += weight[h] * max(vec4<f32>(acc[h * 8u + 4u], acc[h * 8u + 5u], acc[h * 8u + 6u], acc[h * 8u + 7u]), vec4<f32>());
            }
            workgroupBarrier();
            k_tile[thread * 2u] = low;
            k_tile[thread * 2u + 1u] = high;
            if (odd) {
                atomicOr(&odd_keys[staged / 32u], 1u << (staged % 32u));
            }
            workgroupBarrier();
            if (thread < KEYS) {
                var sum = 0.0;
                for (var h = 0u; h < 16u; h++) {
                    let sums = k_tile[(h * 16u + key_place) * 2u + thread / 64u];
                    sum += sums[thread / 16u % 4u];
                }
                let own = place_on(run, block + thread, page_of(run, block + thread));
                if (own.at != NOWHERE) {
                    let scale = key_scale(own.scale);
                    let is_odd_key = ((atomicLoad(&odd_keys[thread / 32u]) >> (thread % 32u)) & 1u) != 0u;
                    var bits = bitcast<u32>(scale * (KEY_UNIT * QUERY_UNIT * sum));
                    if (is_odd_key || atomicLoad(&odd_row[0]) != 0u || is_odd(bitcast<u32>(scale))) {
                        bits = odd_logit(run, own);
                    }
                    logits[logit_at(run, block + thread)] = bits;
                }
            }
        }
    }
    for (var column = run.end + thread; column < run.fill_end; column += GROUP) {
        logits[logit_at(run, column)] = MINUS_INFINITY;
    }
}
