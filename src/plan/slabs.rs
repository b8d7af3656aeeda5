//! Plans over a pool in several slabs. A sequence's pages in a slab are a sequence of their own there, in the order of their tokens, and
//! each query token has a bound in its tokens: a slab is planned and attended like a pool of one buffer. All rows have partial results,
//! which one merge combines.

use std::iter::repeat_n;

use super::{Batch, Merge, Plan, SharedPrefix, SplitPolicy, Tiling, countable, out_of_memory};
use crate::base::error::{Error, Result};
use crate::base::mask::Mask;
use crate::base::memory::{collected, room_for};
use crate::cache::KvSpec;
use crate::cache::decode_spec::MlaDecode;
use crate::plan::tables::{PageRows, PageTable};

/// Which slab of the pool each sequence's pages are in, for [`Batch::slabs`].
#[derive(Debug, Clone, Copy)]
pub struct SlabTable<'a> {
    /// The pages of each sequence: those that the step is prepared with.
    pub pages: PageTable<'a>,
    /// Pages of a slab, as in [`crate::KvView::in_slabs`].
    pub slab_pages: u32,
}

/// The part of a [`Plan`] over one slab.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlabPlan {
    /// Its work items and their tables. Sequences are those of the batch, with the tokens that the slab holds. It has no merges: those
    /// of the whole plan combine the partial results of all slabs.
    pub(super) plan: Plan,
    /// The page list in CSR form, in pages of the slab.
    pub(super) kv_indptr: Vec<i32>,
    pub(super) kv_indices: Vec<i32>,
}

impl SlabPlan {
    /// The slab's work items and their tables. It is no plan of a step by itself: a decode refuses it.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn pages(&self) -> PageTable<'_> {
        if self.plan.topk > 0 {
            return PageTable::Indices;
        }
        PageTable::Csr { kv_indptr: &self.kv_indptr, kv_indices: &self.kv_indices }
    }
}

/// One slab's share of a batch.
#[derive(Default)]
struct Share {
    seq_lens: Vec<i32>,
    bounds: Vec<u32>,
    prefixes: Vec<SharedPrefix>,
    /// Tokens of the slab before each block of a sequence, and in all.
    before: Vec<u32>,
    /// The first sequence of each group of a shared prefix with the group's number, in ascending order; the same for all slabs.
    first_sequences: Vec<(u32, u32)>,
}

/// The pages of one slab.
#[derive(Clone, Copy)]
struct Slab {
    first_page: u32,
    kv: KvSpec,
}

impl Slab {
    /// Page `index` of the pool in its slab, if it is in this one.
    fn page(&self, page: i32) -> Option<i32> {
        let at = (page as u32).wrapping_sub(self.first_page);
        (at < self.kv.num_pages).then_some(at as i32)
    }
}

fn slabs(kv: KvSpec, slab_pages: u32) -> Result<impl Iterator<Item = Slab>> {
    Ok((0..kv.num_slabs(slab_pages)?).map(move |slab| {
        let first_page = slab * slab_pages;
        let num_pages = slab_pages.min(kv.num_pages - first_page);
        Slab { first_page, kv: KvSpec { num_pages, ..kv } }
    }))
}

impl Plan {
    /// The parts of a plan over a pool in several slabs, which then has no items, queries, sequences and pages of its own. Else empty.
    #[must_use]
    pub fn slabs(&self) -> &[SlabPlan] {
        &self.slabs
    }

    /// Pages of a slab; 0 for a plan over a pool in one buffer.
    #[must_use]
    pub fn slab_pages(&self) -> u32 {
        self.slab_pages
    }

    /// Plans each slab, and the merge of all.
    pub(super) fn build_slabs(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        (batch, table): (&Batch<'_>, &SlabTable<'_>),
        policy: SplitPolicy,
    ) -> Result<()> {
        self.check_batch(spec, batch)?;
        self.check_prefixes(batch)?;
        self.check_least_room(spec.shape.num_heads, tiling.rows_per_tile)?;
        let rows = self.check_table(spec, table.pages)?;
        let mut free = std::mem::take(&mut self.scratch.slabs);
        let groups = batch.shared_prefixes;
        let first_of = groups.iter().map(|group| group.sequences.first().copied().unwrap_or(u32::MAX));
        let mut first_sequences = collected(first_of.zip(0..), groups.len(), "a plan")?;
        first_sequences.sort_unstable();
        let mut share = Share { first_sequences, ..Share::default() };
        let mut partials = std::mem::take(&mut self.scratch.partials);
        for slab in slabs(spec.kv, table.slab_pages)? {
            let SlabPlan { mut plan, mut kv_indptr, mut kv_indices } = free.pop().unwrap_or_default();
            kv_indptr.clear();
            kv_indices.clear();
            self.share_of(slab, batch, rows, &mut share, (&mut kv_indptr, &mut kv_indices))?;
            let local = Batch {
                seq_lens: &share.seq_lens,
                query_start_loc: batch.query_start_loc,
                mask: Mask::Bounds(&share.bounds),
                shared_prefixes: &share.prefixes,
                slabs: None,
            };
            plan.clear();
            plan.scratch.is_slab = true;
            plan.num_partials = self.num_partials;
            plan.scratch.words = self.scratch.words;
            plan.build_one(&MlaDecode { kv: slab.kv, ..*spec }, tiling, &local, policy)?;
            self.num_partials = plan.num_partials;
            self.scratch.words = plan.scratch.words;
            let tokens = plan.scratch.partials.iter();
            partials.try_reserve(tokens.len()).map_err(out_of_memory)?;
            partials.extend(tokens.map(|&(query, partial)| (plan.queries[query as usize].token, partial)));
            self.slabs.push(SlabPlan { plan, kv_indptr, kv_indices });
        }
        self.slab_pages = table.slab_pages;
        for slab in &mut self.slabs {
            slab.plan.num_partials = self.num_partials;
        }
        self.merge_slabs(&mut partials)?;
        self.scratch.partials = partials;
        self.scratch.slabs = free;
        // A plan over slabs has no pages of its own.
        self.seq_lens.clear();
        Ok(())
    }

