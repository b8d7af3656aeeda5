//! Which sequences of a batch to attend together over a shared prefix.

use super::{PagePool, SeqId, Sequence};
use crate::base::error::{Error, Result};
use crate::base::memory::{collected, room_for};
use crate::plan::SharedPrefix;

/// What an error calls arrays of a batch's length.
const SEQUENCES: &str = "sequences of a batch";

impl PagePool {
    /// Groups of sequences of a batch that begin with the same full pages, for [`Batch`](crate::Batch).
    ///
    /// A sequence is in one group at most, and a page counts only where it is full in the whole group. Groups are
    /// joined, longest prefix first, where that leaves no more pages to read; this finds a good grouping, not
    /// always the best. It changes only when the batch does or a page fills up, so it need not run at every step.
    ///
    /// # Errors
    /// [`crate::Error::UnknownSequence`], [`crate::Error::OtherPool`] and [`crate::Error::OutOfMemory`].
    pub fn shared_prefixes(&self, seqs: &[SeqId]) -> Result<Vec<SharedPrefix>> {
        let mut rows: Vec<(&[u32], u32)> = room_for(seqs.len(), SEQUENCES)?;
        // A sequence that is in no group is right too, so a batch past u32 needs no error.
        for (index, &seq) in (0..u32::MAX).zip(seqs) {
            let Sequence { pages, len } = self.sequence(seq)?;
            rows.push((&pages[..(len / self.spec.page_size) as usize], index));
        }
        // In the order of their pages, rows with a common prefix are neighbours.
        rows.sort_unstable_by(|(a, i), (b, j)| {
            let common = common_pages(a, b);
            a.get(common).cmp(&b.get(common)).then(i.cmp(j))
        });
        let mut groups = group_rows(&rows, self.spec.page_size)?;
        for group in &mut groups {
            group.sequences.sort_unstable();
        }
        groups.sort_unstable_by_key(|group| group.sequences[0]);
        Ok(groups)
    }
}

/// Leading pages that two sequences share. A page that is in both at one index has the same pages before it in
/// both, so a binary search finds where they part.
fn common_pages(a: &[u32], b: &[u32]) -> usize {
    let (mut low, mut high) = (0, a.len().min(b.len()));
    while low < high {
        let middle = low.midpoint(high);
        if a[middle] == b[middle] { low = middle + 1 } else { high = middle }
    }
    low
}

/// Groups of rows of full pages and their index, which come in the order of their pages.
fn group_rows(rows: &[(&[u32], u32)], page_size: u32) -> Result<Vec<SharedPrefix>> {
    let mut groups: Vec<SharedPrefix> = room_for(rows.len(), SEQUENCES)?;
    for &(_, index) in rows {
        groups.push(SharedPrefix { sequences: collected([index].into_iter(), 1, SEQUENCES)?, tokens: 0 });
    }
    let common = |i: usize| (common_pages(rows[i - 1].0, rows[i].0), i);
    let common = (1..rows.len()).map(common).filter(|&(common, _)| common > 0);
    let mut links: Vec<(usize, usize)> = collected(common, rows.len(), SEQUENCES)?;
    links.sort_unstable_by_key(|&(common, i)| (std::cmp::Reverse(common), i));
    let saved = |rows: usize, tokens: u32| (rows as u64).saturating_sub(1) * u64::from(tokens);
    // Rows that are linked so far have one leader, the first of them. The leader's place has the group that may
    // still grow; the others' places are empty or have a group that is done.
    let mut leaders: Vec<usize> = collected(0..rows.len(), rows.len(), SEQUENCES)?;
    for (common, i) in links {
        let tokens = common as u32 * page_size;
        // The leader of `i` is `i`: only this link joins it to the rows before it.
        let leader = leader_of(&mut leaders, i - 1);
        leaders[i] = leader;
        let (before, from) = groups.split_at_mut(i);
        let (left, right) = (&mut before[leader], &mut from[0]);
        let apart = [&*left, &*right].map(|group| saved(group.sequences.len(), group.tokens));
        if saved(left.sequences.len() + right.sequences.len(), tokens) >= apart[0] + apart[1] {
            let what = SEQUENCES;
            left.sequences.try_reserve(right.sequences.len()).map_err(|_| Error::OutOfMemory { what })?;
            left.sequences.append(&mut right.sequences);
            left.tokens = tokens;
        } else if apart[0] > apart[1] {
            // The one that saves more is done.
            std::mem::swap(left, right);
        }
    }
    groups.retain(|group| group.sequences.len() > 1);
    Ok(groups)
}

fn leader_of(leaders: &mut [usize], mut row: usize) -> usize {
    while leaders[row] != row {
        leaders[row] = leaders[leaders[row]];
        row = leaders[row];
    }
    row
}
