//! Plans of sparse decodes: each query token attends a list of slots of its own, which kernels read on the device.

use super::{Plan, QueryToken, Run, SlabPlan, SplitPolicy, Tiling, countable, out_of_memory};
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;

/// One step's batch of a sparse decode ([`crate::DecodeOptions::topk`]), as [`Plan::sparse`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseBatch {
    /// Query tokens, of all sequences.
    pub num_queries: u32,
    /// Entries of each query token's list that may count: at most [`crate::DecodeOptions::topk`].
    pub topk: u32,
    /// Pages of a slab, for a pool in several ([`crate::KvView::in_slabs`]): each slab is attended by the slots that are in it. `None`
    /// for a pool in one buffer.
    pub slab_pages: Option<u32>,
}

impl SparseBatch {
    /// A batch over a pool in one buffer.
    #[must_use]
    pub const fn new(num_queries: u32, topk: u32) -> Self {
        Self { num_queries, topk, slab_pages: None }
    }
}

impl Plan {
    /// Plans a step of a sparse decode. It depends on the numbers of the batch alone, so commands that were recorded once serve any lists.
    /// A split is a range of a list's entries.
    ///
    /// # Errors
    /// [`Error::Shape`] for a `topk` of 0 or past 2^31 - 1, and those of [`Plan::new`].
    pub fn sparse(
        spec: &MlaDecode,
        tiling: &Tiling,
        batch: &SparseBatch,
        policy: SplitPolicy,
    ) -> Result<Self> {
        let mut plan = Self::default();
        plan.update_sparse(spec, tiling, batch, policy)?;
        Ok(plan)
    }

    /// Plans the next step in the same memory.
    ///
    /// # Errors
    /// The errors of [`Plan::sparse`]; the plan is then empty.
    pub fn update_sparse(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        batch: &SparseBatch,
        policy: SplitPolicy,
    ) -> Result<()> {
        self.clear();
        self.scratch.is_slab = false;
        let done = self.build_sparse(spec, tiling, batch, policy);
        if done.is_err() {
            self.clear();
        }
        done
    }

    /// Entries of each query token's list of slots; 0 for a plan over pages.
    #[must_use]
    pub fn topk(&self) -> u32 {
        self.topk
    }

    fn build_sparse(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        batch: &SparseBatch,
        policy: SplitPolicy,
    ) -> Result<()> {
        spec.check()?;
        super::check_policy(policy)?;
        if batch.topk == 0 || batch.topk > i32::MAX as u32 {
            let cure = "must be 1 to 2^31 - 1: the entries of a list of slots";
            return Err(Error::Shape { what: "topk of the plan", got: batch.topk.into(), cure });
        }
        match batch.slab_pages {
            Some(pages) if spec.kv.num_slabs(pages)? > 1 => {
                self.build_sparse_slabs(spec, tiling, batch, pages, policy)
            }
            _ => self.build_lists(spec, tiling, batch, policy),
        }
    }

    /// Plans lists of slots in one buffer, or those of them that are in one slab.
    fn build_lists(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        &SparseBatch { num_queries, topk, .. }: &SparseBatch,
        policy: SplitPolicy,
    ) -> Result<()> {
        self.num_heads = spec.shape.num_heads;
        self.page_size = spec.kv.page_size;
        (self.num_queries, self.topk) = (num_queries, topk);
        let rows = u64::from(num_queries) * u64::from(self.num_heads);
        countable("query rows of one step", rows, "use a smaller batch")?;
        self.check_least_room(self.num_heads, tiling.rows_per_tile)?;
        self.queries.try_reserve(num_queries as usize).map_err(out_of_memory)?;
        self.scratch.runs.try_reserve(num_queries as usize).map_err(out_of_memory)?;
        let partial = self.scratch.is_slab;
        for token in 0..num_queries {
            self.queries.push(QueryToken { token, visible: topk });
            // A tile has rows of one query token, since others have other lists.
            let run = Run { first_query: token, num_queries: 1, end: topk, partial, ..Run::default() };
            self.scratch.runs.push(run);
        }
        self.cut(self.num_heads, tiling, policy)?;
        if !self.scratch.is_slab {
            self.list_merges();
        }
        Ok(())
    }

