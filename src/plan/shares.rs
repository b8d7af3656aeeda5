//! Which rank holds which token of a sequence that is sharded over several devices: context parallelism. Pure.
//!
//! Tokens are dealt out in blocks of `interleave` tokens, by a pattern of ranks that repeats. A rank keeps its tokens in their order, in
//! pages of its own: token `t` of the whole is token `local_index(t)` of rank `owner(t)`.

mod batch;
mod top_k;

use std::ops::Range;

use crate::base::error::{Error, Result};

/// Blocks in a pattern, and so ranks, at most.
const MAX_BLOCKS: u64 = 1 << 16;

/// Which rank holds which token: vLLM's decode context parallelism (`dcp_size` and `cp_kv_cache_interleave_size`), and uneven shares.
///
/// ```
/// use wgpu_mla::Shares;
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // Tokens 0 to 6 over two ranks, two in a row: rank 0 has 0, 1, 4, 5 and rank 1 has 2, 3, 6.
/// let shares = Shares::even(2, 2)?;
/// assert_eq!((shares.owner(4), shares.local_index(4)), (0, 2));
/// assert_eq!((shares.local_len(0, 7)?, shares.local_len(1, 7)?), (4, 3));
/// // Two query tokens see 6 and 7 tokens of the whole.
/// assert_eq!(shares.local_bounds(1, &[7], &[0, 2])?, [2, 3]);
///
/// // Seven tenths, two tenths and one tenth.
/// let uneven = Shares::weighted(&[7, 2, 1], 16)?;
/// assert_eq!(uneven.local_seq_lens(0, &[1600])?, [1120]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shares {
    interleave: u32,
    /// `[blocks]`: the rank that holds each block of the pattern.
    owners: Vec<u32>,
    /// `[blocks]`: how many blocks before it, in the pattern, are the same rank's.
    before: Vec<u32>,
    /// `[blocks]`: those of rank 0 in their order, then rank 1's, ...
    by_rank: Vec<u32>,
    /// `[world + 1]`: where each rank's begin in `by_rank`.
    begins: Vec<u32>,
}

/// One rank's share, as `BatchTables` on a device takes it. A pattern without blocks means that the rank holds all tokens.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub interleave: u32,
    /// Blocks of the rank in the pattern.
    pub owned: u32,
    /// `[blocks]`: twice the number of the rank's blocks before it, plus 1 where it is the rank's.
    pub marks: Vec<u32>,
}

impl Shares {
    /// Equal shares: token `t` is rank `(t / interleave) % world`'s.
    ///
    /// # Errors
    /// [`Error::Shape`] for no rank, more than 65,536, or an interleave of 0.
    pub fn even(world: u32, interleave: u32) -> Result<Self> {
        if world == 0 || u64::from(world) > MAX_BLOCKS {
            let cure = "must be from 1 to 65,536 ranks";
            return Err(Error::Shape { what: "world", got: world.into(), cure });
        }
        Self::weighted(&vec![1; world as usize], interleave)
    }

    /// Shares in proportion to `weights`, one a rank: as for a fast and a slow device. A rank of weight 0 holds nothing.
    ///
    /// The pattern has as many blocks as the weights add up to, without their common factor, spread evenly. Equal weights give exactly
    /// [`Shares::even`].
    ///
    /// # Errors
    /// [`Error::Shape`] for no rank, weights that are all 0 or that add up to more than 65,536, or an interleave of 0.
    pub fn weighted(weights: &[u32], interleave: u32) -> Result<Self> {
        let bad = |what, got, cure| Err(Error::Shape { what, got, cure });
        if interleave == 0 {
            return bad("interleave", 0, "must be at least 1 token");
        }
        if weights.is_empty() {
            return bad("world", 0, "must be from 1 to 65,536 ranks");
        }
        if weights.len() as u64 > MAX_BLOCKS {
            return bad("world", weights.len() as u64, "must be from 1 to 65,536 ranks");
        }
        let factor = weights.iter().copied().fold(0, common_factor);
        if factor == 0 {
            return bad("the sum of the weights", 0, "give at least one rank a weight above 0");
        }
        let weights: Vec<u64> = weights.iter().map(|&weight| u64::from(weight / factor)).collect();
        let blocks: u64 = weights.iter().sum();
        if blocks > MAX_BLOCKS {
            let cure = "must be at most 65,536 without a common factor: use smaller weights of about the same proportion";
            return bad("the sum of the weights", blocks, cure);
        }
        Ok(Self::of_weights(&weights, interleave))
    }

