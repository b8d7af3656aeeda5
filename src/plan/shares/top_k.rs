//! What ranks chose of their own tokens, as a choice of all.

use super::Shares;
use crate::base::error::{Error, Result};
use crate::base::memory::room_for;
use crate::base::order::order_key;

impl Shares {
    /// The `k` best tokens of each row over all ranks, from the best `k` of each rank: what [`TopK`](crate::TopK) of the whole row gives,
    /// the same on every rank that is given the same. `[rows, k]`: ascending tokens of the whole, then -1.
    ///
    /// `values` and `indices` are `[world, rows, k]`, as an all-gather lays out what each rank's [`TopK`](crate::TopK) wrote to
    /// [`TopKArgs::values`](crate::TopKArgs) and `indices`: a rank's indices count its own tokens, and -1 is none. Ties go to the lower
    /// token of the whole.
    ///
    /// ```
    /// use wgpu_mla::Shares;
    ///
    /// # fn main() -> wgpu_mla::Result<()> {
    /// // Tokens 0, 2, 4 are rank 0's and 1, 3, 5 rank 1's. Rank 0 chose tokens 0 and 4, rank 1 tokens 1 and 3.
    /// let shares = Shares::even(2, 1)?;
    /// let (values, indices) = ([5.0, 1.0, 1.0, 0.5], [0, 2, 0, 1]);
    /// assert_eq!(shares.merge_top_k(2, &values, &indices)?, [0, 1]); // of the two with 1.0 the lower token
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Shape`] for a `k` of 0 and for an index that is no token of its rank, and [`Error::OutOfMemory`].
    pub fn merge_top_k(&self, k: u32, values: &[f32], indices: &[i32]) -> Result<Vec<i32>> {
        const WHAT: &str = "a merged top_k";
        if k == 0 {
            return Err(Error::Shape { what: "k", got: 0, cure: "must be at least 1" });
        }
        let (got, want) = (values.len() as u64, indices.len() as u64);
        if got != want {
            return Err(Error::Length { what: "values", got, want, cure: "one value an index" });
        }
        let (world, k) = (self.world() as usize, k as usize);
        if !indices.len().is_multiple_of(world * k) {
            let (got, want) = (indices.len() as u64, indices.len().next_multiple_of(world * k) as u64);
            let cure = "as many rows of k entries of each rank: [world, rows, k]";
            return Err(Error::Length { what: "indices", got, want, cure });
        }
        let rows = indices.len() / (world * k);
        let mut merged = room_for(rows * k, WHAT)?;
        let mut found: Vec<(u32, u32)> = room_for(world * k, WHAT)?;
        for row in 0..rows {
            found.clear();
            for rank in 0..world {
                let part = (rank * rows + row) * k..(rank * rows + row + 1) * k;
                for (value, &index) in values[part.clone()].iter().zip(&indices[part]) {
                    if let Ok(index) = u32::try_from(index) {
                        let token = self.token(rank as u32, index)?;
                        if token > i32::MAX as u32 {
                            let cure = "must be a token that the rank holds: below its local_len";
                            return Err(Error::Shape {
                                what: "index of a rank's token",
                                got: index.into(),
                                cure,
                            });
                        }
                        found.push((order_key(value.to_bits()), token));
                    }
                }
            }
            // Best first, and of equals the lower token.
            found.sort_unstable_by_key(|&(key, token)| (!key, token));
            found.truncate(k);
            found.sort_unstable_by_key(|&(_, token)| token);
            let tokens = found.iter().map(|&(_, token)| token as i32);
            merged.extend(tokens.chain(std::iter::repeat(-1)).take(k));
        }
        Ok(merged)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::all;
    use super::*;

    /// The best `k` of some logits, as ascending indices and values.
    fn best(logits: &[f32], k: usize) -> (Vec<f32>, Vec<i32>) {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by_key(|&index| (!order_key(logits[index].to_bits()), index));
        order.truncate(k);
        order.sort_unstable();
        let mut values: Vec<f32> = order.iter().map(|&index| logits[index]).collect();
        let mut indices: Vec<i32> = order.iter().map(|&index| index as i32).collect();
        values.resize(k, f32::NEG_INFINITY);
        indices.resize(k, -1);
        (values, indices)
    }

    /// Rows with ties, zeros of both signs and NaN, of more and of fewer tokens than are chosen.
    #[test]
    fn the_merge_of_ranks_is_the_choice_of_the_whole() {
        const K: usize = 20;
        let values = [0.5, -0.0, 0.0, f32::NAN, f32::NEG_INFINITY, 2.0, 0.5, -1.0];
        let lengths = [300, 19, 20, 21, 0, 97];
        let row = |row: usize| {
            let of = |token: usize| values[(token * (row + 3) + token / 7) % values.len()];
            (0..lengths[row]).map(of).collect::<Vec<f32>>()
        };
        for shares in all() {
            let (mut all_values, mut all_indices, mut want) = (Vec::new(), Vec::new(), Vec::new());
            for rank in 0..shares.world() {
                for index in 0..lengths.len() {
                    let held =
                        row(index).into_iter().zip(0..).filter(|&(_, token)| shares.owner(token) == rank);
                    let (values, indices) = best(&held.map(|(value, _)| value).collect::<Vec<_>>(), K);
                    all_values.extend(values);
                    all_indices.extend(indices);
                }
            }
            (0..lengths.len()).for_each(|index| want.extend(best(&row(index), K).1));
            assert_eq!(shares.merge_top_k(K as u32, &all_values, &all_indices), Ok(want), "{shares:?}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let shares = Shares::even(2, 1).unwrap();
        let refused =
            |k, values: &[f32], indices: &[i32]| shares.merge_top_k(k, values, indices).unwrap_err();
        assert!(matches!(refused(0, &[], &[]), Error::Shape { what: "k", .. }));
        assert!(matches!(refused(1, &[0.0], &[0, 0]), Error::Length { what: "values", got: 1, want: 2, .. }));
        assert!(matches!(refused(2, &[0.0; 6], &[0; 6]), Error::Length { what: "indices", want: 8, .. }));
        assert!(matches!(refused(1, &[0.0; 2], &[i32::MAX, 0]), Error::Shape { .. }));
        assert_eq!(shares.merge_top_k(3, &[], &[]), Ok(vec![]));
        let none = Shares::weighted(&[1, 0], 1).unwrap();
        assert!(matches!(none.merge_top_k(1, &[0.0; 2], &[0, 0]), Err(Error::Shape { .. })));
    }
}
