//! A step's tables: the plan and the flat page list as one array of `u32`, the same for every backend.
//!
//! Layout: a [`Header`], then five sections whose places depend on the step's [`Capacity`] only, so that the same
//! recorded commands serve every batch that fits. On wgpu the last section, the page list, is a buffer of its own: a host
//! that writes it there holds nothing else of a step.

use bytemuck::{Pod, Zeroable};

use crate::plan::{Merge, Plan, QueryToken, WorkItem};
use crate::{Error, KvSpec, Result};

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
    /// As `Dense`, and it is known which pages they are: what [`crate::BlockTable::page_table`] gives.
    Pool {
        /// The entries, row by row.
        block_table: &'a [i32],
        /// Entries in a row.
        max_pages: u32,
        /// Tokens per page: another than the cache's is an error.
        page_size: u32,
    },
    /// As `Csr`, and it is known which pages they are: what [`crate::Csr::page_table`] gives.
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
/// [`Error::Limit`] past 2^31 - 1 query tokens.
pub fn query_start_loc(q_lens: &[u32]) -> Result<Vec<i32>> {
    let mut starts = Vec::with_capacity(q_lens.len() + 1);
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
/// [`Error::Length`], or [`Error::SeqLen`] where a last page is longer than a page.
pub fn csr_seq_lens(kv_indptr: &[i32], kv_last_page_len: &[i32], page_size: u32) -> Result<Vec<i32>> {
    let sequences = kv_last_page_len.len();
    if kv_indptr.len() != sequences + 1 {
        let (got, want) = (kv_indptr.len() as u64, sequences as u64 + 1);
        let cure = "one entry a sequence and one more for the end";
        return Err(Error::Length { what: "kv_indptr", got, want, cure });
    }
    let mut lens = Vec::with_capacity(sequences);
    for (seq, (&last, ptr)) in kv_last_page_len.iter().zip(kv_indptr.windows(2)).enumerate() {
        let pages = i64::from(ptr[1]) - i64::from(ptr[0]);
        // Of 2^32 pages of 2^32 tokens each: beyond i64.
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

/// How much a step holds before it grows, and how large its grids are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Capacity {
    /// Work items.
    pub items: u32,
    /// Entries of [`Plan::queries`].
    pub queries: u32,
    /// Words of the flat page list.
    pub pages: u32,
    /// Entries of [`Plan::merges`].
    pub merges: u32,
    /// Entries of [`Plan::merge_partials`].
    pub merge_partials: u32,
    /// Partial results, one a row and split.
    pub partials: u32,
}

impl Capacity {
    /// Exactly what a plan needs.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        Self {
            items: plan.items.len() as u32,
            queries: plan.queries.len() as u32,
            pages: plan.page_list_len(),
            merges: plan.merges.len() as u32,
            merge_partials: plan.merge_partials.len() as u32,
            partials: plan.num_partials,
        }
    }

    /// The larger of both, field by field.
    pub fn max(self, other: Self) -> Self {
        self.zip(other, u32::max)
    }

    /// Whether everything in `other` fits.
    #[must_use]
    pub fn holds(self, other: Self) -> bool {
        self.max(other) == self
    }

    /// Enough for `other`, with the fields that had to grow rounded up so that they seldom grow again.
    #[must_use]
    pub fn grown_to(self, other: Self) -> Self {
        self.zip(other, |have, want| {
            if want > have { want.checked_next_power_of_two().unwrap_or(want).max(16) } else { have }
        })
    }

    /// # Errors
    /// [`Error::Capacity`] that names the first field that is too small.
    fn check(&self, need: &Self) -> Result<()> {
        for (what, got, want) in [
            ("Capacity::items", self.items, need.items),
            ("Capacity::queries", self.queries, need.queries),
            ("Capacity::pages", self.pages, need.pages),
            ("Capacity::merges", self.merges, need.merges),
            ("Capacity::merge_partials", self.merge_partials, need.merge_partials),
            ("Capacity::partials", self.partials, need.partials),
        ] {
            if got < want {
                let cure = "use `Capacity::of` the plan, or `grown_to` it";
                return Err(Error::Capacity { what, got: got.into(), need: want.into(), cure });
            }
        }
        Ok(())
    }

    fn zip(self, other: Self, f: impl Fn(u32, u32) -> u32) -> Self {
        Self {
            items: f(self.items, other.items),
            queries: f(self.queries, other.queries),
            pages: f(self.pages, other.pages),
            merges: f(self.merges, other.merges),
            merge_partials: f(self.merge_partials, other.merge_partials),
            partials: f(self.partials, other.partials),
        }
    }

    /// The header of empty tables of this capacity. Tables of more words than 32 bits count have no place for their last
    /// sections: `end` is then `u32::MAX`, which no other table has.
    #[must_use]
    pub fn header(&self, kv: &KvSpec) -> Header {
        let after = |begin: u32, count: u32, size: usize| {
            let end = u64::from(begin) + (u64::from(count) * (size as u64 / 4)).next_multiple_of(4);
            u32::try_from(end).unwrap_or(u32::MAX)
        };
        let items = HEADER_WORDS;
        // CUDA's grids are whole clusters of two blocks, each of which looks at an item.
        let queries =
            after(items, self.items.checked_next_multiple_of(2).unwrap_or(u32::MAX), size_of::<WorkItem>());
        let merges = after(queries, self.queries, size_of::<QueryToken>());
        let merge_partials = after(merges, self.merges, size_of::<Merge>());
        let pages = after(merge_partials, self.merge_partials, 4);
        Header {
            num_items: 0,
            num_merges: 0,
            page_size: kv.page_size,
            num_pages: kv.num_pages,
            items,
            queries,
            merges,
            merge_partials,
            pages,
            end: after(pages, self.pages, 4),
            reserved: [0; 6],
        }
    }
}

