//! A rank's part of a batch: what it decodes, and what it appends.

use std::ops::Range;

use super::Shares;
use crate::base::error::{Error, Result};
use crate::base::memory::{self, collected};

impl Shares {
    /// The lengths of a rank's parts of a batch's sequences, its new tokens included: `seq_lens` of that rank's decode.
    ///
    /// # Errors
    /// [`Error::Shape`] for a rank that there is not, [`Error::SeqLen`] for a negative length, [`Error::OutOfMemory`].
    pub fn local_seq_lens(&self, rank: u32, seq_lens: &[i32]) -> Result<Vec<i32>> {
        self.check(rank)?;
        // A part is no longer than the whole.
        let mut local = memory::room_for(seq_lens.len(), SEQUENCES)?;
        for (seq, &len) in seq_lens.iter().enumerate() {
            local.push(self.count(rank, length(seq, len)?) as i32);
        }
        Ok(local)
    }

    /// How many of a rank's tokens each query token sees, for [`Mask::Bounds`](crate::Mask::Bounds) with [`Shares::local_seq_lens`].
    ///
    /// The bound is the causal one of the whole, bottom-right: query `i` of `q_len` sees the first `seq_len - q_len + i + 1` tokens,
    /// whoever holds them.
    ///
    /// # Errors
    /// The errors of [`Shares::local_seq_lens`], and [`Error::Length`] and [`Error::QueryStartLoc`]; [`Error::Limit`] for more than 2^27
    /// query tokens, which no [`Plan`](crate::Plan) has, and [`Error::OutOfMemory`].
    pub fn local_bounds(&self, rank: u32, seq_lens: &[i32], query_start_loc: &[i32]) -> Result<Vec<u32>> {
        self.check(rank)?;
        let all = Queries::of(seq_lens, query_start_loc)?;
        let mut bounds = room_for(query_start_loc)?;
        for queries in all {
            bounds.extend(queries.positions().map(|position| match position {
                Some(position) => self.count(rank, position + 1),
                None => 0,
            }));
        }
        Ok(bounds)
    }

    /// Which of a step's new tokens a rank appends: for each sequence the range of its own tokens, in its own count. They begin where the
    /// rank's part ended before the step, so that they are what [`PagePool::append`](crate::PagePool::append) gives for as many tokens.
    ///
    /// # Errors
    /// The errors of [`Shares::local_bounds`].
    pub fn local_appends(
        &self,
        rank: u32,
        seq_lens: &[i32],
        query_start_loc: &[i32],
    ) -> Result<Vec<Range<u32>>> {
        self.check(rank)?;
        let range = |queries: Queries| {
            let old = queries.seq_len.saturating_sub(queries.q_len);
            self.count(rank, old)..self.count(rank, queries.seq_len)
        };
        collected(Queries::of(seq_lens, query_start_loc)?.into_iter().map(range), seq_lens.len(), SEQUENCES)
    }

    /// The `slot_mapping` of a rank, an entry for each query token: -1 where another rank holds it. `slots` are those of its own tokens,
    /// as its pool's [`PagePool::slot_mapping`](crate::PagePool::slot_mapping) gives them for [`Shares::local_appends`].
    ///
    /// # Errors
    /// The errors of [`Shares::local_bounds`], and [`Error::Length`] for another number of slots than the rank appends.
    pub fn slot_mapping(
        &self,
        rank: u32,
        seq_lens: &[i32],
        query_start_loc: &[i32],
        slots: &[i64],
    ) -> Result<Vec<i64>> {
        self.check(rank)?;
        let all = Queries::of(seq_lens, query_start_loc)?;
        let mut mine: Vec<bool> = room_for(query_start_loc)?;
        for queries in all {
            let own = |position: Option<u32>| position.is_some_and(|token| self.owner(token) == rank);
            mine.extend(queries.positions().map(own));
        }
        let want = mine.iter().filter(|&&own| own).count() as u64;
        if slots.len() as u64 != want {
            let cure = "give the slots of the tokens that this rank appends, as PagePool::slot_mapping makes them for local_appends";
            return Err(Error::Length { what: "slots", got: slots.len() as u64, want, cure });
        }
        let mut slots = slots.iter();
        let tokens = mine.len();
        let slots = mine.into_iter().map(|own| if own { slots.next().copied().unwrap_or(-1) } else { -1 });
        collected(slots, tokens, "a slot_mapping")
    }
}

const SEQUENCES: &str = "sequences of a batch";

/// The most query tokens of a step.
const MOST_QUERIES: u64 = 1 << 27;

/// An array with room for an entry a query token.
///
/// # Errors
/// [`Error::Limit`] and [`Error::OutOfMemory`].
fn room_for<T>(query_start_loc: &[i32]) -> Result<Vec<T>> {
    let need = query_start_loc.last().map_or(0, |&end| u64::from(end.max(0).unsigned_abs()));
    let (what, cure) = ("query tokens of a batch", "use a smaller batch");
    if need > MOST_QUERIES {
        return Err(Error::Limit { what, need, limit: MOST_QUERIES, cure });
    }
    let mut array = Vec::new();
    array.try_reserve_exact(need as usize).map_err(|_| Error::OutOfMemory { what })?;
    Ok(array)
}