    /// Every page that the batch reads is in the pool.
    fn check_table<'a>(&self, spec: &MlaDecode, pages: PageTable<'a>) -> Result<PageRows<'a>> {
        if matches!(pages, PageTable::Device) {
            let detail = "a pool in several slabs needs page tables of the host: use one buffer with PageTable::Device";
            return Err(Error::LayoutMismatch { detail });
        }
        let rows = PageRows::new(pages, self.seq_lens.len(), &spec.kv)?;
        for (seq, &len) in self.seq_lens.iter().enumerate() {
            let used = rows.used(seq, len)?;
            if let Some(block) = used.iter().position(|&page| page as u32 >= spec.kv.num_pages) {
                let (page, num_pages) = (used[block].into(), spec.kv.num_pages);
                return Err(Error::PageOutOfRange { seq, block, page, num_pages });
            }
        }
        Ok(rows)
    }

    fn share_of(
        &self,
        slab: Slab,
        batch: &Batch<'_>,
        rows: PageRows<'_>,
        share: &mut Share,
        (kv_indptr, kv_indices): (&mut Vec<i32>, &mut Vec<i32>),
    ) -> Result<()> {
        let page_size = slab.kv.page_size;
        let Share { seq_lens, bounds, prefixes, before, first_sequences } = share;
        seq_lens.clear();
        bounds.clear();
        prefixes.clear();
        // Two numbers of the batch may stand for any number of query tokens.
        bounds.try_reserve(self.num_queries as usize).map_err(out_of_memory)?;
        seq_lens.try_reserve(self.seq_lens.len()).map_err(out_of_memory)?;
        kv_indptr.try_reserve(self.seq_lens.len() + 1).map_err(out_of_memory)?;
        kv_indptr.push(0);
        let groups = batch.shared_prefixes.len();
        let mut prefix_tokens = collected(repeat_n(0, groups), groups, "a plan")?;
        let mut first_sequences = first_sequences.iter().peekable();
        for (seq, &len) in self.seq_lens.iter().enumerate() {
            let used = &rows.row(seq)[..slab.kv.pages_for(len) as usize];
            before.clear();
            before.try_reserve(used.len() + 1).map_err(out_of_memory)?;
            kv_indices.try_reserve(used.len()).map_err(out_of_memory)?;
            let mut tokens = 0;
            for (&page, block) in used.iter().zip(0..) {
                before.push(tokens);
                if let Some(page) = slab.page(page) {
                    kv_indices.push(page);
                    tokens += page_size.min(len - block * page_size);
                }
            }
            before.push(tokens);
            let end = countable("page list of one step", kv_indices.len() as u64, "use a smaller batch")?;
            kv_indptr.push(end as i32);
            seq_lens.push(tokens as i32);
            // Tokens of the slab among the sequence's first ones.
            let among = |first: u32| {
                let (block, rest) = ((first / page_size) as usize, first % page_size);
                let is_here = rest > 0 && slab.page(used[block]).is_some();
                before[block] + if is_here { rest } else { 0 }
            };
            let (q_begin, q_end) = (batch.query_start_loc[seq] as u32, batch.query_start_loc[seq + 1] as u32);
            for token in q_begin..q_end {
                let visible =
                    batch.mask.visible(i64::from(token - q_begin), q_end - q_begin, len, token as usize);
                if visible > len {
                    let (what, got) = ("visible keys of a query token", visible.into());
                    let cure = "must be at most its sequence's seq_len";
                    return Err(Error::Shape { what, got, cure });
                }
                bounds.push(among(visible));
            }
            while let Some(&(_, group)) = first_sequences.next_if(|&&(first, _)| first == seq as u32) {
                prefix_tokens[group as usize] = among(batch.shared_prefixes[group as usize].tokens.min(len));
            }
        }
        prefixes.try_reserve(groups).map_err(out_of_memory)?;
        for (group, tokens) in batch.shared_prefixes.iter().zip(prefix_tokens) {
            prefixes.push(SharedPrefix::of(&group.sequences, tokens)?);
        }
        Ok(())
    }

    /// A merge for every query token, of its partial results in all slabs: of none where it sees no key.
    pub(super) fn merge_slabs(&mut self, partials: &mut [(u32, u32)]) -> Result<()> {
        self.merge_partials.try_reserve(partials.len()).map_err(out_of_memory)?;
        self.merges.try_reserve(self.num_queries as usize).map_err(out_of_memory)?;
        partials.sort_unstable();
        let mut partials = partials.iter().peekable();
        for token in 0..self.num_queries {
            let begin = self.merge_partials.len() as u32;
            while let Some(&(_, partial)) = partials.next_if(|&&(of, _)| of == token) {
                self.merge_partials.push(partial);
            }
            self.merges.push(Merge { token, begin, end: self.merge_partials.len() as u32 });
        }
        Ok(())
    }

    /// Each slab's plan with the spec that it is a plan of.
    pub(crate) fn slab_plans(&self, spec: &MlaDecode) -> impl Iterator<Item = (MlaDecode, &SlabPlan)> {
        let kv = move |(slab, plan): (u32, _)| {
            let first_page = slab.saturating_mul(self.slab_pages);
            let num_pages = self.slab_pages.min(spec.kv.num_pages.saturating_sub(first_page)).max(1);
            (MlaDecode { kv: KvSpec { num_pages, ..spec.kv }, ..*spec }, plan)
        };
        (0..).zip(&self.slabs).map(kv)
    }

    /// Gives query tokens the numbers that they have in a larger batch of `num_queries` query tokens.
    pub(crate) fn renumber(&mut self, tokens: &[u32], num_queries: u32) {
        for query in &mut self.queries {
            query.token = tokens[query.token as usize];
        }
        for merge in &mut self.merges {
            merge.token = tokens[merge.token as usize];
        }
        self.num_queries = num_queries;
        self.slabs.iter_mut().for_each(|slab| slab.plan.renumber(tokens, num_queries));
    }

    /// The table that a step is prepared with is that of the plan.
    ///
    /// # Errors
    /// [`Error::OtherSpec`], [`Error::Length`], [`Error::SeqLen`], [`Error::PageOutOfRange`], [`Error::OutOfMemory`], and
    /// [`Error::LayoutMismatch`] for other pages.
    pub(crate) fn check_slab_table(&self, spec: &MlaDecode, pages: PageTable<'_>) -> Result<()> {
        let mismatch = Err(Error::LayoutMismatch {
            detail: "the page table is not the one that was planned: plan with Batch::slabs of the table that the step is prepared with",
        });
        let Some(first) = self.slabs.first() else { return Ok(()) };
        if self.topk > 0 {
            // Lists name slots of the whole pool, so each slab has all of them.
            let slabs = spec.kv.num_slabs(self.slab_pages)? as usize;
            let alike = self.slabs.iter().all(|slab| slab.plan.topk == self.topk);
            return if alike && slabs == self.slabs.len() { Ok(()) } else { mismatch };
        }
        let batch = first.plan.seq_lens.len();
        let mut lens = collected(repeat_n(0u32, batch), batch, "a plan's pages")?;
        for slab in &self.slabs {
            if slab.plan.seq_lens.len() != batch {
                return mismatch;
            }
            lens.iter_mut().zip(&slab.plan.seq_lens).for_each(|(sum, len)| *sum = sum.saturating_add(*len));
        }
        if matches!(pages, PageTable::Device)
            || spec.kv.num_slabs(self.slab_pages)? as usize != self.slabs.len()
        {
            return mismatch;
        }
        let rows = PageRows::new(pages, batch, &spec.kv)?;
        for (seq, &len) in lens.iter().enumerate() {
            let used = rows.used(seq, len)?;
            let mut each = room_for(self.slabs.len(), "a plan's pages")?;
            for slab in &self.slabs {
                let range = slab.kv_indptr.get(seq).zip(slab.kv_indptr.get(seq + 1));
                let planned =
                    range.and_then(|(&begin, &end)| slab.kv_indices.get(begin as usize..end as usize));
                let Some(planned) = planned else { return mismatch };
                each.push(planned.iter());
            }
            for &page in used {
                let slab = (page as u32 / self.slab_pages) as usize;
                let local = (page as u32 % self.slab_pages) as i32;
                if each.get_mut(slab).and_then(Iterator::next) != Some(&local) {
                    return mismatch;
                }
            }
            if each.iter_mut().any(|rest| rest.next().is_some()) {
                return mismatch;
            }
        }
        Ok(())
    }
}

/// Whether a step was planned for a layer's slabs.
///
/// # Errors
/// [`Error::LayoutMismatch`].
pub(crate) fn check_slabs(step: u32, layer: u32) -> Result<()> {
    if step != layer {
        let detail = "the step was planned for a pool in other slabs than the binding's: use the same slab_pages in Batch::slabs and in KvView::in_slabs, and neither for a pool in one buffer";
        return Err(Error::LayoutMismatch { detail });
    }
    Ok(())
}