/// The first words of the tables. Places are counted in words from the front.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    /// Work items in use.
    pub num_items: u32,
    /// Merges in use.
    pub num_merges: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
    /// Place of the [`WorkItem`]s.
    pub items: u32,
    /// Place of the [`QueryToken`]s.
    pub queries: u32,
    /// Place of the [`Merge`]s.
    pub merges: u32,
    /// Place of the merged partial results.
    pub merge_partials: u32,
    /// Place of the flat page list: on wgpu the words of the buffer without it.
    pub pages: u32,
    /// Words in all.
    pub end: u32,
    /// Zero.
    pub reserved: [u32; 6],
}

/// Words of a [`Header`].
pub const HEADER_WORDS: u32 = (size_of::<Header>() / 4) as u32;

/// Writes the tables of a plan into `words`, which keep their memory from step to step.
///
/// Every page id that a kernel will follow is checked here, and every word of the page list is one. The plan is taken as
/// [`Plan::new`] made it; backends check one that may have been changed.
///
/// # Errors
/// [`Error::Capacity`], [`Error::Length`], [`Error::OtherSpec`], [`Error::SeqLen`], [`Error::PageOutOfRange`], [`Error::PrefixNotShared`]
/// and [`Error::Limit`]; `words` are then not to be used.
pub fn write_tables(
    words: &mut Vec<u32>,
    capacity: &Capacity,
    plan: &Plan,
    pages: PageTable<'_>,
    kv: &KvSpec,
) -> Result<Header> {
    capacity.check(&Capacity::of(plan))?;
    let mut header = capacity.header(kv);
    if header.end == u32::MAX {
        let (need, limit) = (u64::from(header.end), u64::from(header.end) - 1);
        return Err(Error::Limit {
            what: "words of a step's tables",
            need,
            limit,
            cure: "use a smaller batch",
        });
    }
    header.num_items = plan.items.len() as u32;
    header.num_merges = plan.merges.len() as u32;
    words.resize(header.end as usize, 0);
    put(words, 0, std::slice::from_ref(&header));
    put(words, header.items, &plan.items);
    put(words, header.queries, &plan.queries);
    put(words, header.merges, &plan.merges);
    put(words, header.merge_partials, &plan.merge_partials);
    if !matches!(pages, PageTable::Device) {
        write_pages(&mut words[header.pages as usize..], plan, pages, kv)?;
    }
    Ok(header)
}

fn put<T: Pod>(words: &mut [u32], at: u32, section: &[T]) {
    let section: &[u32] = bytemuck::cast_slice(section);
    words[at as usize..at as usize + section.len()].copy_from_slice(section);
}

