//! The template that a device makes a step's tables from: a checked plan, with the sequence of each of its items and query tokens.

use crate::base::error::{Error, Result};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use crate::cache::KvSpec;
use crate::plan::Plan;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use crate::plan::tables::Capacity;

/// The sequence of each item and of each query token.
pub(crate) struct Sequences {
    pub(crate) items: Vec<u32>,
    pub(crate) queries: Vec<u32>,
}

impl Sequences {
    /// # Errors
    /// [`Error::Shape`] for a plan that the device cannot cut down.
    pub(crate) fn of(plan: &Plan, num_heads: u32) -> Result<Self> {
        let bad = |what, got: usize, cure| Err(Error::Shape { what, got: got as u64, cure });
        if !plan.shared.is_empty() {
            let cure = "plan a batch of the device without shared_prefixes";
            return bad("shared prefixes of the plan", plan.shared.len(), cure);
        }
        if plan.topk() > 0 {
            let cure = "plan with Plan::new: a plan of Plan::sparse depends on no lengths that the device could know";
            return bad("topk of the plan", plan.topk() as usize, cure);
        }
        let cure = "plan with the spec and the tiling of the decode that runs it";
        let mut all = Self { items: Vec::new(), queries: vec![u32::MAX; plan.queries.len()] };
        for item in &plan.items {
            // Every sequence has a place in the page list, so no two begin at one.
            let Ok(sequence) = plan.page_begin.binary_search(&item.page_begin) else {
                return bad("page_begin of a work item", item.page_begin as usize, cure);
            };
            all.items.push(sequence as u32);
            let end = (u64::from(item.first_row) + u64::from(item.num_rows)).div_ceil(num_heads.into());
            let rows = (item.first_row / num_heads) as usize..end as usize;
            let Some(queries) = all.queries.get_mut(rows) else {
                return bad("rows of a work item", item.first_row as usize, cure);
            };
            queries.fill(sequence as u32);
        }
        for (query, &sequence) in plan.queries.iter().zip(&all.queries) {
            match plan.seq_lens.get(sequence as usize) {
                None => return bad("query token without a work item", query.token as usize, cure),
                Some(&len) if query.visible != len => {
                    let cure = "plan with Mask::Full: the device finds the causal bounds";
                    return bad("visible keys of a query token", query.visible as usize, cure);
                }
                Some(_) => {}
            }
        }
        Ok(all)
    }
}

/// The words of `plan` in `batch_lists.wgsl` and `batch_tables.cu` behind the first. Their number is the capacity's, so that a table is
/// replaced only where the step's buffers are: a sequence has at least 32 words of the page list.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn template(
    plan: &Plan,
    sequences: &Sequences,
    capacity: &Capacity,
    kv: &KvSpec,
) -> impl Iterator<Item = u32> + use<> {
    let header = capacity.header(kv);
    let counts = [
        plan.queries.len() as u32,
        plan.page_list_len(),
        header.items,
        header.queries,
        plan.seq_lens.len() as u32,
        0,
        0,
    ];
    let (items, queries): (&[u32], &[u32]) =
        (bytemuck::cast_slice(&plan.items), bytemuck::cast_slice(&plan.queries));
    let sections = [items, &sequences.items, queries, &sequences.queries, &plan.page_begin];
    let words: Vec<u32> = counts.iter().chain(sections.into_iter().flatten()).copied().collect();
    let most = 8 + 9 * capacity.items as usize + 3 * capacity.queries as usize + capacity.pages as usize / 32;
    let padding = (most + 1).saturating_sub(words.len());
    words.into_iter().chain(std::iter::repeat_n(0, padding))
}
