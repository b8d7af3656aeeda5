//! A step's tables: the plan and the flat page list as one array of `u32`, the same for every backend.
//!
//! Layout: a [`Header`], then five sections whose places depend on the step's [`Capacity`] only, so that the same
//! recorded commands serve every batch that fits. On wgpu the last section, the page list, is a buffer of its own: a host
//! that writes it there holds nothing else of a step.

mod capacity;
mod rows;

use bytemuck::Pod;

use crate::base::error::{Error, Result};
use crate::base::memory::room_for;
use crate::cache::KvSpec;
use crate::plan::Plan;

pub use capacity::{Capacity, HEADER_WORDS, Header};
pub(crate) use rows::PageRows;

/// Which pages hold each sequence, as the host has them.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum PageTable<'a> {
    /// `block_table`, i32 `[batch, max_pages]`. Entries at or past `ceil(seq_len / page_size)` may hold anything.
    Dense {
        /// The entries, row by row.
        block_table: &'a [i32],
        /// Entries in a row.
        max_pages: u32,
    },
    /// Compressed rows: sequence `i` has the pages `kv_indices[kv_indptr[i]..kv_indptr[i + 1]]`.
    Csr {
        /// Where each sequence's pages begin; one entry more than sequences.
        kv_indptr: &'a [i32],
        /// Page ids.
        kv_indices: &'a [i32],
    },
    /// Like `Dense`, with the page size of the pool that made it, as [`crate::BlockTable::page_table`] gives it.
    Pool {
        /// The entries, row by row.
        block_table: &'a [i32],
        /// Entries in a row.
        max_pages: u32,
        /// Tokens per page: another than the cache's is an error.
        page_size: u32,
    },
    /// Like `Csr`, with the page size of the pool that made it, as [`crate::Csr::page_table`] gives it.
    PoolCsr {
        /// Where each sequence's pages begin; one entry more than sequences.
        kv_indptr: &'a [i32],
        /// Page ids.
        kv_indices: &'a [i32],
        /// Tokens per page: another than the cache's is an error.
        page_size: u32,
    },
    /// The page list is written on the device, into what `Step::page_list` of wgpu or CUDA gives. Only a decode that was
    /// made with [`crate::DecodeOptions::device_page_list`] takes it.
    Device,
    /// There are no pages: the tokens of a sparse decode are listed by slots, in [`crate::MlaDecodeArgs::indices`]. Only a decode that was
    /// made with [`crate::DecodeOptions::topk`] takes it, with a plan of [`Plan::sparse`].
    Indices,
}

impl PageTable<'_> {
    /// # Errors
    /// [`Error::LayoutMismatch`] for pages of the device where kernels trust them.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn check_device(self, clamps: bool, plan: &Plan) -> Result<()> {
        if clamps && !plan.slabs().is_empty() {
            let detail = "a decode made with DecodeOptions::device_page_list serves a pool in one buffer: plan without Batch::slabs";
            return Err(Error::LayoutMismatch { detail });
        }
        if matches!(self, Self::Device) && !clamps {
            let detail = "PageTable::Device needs a decode made with DecodeOptions::device_page_list";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }
}

/// `query_start_loc` of a batch from the query tokens of each sequence: their running sum, from 0 on.
///
/// ```
/// assert_eq!(wgpu_mla::query_start_loc(&[1, 0, 5])?, [0, 1, 1, 6]);
/// # Ok::<(), wgpu_mla::Error>(())
/// ```
///
/// # Errors
/// [`Error::Limit`] past 2^31 - 1 query tokens, and [`Error::OutOfMemory`].
pub fn query_start_loc(q_lens: &[u32]) -> Result<Vec<i32>> {
    let mut starts = room_for(q_lens.len() + 1, "query_start_loc")?;
    let mut end = 0u64;
    starts.push(0);
    for &q_len in q_lens {
        end += u64::from(q_len);
        let (what, limit, cure) = ("query tokens of a batch", i32::MAX as u64, "use a smaller batch");
        starts.push(i32::try_from(end).map_err(|_| Error::Limit { what, need: end, limit, cure })?);
    }
    Ok(starts)
}

