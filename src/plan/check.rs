//! Plans from outside: every index in one is checked before a kernel follows it.

use super::{DIRECT, Merge, Plan, WorkItem};
use crate::{Error, MlaSpec, Result};

/// A plan's fields are public and a plan may be of another decode, so it may hold anything. After this, and with a page list
/// whose every word is a page (see [`crate::write_tables`]), a kernel of at least `rows_per_tile` rows stays inside of its
/// tables, partial results and the rows of `num_queries` query tokens, and its loops end.
///
/// # Errors
/// [`Error::Shape`].
pub(crate) fn check_plan(plan: &Plan, spec: &MlaSpec, rows_per_tile: u32) -> Result<()> {
    let fits = plan.items.iter().all(item_fits(plan, spec, rows_per_tile))
        && plan.queries.iter().all(|query| query.token < plan.num_queries)
        && merges_fit(plan, spec.shape.num_heads)
        && pages_fit(plan, spec);
    if !fits {
        let (what, got) = ("plan of items", plan.items.len() as u64);
        let cure = "plan with the spec and the tiling of the decode that runs it";
        return Err(Error::Shape { what, got, cure });
    }
    Ok(())
}

fn item_fits(plan: &Plan, spec: &MlaSpec, rows_per_tile: u32) -> impl Fn(&WorkItem) -> bool {
    let rows = plan.queries.len() as u64 * u64::from(spec.shape.num_heads);
    let (pages, slots) = (u64::from(plan.page_list_len()), u64::from(plan.num_slots));
    let kv = spec.kv;
    move |item| {
        let num_rows = u64::from(item.num_rows);
        (1..=rows_per_tile).contains(&item.num_rows)
            && u64::from(item.first_row) + num_rows <= rows
            && item.kv_begin <= item.kv_end
            // A pool holds fewer than 2^31 tokens; a kernel counts some blocks past the end.
            && item.kv_end <= i32::MAX as u32
            && u64::from(item.page_begin) + u64::from(kv.pages_for(item.kv_end)) <= pages
            && (item.slot == DIRECT || u64::from(item.slot) + num_rows <= slots)
    }
}

fn merges_fit(plan: &Plan, num_heads: u32) -> bool {
    let merge_fits = |merge: &Merge| {
        merge.token < plan.num_queries
            && merge.begin <= merge.end
            && merge.end as usize <= plan.merge_slots.len()
    };
    let slot_fits = |&slot: &u32| u64::from(slot) + u64::from(num_heads) <= plan.num_slots.into();
    plan.merges.iter().all(merge_fits) && plan.merge_slots.iter().all(slot_fits)
}

/// The page list has a place for every sequence, one after the other from its front, and prefixes are parts of sequences.
fn pages_fit(plan: &Plan, spec: &MlaSpec) -> bool {
    let room = |(begin, &len): (&[u32], &u32)| {
        u64::from(begin[0]) + u64::from(spec.kv.pages_for(len)) <= begin[1].into()
    };
    let has = |seq: u32, tokens: u32| plan.seq_lens.get(seq as usize).is_some_and(|&len| tokens <= len);
    // A plan that was never made, or failed, has no place at all.
    let nothing = plan.page_begin.is_empty() && plan.seq_lens.is_empty();
    (nothing || plan.page_begin.len() == plan.seq_lens.len() + 1)
        && plan.page_begin.first().is_none_or(|&first| first == 0)
        && plan.page_begin.windows(2).zip(&plan.seq_lens).all(room)
        && plan.shared.iter().all(|&(first, other, tokens)| has(first, tokens) && has(other, tokens))
}
