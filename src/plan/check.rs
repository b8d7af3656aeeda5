//! Checks of a batch before it is planned, and of a caller's plan before a kernel follows its indices.

use super::{Batch, DIRECT, Merge, Plan, WorkItem, countable, out_of_memory};
use crate::base::error::{Error, Result};
use crate::base::mask::Mask;
use crate::cache::KvSpec;
use crate::cache::decode_spec::MlaDecode;
use crate::plan::tables::PageTable;

impl Plan {
    /// The page list has a place for every sequence's pages.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub(crate) fn check_places(&self, kv: &KvSpec) -> Result<()> {
        if pages_fit(self, kv) { Ok(()) } else { Err(other_plan(self)) }
    }

    pub(crate) fn check_batch(&mut self, spec: &MlaDecode, batch: &Batch<'_>) -> Result<()> {
        self.num_heads = spec.shape.num_heads;
        self.page_size = spec.kv.page_size;
        let starts = batch.query_start_loc;
        if starts.len() != batch.seq_lens.len() + 1 {
            return Err(Error::Length {
                what: "query_start_loc",
                got: starts.len() as u64,
                want: batch.seq_lens.len() as u64 + 1,
                cure: "one entry a sequence and one more for the end",
            });
        }
        if let Some(index) =
            (0..starts.len()).find(|&i| if i == 0 { starts[0] != 0 } else { starts[i] < starts[i - 1] })
        {
            return Err(Error::QueryStartLoc { index, got: starts[index].into() });
        }
        self.num_queries = starts[starts.len() - 1] as u32;
        if let Mask::Bounds(bounds) = batch.mask
            && bounds.len() != self.num_queries as usize
        {
            return Err(Error::Length {
                what: "Mask::Bounds",
                got: bounds.len() as u64,
                want: self.num_queries.into(),
                cure: "one bound a query token",
            });
        }
        // A token with a shared prefix stands twice.
        let rows = u64::from(self.num_queries) * u64::from(spec.shape.num_heads) * 2;
        countable("query rows of one step", rows, "use a smaller batch")?;
        // A slab's tokens are some of the batch's, which were counted. They may be more than its slots where a row names a page twice.
        let most = if self.scratch.is_slab { u64::MAX } else { spec.kv.num_slots() };
        let max = i64::try_from(most).unwrap_or(i64::MAX);
        let (count, groups) = (batch.seq_lens.len(), batch.shared_prefixes.len());
        self.seq_lens.try_reserve(count).map_err(out_of_memory)?;
        self.page_begin.try_reserve(count + 1).map_err(out_of_memory)?;
        self.scratch.own_begin.try_reserve(count).map_err(out_of_memory)?;
        self.scratch.runs.try_reserve(count + groups).map_err(out_of_memory)?;
        for (seq, &len) in batch.seq_lens.iter().enumerate() {
            if len < 0 || i64::from(len) > max {
                let cure = "the pool has no more slots: correct seq_lens, or make the pool of more pages";
                return Err(Error::SeqLen { seq, got: len.into(), max, cure });
            }
            self.seq_lens.push(len as u32);
        }
        Ok(())
    }

    /// Groups are checked even where the policy or their length leaves them unused: a mistake shows on the first batch.
    pub(super) fn check_prefixes(&mut self, batch: &Batch<'_>) -> Result<()> {
        let in_group = &mut self.scratch.own_begin;
        in_group.resize(self.seq_lens.len(), 0);
        for &seq in batch.shared_prefixes.iter().flat_map(|group| &group.sequences) {
            match in_group.get_mut(seq as usize) {
                Some(seen @ 0) => *seen = 1,
                _ => {
                    let cure = "must be in the batch, and in one shared prefix only";
                    return Err(Error::Shape { what: "SharedPrefix sequence", got: seq.into(), cure });
                }
            }
        }
        in_group.fill(0);
        Ok(())
    }
}

/// Most of a plan's fields are public and a plan may be of another decode, so it may hold anything. After this, and with a page list
/// whose every word is a page (see [`crate::write_tables`]), a kernel of at least `rows_per_tile` rows stays inside of its
/// tables, partial results and the rows of `num_queries` query tokens, and its loops end.
///
/// # Errors
/// [`Error::OtherSpec`] and [`Error::Shape`].
pub(crate) fn check_plan(
    plan: &Plan,
    spec: &MlaDecode,
    pages: PageTable<'_>,
    rows_per_tile: u32,
) -> Result<()> {
    // A binding in slabs is recorded with the plans of those slabs, or not at all.
    if plan.slabs.is_empty() != (plan.slab_pages == 0) {
        return Err(other_plan(plan));
    }
    if plan.scratch.is_slab {
        let detail = "the plan is of one slab, whose partial results nothing merges: prepare with the plan that Plan::new made";
        return Err(Error::LayoutMismatch { detail });
    }
    if plan.slabs.is_empty() {
        return check_one(plan, spec, rows_per_tile);
    }
    plan.check_slab_table(spec, pages)?;
    check_one(plan, spec, rows_per_tile)?;
    for (slab_spec, slab) in plan.slab_plans(spec) {
        // Partial results and query tokens are those of the whole plan.
        if slab.plan.num_partials != plan.num_partials || slab.plan.num_queries != plan.num_queries {
            return Err(other_plan(plan));
        }
        check_one(&slab.plan, &slab_spec, rows_per_tile)?;
    }
    Ok(())
}

fn other_plan(plan: &Plan) -> Error {
    let (what, got) = ("plan of items", plan.items.len() as u64);
    Error::Shape { what, got, cure: "plan with the spec and the tiling of the decode that runs it" }
}