    /// Block `k` of a rank of weight `w` is due at `(k + 1/2) / w` of the pattern; ties go to the lower rank.
    fn of_weights(weights: &[u64], interleave: u32) -> Self {
        let due = |rank: usize| (0..weights[rank]).map(move |k| (2 * k + 1, rank));
        let mut order: Vec<(u64, usize)> = (0..weights.len()).flat_map(due).collect();
        order.sort_by(|&(a, r), &(b, s)| (a * weights[s], r).cmp(&(b * weights[r], s)));
        let owners: Vec<u32> = order.iter().map(|&(_, rank)| rank as u32).collect();

        let mut held = vec![0; weights.len()];
        let mut before = Vec::with_capacity(owners.len());
        for &owner in &owners {
            before.push(held[owner as usize]);
            held[owner as usize] += 1;
        }
        let mut by_rank: Vec<u32> = (0..owners.len() as u32).collect();
        by_rank.sort_by_key(|&block| owners[block as usize]);
        let mut begins = vec![0];
        begins.extend(held.iter().scan(0, |end, &held| {
            *end += held;
            Some(*end)
        }));
        Self { interleave, owners, before, by_rank, begins }
    }

    /// Ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.begins.len() as u32 - 1
    }

    /// Tokens in a block.
    #[must_use]
    pub fn interleave(&self) -> u32 {
        self.interleave
    }

    /// The rank that holds a token of the whole.
    #[must_use]
    pub fn owner(&self, token: u32) -> u32 {
        let block = token / self.interleave;
        self.owners[block as usize % self.owners.len()]
    }

    /// A token's index among those that its owner holds.
    #[must_use]
    pub fn local_index(&self, token: u32) -> u32 {
        let (block, place) = (token / self.interleave, token % self.interleave);
        let (turn, block) = (block / self.period(), block % self.period());
        let owned = self.blocks_of(self.owners[block as usize]).len() as u32;
        // At most `token`, as are all its parts.
        (turn * owned + self.before[block as usize]) * self.interleave + place
    }

    /// The token of the whole that is the `index`th of a rank: the inverse of [`Shares::owner`] and [`Shares::local_index`].
    ///
    /// # Errors
    /// [`Error::Shape`] for a rank that there is not, that holds nothing, or whose token of that index is past 2^32.
    pub fn token(&self, rank: u32, index: u32) -> Result<u32> {
        self.check(rank)?;
        let blocks = self.blocks_of(rank);
        let (block, place) = (index / self.interleave, index % self.interleave);
        let token = blocks.get((block as usize).checked_rem(blocks.len()).unwrap_or(0)).map(|&at| {
            let turn = u64::from(block) / blocks.len() as u64;
            (turn * u64::from(self.period()) + u64::from(at)) * u64::from(self.interleave) + u64::from(place)
        });
        let cure = "must be a token that the rank holds: below its local_len";
        let past = Error::Shape { what: "index of a rank's token", got: index.into(), cure };
        token.and_then(|token| u32::try_from(token).ok()).ok_or(past)
    }

    /// How many of the first `len` tokens of the whole a rank holds.
    ///
    /// # Errors
    /// [`Error::Shape`] for a rank that there is not.
    pub fn local_len(&self, rank: u32, len: u32) -> Result<u32> {
        self.check(rank)?;
        Ok(self.count(rank, len))
    }

    /// A rank's own tokens of the `tokens` tokens from `begin` on, in its own count: what it gathers of a chunk of a sequence.
    ///
    /// # Errors
    /// [`Error::Shape`] for a rank that there is not.
    pub fn local_range(&self, rank: u32, begin: u32, tokens: u32) -> Result<Range<u32>> {
        self.check(rank)?;
        Ok(self.count(rank, begin)..self.count(rank, begin.saturating_add(tokens)))
    }

    /// The most tokens that a rank holds of the `tokens` tokens from `begin` on: rows of its part where all ranks lay theirs out alike.
    #[must_use]
    pub fn padded_len(&self, begin: u32, tokens: u32) -> u32 {
        let end = begin.saturating_add(tokens);
        let held = |rank| self.count(rank, end) - self.count(rank, begin);
        (0..self.world()).map(held).max().unwrap_or(0)
    }

    /// How many of the first `len` tokens each rank holds.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn counts(&self, len: u32) -> impl Iterator<Item = u32> {
        (0..self.world()).map(move |rank| self.count(rank, len))
    }

    /// For each block of the pattern its owner, and how many of the owner's blocks are before it; then for each rank how many blocks it
    /// has.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn blocks(&self) -> (&[u32], &[u32], impl Iterator<Item = u32>) {
        (&self.owners, &self.before, (0..self.world()).map(|rank| self.blocks_of(rank).len() as u32))
    }

    /// Everything in which two shares can differ.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        [self.world(), self.interleave].into_iter().chain(self.owners.iter().copied()).map(u64::from)
    }

    /// What a device needs to count a rank's tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] for a rank that there is not.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn pattern(&self, rank: u32) -> Result<Pattern> {
        self.check(rank)?;
        let mut held = 0;
        let marks = self.owners.iter().map(|&owner| {
            let mark = 2 * held + u32::from(owner == rank);
            held += u32::from(owner == rank);
            mark
        });
        let marks = marks.collect();
        Ok(Pattern { interleave: self.interleave, owned: held, marks })
    }

    /// Blocks of the pattern.
    pub(crate) fn period(&self) -> u32 {
        self.owners.len() as u32
    }

    /// A rank's blocks of the pattern, in their order.
    fn blocks_of(&self, rank: u32) -> &[u32] {
        let rank = rank as usize;
        &self.by_rank[self.begins[rank] as usize..self.begins[rank + 1] as usize]
    }

    /// How many of the first `len` tokens a rank holds; `rank` is below the world.
    fn count(&self, rank: u32, len: u32) -> u32 {
        let blocks = self.blocks_of(rank);
        let (whole, rest) = (len / self.interleave, len % self.interleave);
        let (turn, block) = (whole / self.period(), whole % self.period());
        let owned = turn * blocks.len() as u32 + blocks.partition_point(|&at| at < block) as u32;
        // At most `len`, as are all its parts.
        owned * self.interleave + if self.owners[block as usize] == rank { rest } else { 0 }
    }

    /// # Errors
    /// [`Error::Shape`] for a rank that there is not.
    fn check(&self, rank: u32) -> Result<()> {
        if rank >= self.world() {
            let cure = "must be below the world of these shares";
            return Err(Error::Shape { what: "rank", got: rank.into(), cure });
        }
        Ok(())
    }
}

