//! New inputs from old ones.

use mla_support::paint::Rng;

/// Bytes that comparisons and lengths turn on.
const EDGES: [u8; 10] = [0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF, b'"', b'9', b'-'];

/// Changes an input in a few places, or joins it with `other`; the result has at most `longest` bytes.
#[must_use]
pub fn mutated(rng: &mut Rng, input: &[u8], other: &[u8], longest: usize) -> Vec<u8> {
    let mut bytes = input.to_vec();
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
            5 => bytes.truncate(at.max(bytes.len() / 2)),
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