/// `seq_lens` of a batch in CSR form.
///
/// # Errors
/// [`Error::Length`], [`Error::SeqLen`] where a last page is longer than a page, and [`Error::OutOfMemory`].
pub fn csr_seq_lens(kv_indptr: &[i32], kv_last_page_len: &[i32], page_size: u32) -> Result<Vec<i32>> {
    let sequences = kv_last_page_len.len();
    if kv_indptr.len() != sequences + 1 {
        let (got, want) = (kv_indptr.len() as u64, sequences as u64 + 1);
        let cure = "one entry a sequence and one more for the end";
        return Err(Error::Length { what: "kv_indptr", got, want, cure });
    }
    let mut lens = room_for(sequences, "seq_lens")?;
    for (seq, (&last, ptr)) in kv_last_page_len.iter().zip(kv_indptr.windows(2)).enumerate() {
        let pages = i64::from(ptr[1]) - i64::from(ptr[0]);
        // Saturates: 2^32 pages of 2^32 tokens each are more than i64 holds.
        let tokens = |pages: i64| pages.saturating_mul(page_size.into());
        let len = if pages == 0 { 0 } else { tokens(pages - 1).saturating_add(last.into()) };
        let fits = pages >= 0 && (pages == 0 || (1..=i64::from(page_size)).contains(&i64::from(last)));
        match i32::try_from(len) {
            Ok(len) if fits => lens.push(len),
            _ => {
                let cure = "correct kv_indptr, which never goes down, or kv_last_page_len, 1 to page_size";
                return Err(Error::SeqLen { seq, got: len, max: tokens(pages.max(0)), cure });
            }
        }
    }
    Ok(lens)
}

/// Writes the tables of a plan into `words`, which keep their memory from step to step.
///
/// Every page id that a kernel will follow is checked here, and every word of the page list is one. Items, query tokens and merges are
/// taken as they are: backends check those of a plan that may have been changed.
///
/// # Errors
/// [`Error::Capacity`], [`Error::Length`], [`Error::OtherSpec`], [`Error::KvIndptr`], [`Error::SeqLen`], [`Error::PageOutOfRange`],
/// [`Error::PrefixNotShared`], [`Error::Limit`] and [`Error::OutOfMemory`], and [`Error::Shape`] for a plan whose sequences and their
/// places were changed; `words` are then not to be used.
pub fn write_tables(
    words: &mut Vec<u32>,
    capacity: &Capacity,
    plan: &Plan,
    pages: PageTable<'_>,
    kv: &KvSpec,
) -> Result<Header> {
    capacity.check(&Capacity::of(plan))?;
    capacity.check_words()?;
    let mut header = capacity.header(kv);
    header.num_items = plan.items.len() as u32;
    header.num_merges = plan.merges.len() as u32;
    let out_of_memory = |_| Error::OutOfMemory { what: "a step's tables" };
    words.try_reserve_exact((header.end as usize).saturating_sub(words.len())).map_err(out_of_memory)?;
    words.resize(header.end as usize, 0);
    put(words, 0, std::slice::from_ref(&header));
    put(words, header.items, &plan.items);
    put(words, header.queries, &plan.queries);
    put(words, header.merges, &plan.merges);
    put(words, header.merge_partials, &plan.merge_partials);
    if !matches!(pages, PageTable::Device | PageTable::Indices) {
        write_pages(&mut words[header.pages as usize..], plan, pages, kv)?;
    }
    Ok(header)
}

fn put<T: Pod>(words: &mut [u32], at: u32, section: &[T]) {
    let section: &[u32] = bytemuck::cast_slice(section);
    words[at as usize..at as usize + section.len()].copy_from_slice(section);
}