fn write_pages(list: &mut [u32], plan: &Plan, pages: PageTable<'_>, kv: &KvSpec) -> Result<()> {
    check_rows(pages, plan.seq_lens.len(), kv)?;
    for (seq, &len) in plan.seq_lens.iter().enumerate() {
        let row = used_pages(pages, seq, len, kv)?;
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
        let (a, b) = (&row_of(pages, first as usize)[..used], &row_of(pages, other as usize)[..used]);
        if let Some(block) = a.iter().zip(b).position(|(a, b)| a != b) {
            return Err(Error::PrefixNotShared { first, other, block });
        }
    }
    Ok(())
}

/// # Errors
/// [`Error::Length`] for a table of another number of sequences, [`Error::OtherSpec`] for one of other pages.
pub(crate) fn check_rows(pages: PageTable<'_>, rows: usize, kv: &KvSpec) -> Result<()> {
    match pages {
        PageTable::Pool { page_size, .. } | PageTable::PoolCsr { page_size, .. }
            if page_size != kv.page_size =>
        {
            let (what, got, want) = ("page_size of the block table", page_size, kv.page_size);
            Err(Error::OtherSpec { what, got, want })
        }
        PageTable::Dense { block_table, max_pages } | PageTable::Pool { block_table, max_pages, .. }
            if Some(block_table.len()) != rows.checked_mul(max_pages as usize) =>
        {
            Err(Error::Length {
                what: "block_table",
                got: block_table.len() as u64,
                want: rows.saturating_mul(max_pages as usize) as u64,
                cure: "one row of max_pages entries a sequence",
            })
        }
        PageTable::Csr { kv_indptr, .. } | PageTable::PoolCsr { kv_indptr, .. }
            if kv_indptr.len() != rows + 1 =>
        {
            Err(Error::Length {
                what: "kv_indptr",
                got: kv_indptr.len() as u64,
                want: rows as u64 + 1,
                cure: "one entry a sequence and one more for the end",
            })
        }
        _ => Ok(()),
    }
}

/// The pages of a sequence's `len` tokens.
///
/// # Errors
/// [`Error::SeqLen`] where its row has no more.
pub(crate) fn used_pages<'a>(pages: PageTable<'a>, seq: usize, len: u32, kv: &KvSpec) -> Result<&'a [i32]> {
    let row = row_of(pages, seq);
    row.get(..kv.pages_for(len) as usize).ok_or_else(|| row_too_short(pages, seq, len.into(), kv))
}

/// What is wrong where a sequence's row does not hold its tokens.
pub(crate) fn row_too_short(pages: PageTable<'_>, seq: usize, got: i64, kv: &KvSpec) -> Error {
    if let PageTable::Csr { kv_indptr, kv_indices } | PageTable::PoolCsr { kv_indptr, kv_indices, .. } = pages
    {
        let (begin, end) = (i64::from(kv_indptr[seq]), i64::from(kv_indptr[seq + 1]));
        if begin < 0 || end < begin || end > kv_indices.len() as i64 {
            let cure = "kv_indptr must begin at 0, never go down, and end at the length of kv_indices: correct it at this sequence";
            return Error::Shape { what: "kv_indptr at sequence", got: seq as u64, cure };
        }
    }
    let max = row_of(pages, seq).len() as i64 * i64::from(kv.page_size);
    let cure = "its row of the block table has no more pages: append pages to it before the step, or correct seq_lens";
    Error::SeqLen { seq, got, max, cure }
}

/// The entries of a sequence; none where the CSR arrays contradict themselves.
pub(crate) fn row_of(pages: PageTable<'_>, seq: usize) -> &[i32] {
    match pages {
        PageTable::Dense { block_table, max_pages } | PageTable::Pool { block_table, max_pages, .. } => {
            &block_table[seq * max_pages as usize..][..max_pages as usize]
        }
        PageTable::Csr { kv_indptr, kv_indices } | PageTable::PoolCsr { kv_indptr, kv_indices, .. } => {
            let (begin, end) = (kv_indptr[seq], kv_indptr[seq + 1]);
            let range = usize::try_from(begin).ok().zip(usize::try_from(end).ok());
            range.and_then(|(begin, end)| kv_indices.get(begin..end)).unwrap_or(&[])
        }
        PageTable::Device => &[],
    }
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