/// Greatest common divisor; that with 0 is the other.
fn common_factor(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Even and uneven ones.
    pub fn all() -> Vec<Shares> {
        let mut all = Vec::new();
        for interleave in [1, 2, 3, 16, 64] {
            for world in 1..=8 {
                all.push(Shares::even(world, interleave).unwrap());
            }
            for weights in [&[7, 2, 1][..], &[3, 1], &[1, 0, 2], &[0, 0, 5], &[40, 60, 100], &[5, 5, 5, 4]] {
                all.push(Shares::weighted(weights, interleave).unwrap());
            }
        }
        all
    }

    #[test]
    fn even_shares_are_the_formula() {
        for (world, interleave) in [(1, 1), (2, 1), (3, 16), (5, 7), (8, 4)] {
            let shares = Shares::even(world, interleave).unwrap();
            assert_eq!((shares.world(), shares.interleave()), (world, interleave));
            for token in 0..500 {
                assert_eq!(shares.owner(token), token / interleave % world);
            }
            assert_eq!(shares, Shares::weighted(&vec![6; world as usize], interleave).unwrap());
        }
    }

    #[test]
    fn counts_are_those_of_a_loop() {
        for shares in all() {
            let mut held = vec![0; shares.world() as usize];
            for token in 0..1500 {
                for (rank, &held) in held.iter().enumerate() {
                    assert_eq!(shares.local_len(rank as u32, token).unwrap(), held, "{shares:?} {token}");
                }
                let owner = shares.owner(token);
                let index = &mut held[owner as usize];
                assert_eq!(shares.local_index(token), *index, "{shares:?} {token}");
                assert_eq!(shares.token(owner, *index).unwrap(), token, "{shares:?}");
                *index += 1;
            }
        }
    }

    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    #[test]
    fn a_device_counts_the_same_from_a_pattern() {
        for shares in all() {
            for rank in 0..shares.world() {
                let Pattern { interleave, owned, marks } = shares.pattern(rank).unwrap();
                for len in (0..2000).chain([1 << 30, i32::MAX as u32]) {
                    let (whole, rest) = (len / interleave, len % interleave);
                    let (turn, block) = (whole / marks.len() as u32, whole % marks.len() as u32);
                    let mark = marks[block as usize];
                    let got = (turn * owned + mark / 2) * interleave + if mark & 1 == 1 { rest } else { 0 };
                    assert_eq!(got, shares.local_len(rank, len).unwrap());
                }
            }
        }
    }

    #[test]
    fn weighted_shares_are_even_at_every_length() {
        let weights = [7, 2, 1];
        let shares = Shares::weighted(&weights, 1).unwrap();
        for len in 0..1000 {
            for (rank, weight) in weights.into_iter().enumerate() {
                let due = f64::from(len) * f64::from(weight) / 10.0;
                let got = f64::from(shares.local_len(rank as u32, len).unwrap());
                assert!((got - due).abs() <= 1.0, "{got} of {len} for a weight of {weight}");
            }
        }
    }

    #[test]
    fn nothing_overflows_up_to_2_to_31_tokens() {
        let most = i32::MAX as u32;
        for interleave in [1, 16, 1 << 20, u32::MAX] {
            for shares in [
                Shares::even(8, interleave).unwrap(),
                Shares::even(65_536, interleave).unwrap(),
                Shares::weighted(&[60_000, 1], interleave).unwrap(),
                Shares::weighted(&[u32::MAX, u32::MAX], interleave).unwrap(),
            ] {
                let world = shares.world();
                let total: u64 =
                    (0..world).map(|rank| u64::from(shares.local_len(rank, most).unwrap())).sum();
                assert_eq!(total, u64::from(most));
                let owner = shares.owner(most - 1);
                assert_eq!(shares.token(owner, shares.local_index(most - 1)), Ok(most - 1));
                // Past 2^32 or not: no panic.
                let _ = shares.token(owner, u32::MAX);
            }
        }
    }

    #[test]
    fn every_refusal_names_its_cure() {
        let text = |result: Result<Shares>| result.expect_err("refused").to_string();
        assert_eq!(text(Shares::even(0, 1)), "world 0: must be from 1 to 65,536 ranks");
        assert_eq!(text(Shares::even(70_000, 1)), "world 70000: must be from 1 to 65,536 ranks");
        assert_eq!(text(Shares::even(2, 0)), "interleave 0: must be at least 1 token");
        assert_eq!(text(Shares::weighted(&[], 1)), "world 0: must be from 1 to 65,536 ranks");
        assert!(text(Shares::weighted(&[0, 0], 1)).contains("at least one rank a weight above 0"));
        assert!(text(Shares::weighted(&[u32::MAX, 1], 1)).contains("smaller weights"));
        let shares = Shares::weighted(&[3, 0], 4).unwrap();
        assert!(shares.local_len(2, 7).unwrap_err().to_string().contains("rank 2: must be below the world"));
        assert!(shares.token(1, 0).unwrap_err().to_string().contains("below its local_len"));
    }
}