fn write_pages(list: &mut [u32], plan: &Plan, pages: PageTable<'_>, kv: &KvSpec) -> Result<()> {
    plan.check_places(kv)?;
    let rows = PageRows::new(pages, plan.seq_lens.len(), kv)?;
    for (seq, &len) in plan.seq_lens.iter().enumerate() {
        let row = rows.used(seq, len)?;
        let (to, room) =
            list[plan.page_begin[seq] as usize..plan.page_begin[seq + 1] as usize].split_at_mut(row.len());
        // Room for growth holds pages too, so that no word of the list leads out of the pool.
        room.fill(0);
        let mut wild = false;
        for (to, &page) in to.iter_mut().zip(row) {
            // A negative id becomes a large one, so one comparison finds both kinds.
            wild |= page as u32 >= kv.num_pages;
            *to = page as u32;
        }
        if wild {
            let block = row.iter().position(|&page| page as u32 >= kv.num_pages).unwrap_or(0);
            let page = row[block].into();
            return Err(Error::PageOutOfRange { seq, block, page, num_pages: kv.num_pages });
        }
    }
    for &(first, other, tokens) in &plan.shared {
        let used = kv.pages_for(tokens) as usize;
        let (a, b) = (&rows.row(first as usize)[..used], &rows.row(other as usize)[..used]);
        if let Some(block) = a.iter().zip(b).position(|(a, b)| a != b) {
            return Err(Error::PrefixNotShared { first, other, block });
        }
    }
    Ok(())
}

#[cfg(feature = "wgpu")]
/// The runs of words that differ between two arrays of one length, merged where the gap is small.
pub(crate) fn changed_runs(old: &[u32], new: &[u32], mut emit: impl FnMut(std::ops::Range<usize>)) {
    const CHUNK: usize = 256;
    let mut run: Option<std::ops::Range<usize>> = None;
    for begin in (0..new.len()).step_by(CHUNK) {
        let end = (begin + CHUNK).min(new.len());
        if old.get(begin..end) == Some(&new[begin..end]) {
            continue;
        }
        match &mut run {
            // One write of a few unchanged chunks costs less than a second write.
            Some(run) if begin - run.end <= 4 * CHUNK => run.end = end,
            _ => {
                if let Some(done) = run.replace(begin..end) {
                    emit(done);
                }
            }
        }
    }
    if let Some(done) = run {
        emit(done);
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::changed_runs;

    fn runs(old: &[u32], new: &[u32]) -> Vec<(usize, usize)> {
        let mut runs = Vec::new();
        changed_runs(old, new, |run| runs.push((run.start, run.end)));
        runs
    }

    #[test]
    fn what_did_not_change_is_not_sent() {
        let old: Vec<u32> = (0..5000).collect();
        assert_eq!(runs(&old, &old), []);
        assert_eq!(runs(&old, &old[..300]), [], "a shorter array is there already");
        assert_eq!(runs(&[], &[]), []);
    }

    #[test]
    fn what_is_new_is_sent() {
        let new: Vec<u32> = (0..5000).collect();
        assert_eq!(runs(&[], &new), [(0, 5000)]);
        // The chunk that the old end is in is sent whole.
        assert_eq!(runs(&new[..300], &new), [(256, 5000)]);
    }

    #[test]
    fn near_changes_are_one_run_and_far_ones_two() {
        let old = vec![0; 5000];
        let with = |changed: &[usize]| {
            let mut new = old.clone();
            changed.iter().for_each(|&at| new[at] = 1);
            new
        };
        assert_eq!(runs(&old, &with(&[255])), [(0, 256)]);
        assert_eq!(runs(&old, &with(&[4999])), [(4864, 5000)], "the last chunk is short");
        assert_eq!(runs(&old, &with(&[0, 256 * 5])), [(0, 256 * 6)], "four unchanged chunks between");
        assert_eq!(runs(&old, &with(&[0, 256 * 6])), [(0, 256), (256 * 6, 256 * 7)], "five");
    }

    /// Whatever the arrays are: applied to the old one, the runs make the new one.
    #[test]
    fn the_runs_make_the_new_array() {
        let mut seed = 1u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as usize
        };
        for _ in 0..200 {
            let mut old = vec![7; next() % 4000];
            let mut new = vec![7; next() % 4000];
            for _ in 0..next() % 6 {
                let at = next() % new.len().max(1);
                new.iter_mut().skip(at).take(3).for_each(|word| *word = 8);
            }
            let runs = runs(&old, &new);
            old.resize(new.len().max(old.len()), 0);
            for (begin, end) in runs {
                old[begin..end].copy_from_slice(&new[begin..end]);
            }
            assert_eq!(old[..new.len()], new);
        }
    }
}