    fn build_sparse_slabs(
        &mut self,
        spec: &MlaDecode,
        tiling: &Tiling,
        batch: &SparseBatch,
        slab_pages: u32,
        policy: SplitPolicy,
    ) -> Result<()> {
        self.num_heads = spec.shape.num_heads;
        self.page_size = spec.kv.page_size;
        (self.num_queries, self.topk) = (batch.num_queries, batch.topk);
        let mut free = std::mem::take(&mut self.scratch.slabs);
        let mut partials = std::mem::take(&mut self.scratch.partials);
        for _ in 0..spec.kv.num_slabs(slab_pages)? {
            let SlabPlan { mut plan, mut kv_indptr, mut kv_indices } = free.pop().unwrap_or_default();
            kv_indptr.clear();
            kv_indices.clear();
            plan.clear();
            plan.scratch.is_slab = true;
            plan.num_partials = self.num_partials;
            plan.scratch.words = self.scratch.words;
            plan.build_lists(spec, tiling, batch, policy)?;
            self.num_partials = plan.num_partials;
            self.scratch.words = plan.scratch.words;
            partials.try_reserve(plan.scratch.partials.len()).map_err(out_of_memory)?;
            partials.extend_from_slice(&plan.scratch.partials);
            self.slabs.push(SlabPlan { plan, kv_indptr, kv_indices });
        }
        self.slab_pages = slab_pages;
        for slab in &mut self.slabs {
            slab.plan.num_partials = self.num_partials;
        }
        self.merge_slabs(&mut partials)?;
        self.scratch.partials = partials;
        self.scratch.slabs = free;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::cache::{KvSpec, MlaShape};
    use crate::plan::DIRECT;

    const TILING: Tiling = Tiling {
        rows_per_tile: 16,
        tokens_per_block: 16,
        target_items: 4,
        min_split_tokens: 16,
        single_sequence_items: 0,
        item_overhead_tokens: 0,
    };

    fn spec(num_heads: u32) -> MlaDecode {
        let shape = MlaShape { num_heads, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 };
        MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 }
    }

    /// A list may be longer than the pool, and its tiles never have rows of two query tokens.
    #[test]
    fn a_tile_has_one_list() {
        let plan = Plan::sparse(&spec(6), &TILING, &SparseBatch::new(3, 40), SplitPolicy::OneSplit).unwrap();
        let items: Vec<_> =
            plan.items.iter().map(|item| (item.first_row, item.num_rows, item.kv_end)).collect();
        assert_eq!(items, [(0, 6, 40), (6, 6, 40), (12, 6, 40)]);
        assert!(plan.items.iter().all(|item| item.partial == DIRECT && item.page_begin == 0));
        assert_eq!((plan.topk(), plan.page_list_len(), plan.num_queries), (40, 0, 3));
        let split =
            Plan::sparse(&spec(6), &TILING, &SparseBatch::new(3, 40), SplitPolicy::FixedTokens(16)).unwrap();
        assert_eq!((split.items.len(), split.merges.len()), (9, 3));
        assert_eq!(
            Plan::sparse(&spec(6), &TILING, &SparseBatch::new(0, 40), SplitPolicy::Auto).unwrap().items,
            []
        );
    }

    #[test]
    fn lists_of_no_entry_are_refused() {
        for topk in [0, 1 << 31] {
            let error =
                Plan::sparse(&spec(6), &TILING, &SparseBatch::new(3, topk), SplitPolicy::Auto).unwrap_err();
            assert!(matches!(error, Error::Shape { what: "topk of the plan", .. }), "{error}");
        }
        let most = Plan::sparse(&spec(128), &TILING, &SparseBatch::new(u32::MAX, 1), SplitPolicy::OneSplit);
        assert!(matches!(most, Err(Error::Limit { .. })));
    }

    /// Each slab has all lists, whose slots elsewhere it skips, and all partial results are merged.
    #[test]
    fn slabs_attend_the_same_lists() {
        let batch = SparseBatch { slab_pages: Some(1), ..SparseBatch::new(3, 40) };
        let plan = Plan::sparse(&spec(6), &TILING, &batch, SplitPolicy::OneSplit).unwrap();
        assert_eq!((plan.slabs().len(), plan.slab_pages(), plan.items.len()), (2, 1, 0));
        let partials: Vec<Vec<u32>> = plan
            .slabs()
            .iter()
            .map(|slab| slab.plan().items.iter().map(|item| item.partial).collect())
            .collect();
        assert_eq!(partials, [vec![0, 6, 12], vec![18, 24, 30]]);
        assert_eq!((plan.num_partials, &plan.merge_partials[..]), (36, &[0, 18, 6, 24, 12, 30][..]));
    }
}
