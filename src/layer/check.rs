//! Checks of a layer's batch that none of its ops makes. Pure.

use std::ops::Range;

use super::MlaLayer;
use super::batch::LayerBatch;
use crate::tables::{row_of, row_too_short};
use crate::{Error, PageTable, Result};

/// # Errors
/// [`Error::Shape`] for a sequence that is not in the batch.
pub(super) fn check_groups(batch: &LayerBatch<'_>) -> Result<()> {
    let num_sequences = batch.seq_lens.len();
    let sequences = batch.shared_prefixes.iter().flat_map(|group| &group.sequences);
    match sequences.copied().find(|&sequence| sequence as usize >= num_sequences) {
        Some(sequence) => {
            let cure = "must be in the batch, and in one shared prefix only";
            Err(Error::Shape { what: "SharedPrefix sequence", got: sequence.into(), cure })
        }
        None => Ok(()),
    }
}

/// A new token is read where the block table has it, so it must be written there, and no other sequence may write to its page.
///
/// # Errors
/// [`Error::SlotMismatch`] and [`Error::PageWrittenTwice`].
pub(super) fn check_slots(spec: &MlaLayer, batch: &LayerBatch<'_>) -> Result<()> {
    let page_size = spec.kv.page_size as usize;
    // Each once a sequence.
    let mut written: Vec<(i32, usize)> = Vec::new();
    for (seq, (&len, loc)) in batch.seq_lens.iter().zip(batch.query_start_loc.windows(2)).enumerate() {
        let row = row_of(batch.pages, seq);
        let tokens = loc[0] as usize..loc[1] as usize;
        let first = len as usize - tokens.len();
        for (index, position) in tokens.zip(first..) {
            let slot = batch.slot_mapping[index];
            // A row that is too short is refused where its pages are read.
            let Some(&page) = row.get(position / page_size) else { break };
            let want = i64::from(page) * page_size as i64 + (position % page_size) as i64;
            if slot >= 0 && slot != want {
                return Err(Error::SlotMismatch { index, slot, want });
            }
            if slot >= 0 && written.last() != Some(&(page, seq)) {
                written.push((page, seq));
            }
        }
    }
    written.sort_unstable();
    match written.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1) {
        Some(&[(page, first), (_, other)]) => {
            Err(Error::PageWrittenTwice { first, other, page: page as u32 })
        }
        _ => Ok(()),
    }
}

/// The pages of some sequences and their tokens, which begin where a page does, as `(kv_indptr, kv_indices)`.
pub(super) fn pages_of(
    pages: PageTable<'_>,
    spec: &MlaLayer,
    sequences: impl Iterator<Item = (usize, Range<u32>)>,
) -> Result<(Vec<i32>, Vec<i32>)> {
    if matches!(pages, PageTable::Device) {
        let detail = "a layer gathers pages by a list of the host: give PageTable::Dense or Csr";
        return Err(Error::LayoutMismatch { detail });
    }
    let (mut indptr, mut indices) = (vec![0i32], Vec::new());
    for (seq, tokens) in sequences {
        let row = row_of(pages, seq);
        let used = (tokens.start / spec.kv.page_size) as usize..spec.kv.pages_for(tokens.end) as usize;
        let Some(row) = row.get(used) else {
            return Err(row_too_short(pages, seq, tokens.end.into(), &spec.kv));
        };
        indices.extend_from_slice(row);
        indptr.push(indices.len() as i32);
    }
    Ok((indptr, indices))
}