/// # Errors
/// [`Error::SeqLen`].
fn length(seq: usize, len: i32) -> Result<u32> {
    let (max, cure) = (i32::MAX.into(), "count the tokens of the whole sequence, new ones included");
    u32::try_from(len).map_err(|_| Error::SeqLen { seq, got: len.into(), max, cure })
}

/// A sequence's query tokens.
#[derive(Debug, Clone, Copy)]
struct Queries {
    seq_len: u32,
    q_len: u32,
}

impl Queries {
    /// # Errors
    /// [`Error::Length`], [`Error::QueryStartLoc`] and [`Error::SeqLen`].
    fn of(seq_lens: &[i32], query_start_loc: &[i32]) -> Result<Vec<Self>> {
        let (got, want) = (query_start_loc.len() as u64, seq_lens.len() as u64 + 1);
        if got != want {
            let cure = "give one entry more than seq_lens has";
            return Err(Error::Length { what: "query_start_loc", got, want, cure });
        }
        if let Some(&first) = query_start_loc.first().filter(|&&first| first != 0) {
            return Err(Error::QueryStartLoc { index: 0, got: first.into() });
        }
        let mut all = memory::room_for(seq_lens.len(), SEQUENCES)?;
        for (seq, (&len, ends)) in seq_lens.iter().zip(query_start_loc.windows(2)).enumerate() {
            let (begin, end) = (ends[0], ends[1]);
            if end < begin {
                return Err(Error::QueryStartLoc { index: seq + 1, got: end.into() });
            }
            // Both are at least 0.
            all.push(Self { seq_len: length(seq, len)?, q_len: end.abs_diff(begin) });
        }
        Ok(all)
    }

    /// The position of each query token in its sequence; `None` before the first key, where there are more query tokens than tokens.
    fn positions(self) -> impl Iterator<Item = Option<u32>> {
        (0..self.q_len).map(move |i| (self.seq_len + i).checked_sub(self.q_len))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::all;
    use super::*;

    #[test]
    fn bounds_are_those_of_the_whole() {
        let (lens, starts) = ([9, 2, 0, 5, 4], [0, 4, 8, 9, 9, 10]);
        for shares in all() {
            for rank in 0..shares.world() {
                let held = |tokens: i64| {
                    (0..tokens.max(0) as u32).filter(|&t| shares.owner(t) == rank).count() as u32
                };
                let mut want = Vec::new();
                for (seq, &len) in lens.iter().enumerate() {
                    let q_len = i64::from(starts[seq + 1] - starts[seq]);
                    want.extend((0..q_len).map(|i| held(i64::from(len) - q_len + i + 1)));
                }
                assert_eq!(shares.local_bounds(rank, &lens, &starts).unwrap(), want);
                let local: Vec<i32> = lens.iter().map(|&len| held(len.into()) as i32).collect();
                assert_eq!(shares.local_seq_lens(rank, &lens).unwrap(), local);
                let appends = shares.local_appends(rank, &lens, &starts).unwrap();
                for (seq, range) in appends.iter().enumerate() {
                    let q_len = i64::from(starts[seq + 1] - starts[seq]);
                    assert_eq!(*range, held(i64::from(lens[seq]) - q_len)..held(lens[seq].into()));
                }
            }
        }
    }

    #[test]
    fn each_new_token_is_appended_by_one_rank() {
        let (lens, starts) = ([9, 2, 0, 5, 4], [0, 4, 8, 9, 9, 10]);
        for shares in all() {
            let mut times = [0; 10];
            for rank in 0..shares.world() {
                let appends = shares.local_appends(rank, &lens, &starts).unwrap();
                let count: u32 = appends.iter().map(|range| range.end - range.start).sum();
                let slots: Vec<i64> = (0..count.into()).map(|slot| slot + 100).collect();
                let mapping = shares.slot_mapping(rank, &lens, &starts, &slots).unwrap();
                let used: Vec<i64> = mapping.iter().copied().filter(|&slot| slot >= 0).collect();
                assert_eq!(used, slots);
                times.iter_mut().zip(&mapping).for_each(|(times, &slot)| *times += i32::from(slot >= 0));
                assert!(shares.slot_mapping(rank, &lens, &starts, &[slots, vec![1]].concat()).is_err());
            }
            // Two query tokens of the second sequence come before its first token, and the third has no query tokens.
            assert_eq!(times, [1, 1, 1, 1, 0, 0, 1, 1, 0, 1]);
        }
    }

    #[test]
    fn every_refusal_names_its_cure() {
        let shares = Shares::weighted(&[3, 0], 4).unwrap();
        assert!(matches!(shares.local_seq_lens(0, &[4, -1]), Err(Error::SeqLen { seq: 1, got: -1, .. })));
        assert!(matches!(shares.local_bounds(0, &[4], &[0]), Err(Error::Length { got: 1, want: 2, .. })));
        for (starts, at) in [([1, 2], 0), ([0, -1], 1)] {
            let error = shares.local_bounds(0, &[4], &starts).expect_err("refused");
            assert!(matches!(error, Error::QueryStartLoc { index, .. } if index == at), "{error}");
        }
    }
}
