//! From sequences to tiles of query rows: the work list that every backend follows, for each head.

use super::PrefillSequence;
use crate::base::error::{Error, Result};

/// The most tiles of a step: with 16 query tokens of 8 elements each, the least there can be, their queries are 4 GB.
const MOST_TILES: u64 = 1 << 24;

/// Consecutive query tokens of one sequence, and the keys that any of them sees. One workgroup does it for one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillTile {
    /// First query token.
    pub first_token: u32,
    /// Query tokens, at most what a workgroup takes.
    pub num_rows: u32,
    /// First key.
    pub kv_begin: u32,
    /// Keys that the last row sees; the others see no more.
    pub num_keys: u32,
    /// Row `i` sees the first `clamp(first_visible + i, 0, num_keys)`.
    pub first_visible: i32,
    /// Row of the output of the first query token.
    pub first_row: u32,
}

/// Words of a tile in a table.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) const TILE_WORDS: u32 = 6;

impl PrefillTile {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn words(&self) -> [u32; TILE_WORDS as usize] {
        let Self { first_token, num_rows, kv_begin, num_keys, first_visible, first_row } = *self;
        [first_token, num_rows, kv_begin, num_keys, first_visible as u32, first_row]
    }

    /// Keys that a row sees.
    pub(crate) fn visible(&self, row: u32) -> u32 {
        (i64::from(self.first_visible) + i64::from(row)).clamp(0, self.num_keys.into()) as u32
    }
}

/// Cuts sequences into tiles of up to `rows` rows. Those with the most keys come first, so that a device ends on short ones.
///
/// # Errors
/// [`Error::Limit`] and [`Error::OutOfMemory`].
pub(crate) fn tiles(sequences: &[PrefillSequence], rows: u32) -> Result<Vec<PrefillTile>> {
    let need = sequences.iter().map(|sequence| u64::from(sequence.q_len.div_ceil(rows))).sum::<u64>();
    if need > MOST_TILES {
        let (what, cure) = ("tiles of a prefill", "attend fewer query tokens a step");
        return Err(Error::Limit { what, need, limit: MOST_TILES, cure });
    }
    let mut all = Vec::new();
    let out_of_memory = |_| Error::OutOfMemory { what: "a prefill's tiles" };
    all.try_reserve_exact(need as usize).map_err(out_of_memory)?;
    for sequence in sequences {
        let mut begin = 0;
        while begin < sequence.q_len {
            let num_rows = rows.min(sequence.q_len - begin);
            let num_keys = sequence.visible(i64::from(begin) + i64::from(num_rows) - 1);
            let first = sequence.mask.first(sequence.q_len, sequence.kv_len).saturating_add(begin.into());
            all.push(PrefillTile {
                first_token: sequence.q_begin + begin,
                num_rows,
                kv_begin: sequence.kv_begin,
                num_keys,
                // Below -rows no row sees a key, and from num_keys on each sees all.
                first_visible: first.clamp(-i64::from(rows), num_keys.into()) as i32,
                first_row: sequence.out_begin + begin,
            });
            begin += num_rows;
        }
    }
    // An unstable sort needs no memory; with the query token the order is total.
    all.sort_unstable_by_key(|tile| (std::cmp::Reverse(tile.num_keys), tile.first_token));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::super::PrefillExtent;
    use super::*;
    use crate::base::mask::Mask;

    /// Every query is in one tile, which says of it what its sequence says.
    #[test]
    fn tiles_say_what_sequences_say() {
        let mut sequences = Vec::new();
        let (mut q_begin, mut kv_begin) = (3, 5);
        for (q_len, kv_len) in [(1, 1), (0, 9), (100, 100), (64, 3), (7, 0), (33, 200), (65, 64)] {
            let last = i64::from(kv_len) - i64::from(q_len) + 1;
            for first in [None, Some(last), Some(1), Some(-40), Some(500), Some(i64::MIN), Some(i64::MAX)] {
                let mask = first.map_or(Mask::Full, Mask::CausalFrom);
                let out_begin = q_begin;
                sequences.push(PrefillSequence { q_begin, q_len, kv_begin, kv_len, mask, out_begin });
                q_begin += q_len + 2;
                kv_begin += kv_len;
            }
        }
        let extent = PrefillExtent::of(&sequences).unwrap();
        for rows in [1, 16, 64] {
            let tiles = tiles(&sequences, rows).unwrap();
            assert!(tiles.is_sorted_by_key(|tile| std::cmp::Reverse(tile.num_keys)));
            let mut seen = vec![None; extent.tokens as usize];
            for tile in &tiles {
                assert!((1..=rows).contains(&tile.num_rows) && tile.first_row == tile.first_token);
                assert!(tile.num_keys == 0 || tile.kv_begin + tile.num_keys <= extent.keys);
                for row in 0..tile.num_rows {
                    let old =
                        seen[(tile.first_token + row) as usize].replace((tile.kv_begin, tile.visible(row)));
                    assert_eq!(old, None);
                }
            }
            for sequence in &sequences {
                for i in 0..sequence.q_len {
                    let want = Some((sequence.kv_begin, sequence.visible(i.into())));
                    assert_eq!(seen[(sequence.q_begin + i) as usize].take(), want, "{sequence:?} {i}");
                }
            }
            assert!(seen.iter().all(Option::is_none));
        }
    }

    /// The parts of a sequence see together what it sees.
    #[test]
    fn parts_of_keys_are_all_keys() {
        for (q_len, kv_len) in [(1, 0), (3, 5), (9, 64), (64, 8192), (70, 1000)] {
            for whole in
                [PrefillSequence::full(2, q_len, 7, kv_len), PrefillSequence::causal(2, q_len, 7, kv_len)]
            {
                for num_parts in [1, 2, 7, 16] {
                    let parts: Vec<_> = whole.split_keys(num_parts, 100).collect();
                    assert_eq!(parts.len(), num_parts as usize);
                    assert!(PrefillExtent::of(&parts).is_ok());
                    let mut kv_begin = 7;
                    for (i, part) in parts.iter().enumerate() {
                        assert_eq!((part.kv_begin, part.out_begin), (kv_begin, 2 + 100 * i as u32));
                        assert!(part.kv_len.is_multiple_of(64) || kv_begin + part.kv_len == 7 + kv_len);
                        kv_begin += part.kv_len;
                    }
                    assert_eq!(kv_begin, 7 + kv_len);
                    for i in 0..i64::from(q_len) {
                        assert_eq!(parts.iter().map(|part| part.visible(i)).sum::<u32>(), whole.visible(i));
                    }
                }
            }
        }
    }

    #[test]
    fn sequences_that_share_rows_are_refused() {
        let one = PrefillSequence::causal(0, 8, 0, 8);
        let empty = PrefillSequence { out_begin: 4, q_len: 0, ..one };
        let next = PrefillSequence { out_begin: 8, ..one };
        let extent = PrefillExtent::of(&[one, empty, next]).unwrap();
        assert_eq!(extent, PrefillExtent { tokens: 8, keys: 8, rows: 16 });
        let error = PrefillExtent::of(&[PrefillSequence { out_begin: 7, ..one }, one]).unwrap_err();
        assert!(error.to_string().contains("row of out 7"), "{error}");
        assert_eq!(tiles(&[next], 5).unwrap().iter().map(|tile| tile.first_row).sum::<u32>(), 8 + 13);
        let far = PrefillSequence { kv_begin: u32::MAX, ..one };
        assert!(PrefillExtent::of(&[far]).is_err());
    }
}
