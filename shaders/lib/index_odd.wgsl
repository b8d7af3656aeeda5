// A logit where an element of the key, of the queries or a weight is not finite: by the bits of each, as WGSL lets a device assume that
// there are no such numbers. Slow. Concatenated with: lib/index_odd_*, functions bits_of_key and bits_of_query.

// What a number that is not finite is, as bits of a set.
const POSITIVE = 1u;
const NEGATIVE = 2u;
const NOT_A_NUMBER = 4u;

fn is_odd(bits: u32) -> bool {
    return (bits & 0x7F800000u) == 0x7F800000u;
}

// What the product of two numbers is of which one is not finite.
fn odd_product(a: u32, b: u32) -> u32 {
    let no_nan = (a & 0x7FFFFFFFu) <= 0x7F800000u && (b & 0x7FFFFFFFu) <= 0x7F800000u;
    let no_zero = (a & 0x7FFFFFFFu) != 0u && (b & 0x7FFFFFFFu) != 0u;
    if (no_nan && no_zero) {
        return select(POSITIVE, NEGATIVE, ((a ^ b) >> 31u) != 0u);
    }
    return NOT_A_NUMBER;
}

// The bits of a sum of such numbers.
fn odd_sum(parts: u32) -> u32 {
    if (parts == POSITIVE) {
        return 0x7F800000u;
    }
    return select(0x7FC00000u, 0xFF800000u, parts == NEGATIVE);
}

fn odd_logit(run: Run, place: Place) -> u32 {
    var sum = 0.0;
    var parts = 0u; // of the sum
    for (var head = 0u; head < HEADS; head++) {
        var score = 0.0;
        var score_parts = 0u;
        for (var i = 0u; i < 128u; i++) {
            let k = bits_of_key(key_oct(place.at, i / 8u), i % 8u);
            let x = bits_of_query(query_oct(run.token, head, i / 8u), i % 8u);
            if (is_odd(k) || is_odd(x)) {
                score_parts |= odd_product(k, x);
            } else {
                score += bitcast<f32>(k) * bitcast<f32>(x);
            }
        }
        let weight = weight_of(run.token, head);
        // relu leaves 0 of -inf.
        var relu = bitcast<u32>(max(score, 0.0));
        if (score_parts != 0u) {
            relu = select(odd_sum(score_parts), 0u, score_parts == NEGATIVE);
        }
        if (is_odd(relu) || is_odd(bitcast<u32>(weight))) {
            parts |= odd_product(relu, bitcast<u32>(weight));
        } else {
            sum += weight * bitcast<f32>(relu);
        }
    }
    let scale = key_scale(place.scale);
    if (parts == 0u && !is_odd(bitcast<u32>(scale))) {
        return bitcast<u32>(scale * sum);
    }
    return odd_sum(odd_product(select(odd_sum(parts), bitcast<u32>(sum), parts == 0u), bitcast<u32>(scale)));
}