fn check_one(plan: &Plan, spec: &MlaDecode, rows_per_tile: u32) -> Result<()> {
    for (what, got, want) in [
        ("num_heads of the plan", plan.num_heads, spec.shape.num_heads),
        ("page_size of the plan", plan.page_size, spec.kv.page_size),
    ] {
        // An empty plan is of any spec.
        if got != want && !(plan.seq_lens.is_empty() && plan.slabs.is_empty() && plan.topk == 0) {
            return Err(Error::OtherSpec { what, got, want });
        }
    }
    let fits = plan.items.iter().all(item_fits(plan, spec, rows_per_tile))
        && plan.queries.iter().all(|query| query.token < plan.num_queries)
        && merges_fit(plan, spec.shape.num_heads)
        && pages_fit(plan, &spec.kv);
    if !fits {
        return Err(other_plan(plan));
    }
    Ok(())
}

fn item_fits(plan: &Plan, spec: &MlaDecode, rows_per_tile: u32) -> impl Fn(&WorkItem) -> bool {
    let rows = plan.queries.len() as u64 * u64::from(spec.shape.num_heads);
    let (pages, partials) = (u64::from(plan.page_list_len()), u64::from(plan.num_partials));
    let (kv, heads, topk) = (spec.kv, spec.shape.num_heads.max(1), plan.topk);
    move |item| {
        let num_rows = u64::from(item.num_rows);
        (1..=rows_per_tile).contains(&item.num_rows)
            && u64::from(item.first_row) + num_rows <= rows
            && item.kv_begin <= item.kv_end
            // A pool holds fewer than 2^31 tokens; a kernel counts some blocks past the end.
            && item.kv_end <= i32::MAX as u32
            && if topk > 0 {
                // The rows of one query token, over entries of its list.
                item.kv_end <= topk && item.first_row % heads + item.num_rows <= heads
            } else {
                u64::from(item.page_begin) + u64::from(kv.pages_for(item.kv_end)) <= pages
            }
            && (item.partial == DIRECT || u64::from(item.partial) + num_rows <= partials)
    }
}

fn merges_fit(plan: &Plan, num_heads: u32) -> bool {
    let merge_fits = |merge: &Merge| {
        merge.token < plan.num_queries
            && merge.begin <= merge.end
            && merge.end as usize <= plan.merge_partials.len()
    };
    let partial_fits = |&partial: &u32| u64::from(partial) + u64::from(num_heads) <= plan.num_partials.into();
    plan.merges.iter().all(merge_fits) && plan.merge_partials.iter().all(partial_fits)
}

/// The page list has a place for every sequence, one after the other from its front, and prefixes are parts of sequences.
fn pages_fit(plan: &Plan, kv: &KvSpec) -> bool {
    let room =
        |(begin, &len): (&[u32], &u32)| u64::from(begin[0]) + u64::from(kv.pages_for(len)) <= begin[1].into();
    let has = |seq: u32, tokens: u32| plan.seq_lens.get(seq as usize).is_some_and(|&len| tokens <= len);
    // A plan that was never made, or failed, has no place at all.
    let nothing = plan.page_begin.is_empty() && plan.seq_lens.is_empty();
    (nothing || plan.page_begin.len() == plan.seq_lens.len() + 1)
        && plan.page_begin.first().is_none_or(|&first| first == 0)
        && plan.page_begin.windows(2).zip(&plan.seq_lens).all(room)
        && plan.shared.iter().all(|&(first, other, tokens)| has(first, tokens) && has(other, tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::cache::MlaShape;
    use crate::plan::{SlabTable, SplitPolicy, Tiling};

    /// A plan for one buffer that says that it is of slabs would be recorded with a binding in slabs, whose first buffer has fewer pages
    /// than the page list names.
    #[test]
    fn slabs_and_their_pages_go_together() {
        let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let kv = KvSpec { layout: Dtype::F32.into(), page_size: 1, num_pages: 4096 };
        let spec = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
        let tiling = Tiling {
            rows_per_tile: 16,
            tokens_per_block: 16,
            target_items: 4,
            min_split_tokens: 16,
            single_sequence_items: 0,
            item_overhead_tokens: 0,
        };
        let pages = PageTable::Dense { block_table: &[4095], max_pages: 1 };
        let check = |plan: &Plan, pages| check_plan(plan, &spec, pages, 16);
        let mut plan = Plan::new(&spec, &tiling, &Batch::new(&[1], &[0, 1]), SplitPolicy::Auto).unwrap();
        assert_eq!(check(&plan, pages), Ok(()));
        plan.slab_pages = 64;
        for pages in [pages, PageTable::Device] {
            assert!(matches!(check(&plan, pages), Err(Error::Shape { what: "plan of items", .. })));
        }

        let slabs = Some(SlabTable { pages, slab_pages: 64 });
        let batch = Batch { slabs, ..Batch::new(&[1], &[0, 1]) };
        let mut plan = Plan::new(&spec, &tiling, &batch, SplitPolicy::Auto).unwrap();
        assert_eq!(check(&plan, pages), Ok(()));
        for slab_pages in [0, 1, 63, 65, 4096, u32::MAX] {
            plan.slab_pages = slab_pages;
            check(&plan, pages).unwrap_err();
        }
        plan.slab_pages = 64;
        plan.slabs.swap(0, 63);
        check(&plan, pages).unwrap_err();
        plan.slabs.clear();
        check(&plan, pages).unwrap_err();
    }
}
