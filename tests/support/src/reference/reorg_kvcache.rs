//! Tokens of ranks, back in their order.

/// Consecutive tokens of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    /// First token.
    pub begin: usize,
    /// Tokens.
    pub tokens: usize,
    /// Row of the first of each rank's tokens, in its part.
    pub local_row: usize,
    /// Row of the first token in the output.
    pub out_row: usize,
}

/// Copies rows of `parts`, one a rank, to `out`: each token from the rank that owns it, whose rows are its own tokens in their order.
///
/// # Panics
/// Where a part or `out` is shorter than the chunks say.
pub fn reorg_kvcache<T: Copy>(
    owner: impl Fn(usize) -> usize,
    parts: &[Vec<T>],
    chunks: &[Chunk],
    out: &mut [T],
) {
    for chunk in chunks {
        let mut next = vec![chunk.local_row; parts.len()];
        for t in 0..chunk.tokens {
            let rank = owner(chunk.begin + t);
            out[chunk.out_row + t] = parts[rank][next[rank]];
            next[rank] += 1;
        }
    }
}
