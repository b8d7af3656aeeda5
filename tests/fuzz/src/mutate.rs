//! New inputs from old ones.

use mla_support::paint::Rng;

/// Bytes that comparisons and lengths turn on.
const EDGES: [u8; 10] = [0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF, b'"', b'9', b'-'];

/// What a number or another value of a JSON text is replaced by.
const VALUES: [&str; 16] = [
    "0",
    "1",
    "-1",
    "3",
    "1e999",
    "1e-320",
    "0.5",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "16777216",
    "null",
    "true",
    "[]",
    "{}",
    "\"\\ud800\"",
];

/// Replaces the run of digits at or behind `at`.
fn replace_value(rng: &mut Rng, bytes: &mut Vec<u8>, at: usize) {
    let is_digit = |byte: &u8| byte.is_ascii_digit() || *byte == b'.';
    let Some(begin) = bytes[at..].iter().position(is_digit).map(|found| at + found) else { return };
    let end =
        bytes[begin..].iter().position(|byte| !is_digit(byte)).map_or(bytes.len(), |found| begin + found);
    bytes.splice(begin..end, VALUES[rng.below(VALUES.len())].bytes());
}

/// Changes an input in a few places, or joins it with `other`; the result has at most `longest` bytes.
#[must_use]
pub fn mutated(rng: &mut Rng, input: &[u8], other: &[u8], longest: usize) -> Vec<u8> {
    let mut bytes = input.to_vec();
    // A text of JSON is mostly kept one: another change breaks it at once.
    if input.contains(&b'{') && rng.below(2) == 0 {
        for _ in 0..1 + rng.below(3) {
            let at = rng.below(bytes.len());
            replace_value(rng, &mut bytes, at);
        }
        bytes.truncate(longest);
        return bytes;
    }
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(bytes.len() + 1);
        let end = (at + 1 + rng.below(16)).min(bytes.len());
        match rng.below(10) {
            0 => {
                bytes.drain(at.min(end)..end);
            }
            1 => {
                let new = (0..1 + rng.below(16)).map(|_| rng.next() as u8).collect::<Vec<_>>();
                bytes.splice(at..at, new);
            }
            // A part of another input, in place or between.
            2 | 3 if !other.is_empty() => {
                let from = rng.below(other.len());
                let part = &other[from..(from + 1 + rng.below(64)).min(other.len())];
                let end = if rng.below(2) == 0 { at } else { (at + part.len()).min(bytes.len()) };
                bytes.splice(at..end, part.iter().copied());
            }
            // Twice.
            4 => {
                let part = bytes[at.min(end)..end].to_vec();
                bytes.splice(at..at, part);
            }
            5 if rng.below(4) == 0 => bytes.truncate(at.max(bytes.len() / 2)),
            5 | 6 if input.contains(&b'{') => replace_value(rng, &mut bytes, at),
            _ => match bytes.get_mut(at) {
                Some(byte) => {
                    *byte = match rng.below(4) {
                        0 => EDGES[rng.below(EDGES.len())],
                        1 => *byte ^ 1 << rng.below(8),
                        2 => byte.wrapping_add(rng.below(9) as u8).wrapping_sub(4),
                        _ => rng.next() as u8,
                    }
                }
                None => bytes.push(rng.next() as u8),
            },
        }
    }
    bytes.truncate(longest);
    bytes
}

/// An input of its own.
#[must_use]
pub fn fresh(rng: &mut Rng, longest: usize) -> Vec<u8> {
    let most = if rng.below(4) == 0 { longest } else { longest.min(256) };
    let count = 1 + rng.below(most);
    // Many zeros are many plain choices.
    let zeros = rng.below(3) as u64 * 64;
    let mut byte = || {
        let bits = rng.next();
        if bits & 0xFF < zeros { 0 } else { (bits >> 8) as u8 }
    };
    (0..count).map(|_| byte()).collect()
}
