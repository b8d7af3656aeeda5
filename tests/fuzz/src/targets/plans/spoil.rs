//! One number of a batch that is broken.

use wgpu_mla::{Plan, SplitPolicy};

use mla_support::paint::Sees;

use super::batch::Drawn;
use crate::source::Source;

/// What was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spoiled {
    Nothing,
    Batch,
    /// The step is prepared with another table than was planned: an entry differs.
    OtherTable(usize),
    /// A field of the plan is changed before it is prepared.
    Plan,
}

/// Breaks a number of one batch in five.
pub fn spoil(source: &mut Source<'_>, drawn: &mut Drawn) -> Spoiled {
    if !source.chance(48) {
        return Spoiled::Nothing;
    }
    let near = |source: &mut Source<'_>, old: i32| match source.below(3) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        _ => source.hostile() as i32,
    };
    match source.below(14) {
        0 | 1 if !drawn.lens.is_empty() => {
            let at = source.index(drawn.lens.len());
            drawn.lens[at] = near(source, drawn.lens[at]);
        }
        2 => {
            let at = source.index(drawn.starts.len());
            drawn.starts[at] = near(source, drawn.starts[at]);
        }
        3 | 4 if !drawn.table.is_empty() => {
            let at = source.index(drawn.table.len());
            drawn.table[at] = near(source, drawn.table[at]);
        }
        5 => {
            if let Sees::Bounds(bounds) = &mut drawn.sees {
                match source.below(3) {
                    0 => drop(bounds.pop()),
                    _ if bounds.is_empty() => bounds.push(0),
                    _ => {
                        let at = source.index(bounds.len());
                        bounds[at] = near(source, bounds[at] as i32) as u32;
                    }
                }
            } else {
                drawn.sees = Sees::Bounds(vec![source.hostile(); source.index(12)]);
            }
        }
        6 => {
            let count = drawn.prefixes.len();
            match drawn.prefixes.get_mut(source.index(count)) {
                Some(group) if source.chance(128) => group.tokens = source.hostile(),
                Some(group) => group.sequences.push(source.between(0, 6)),
                None => drawn.prefixes.push(wgpu_mla::SharedPrefix {
                    sequences: (0..source.between(0, 6)).collect(),
                    tokens: source.hostile(),
                }),
            }
        }
        7 => drawn.max_pages = near(source, drawn.max_pages as i32) as u32,
        8 => drawn.page_size = source.pick(&[0, 1, 4, 16, u32::MAX]),
        9 => {
            let mut indptr = drawn.csr().0;
            let at = source.index(indptr.len());
            indptr[at] = near(source, indptr[at]);
            drawn.indptr = Some(indptr);
        }
        10 => drawn.policy = SplitPolicy::FixedTokens(0),
        11 => drawn.tiling.rows_per_tile = source.hostile(),
        12 => return Spoiled::OtherTable(source.index(drawn.table.len())),
        _ => return Spoiled::Plan,
    }
    Spoiled::Batch
}

/// Changes a public field of a plan.
pub fn plan(source: &mut Source<'_>, plan: &mut Plan) {
    fn one<T>(source: &mut Source<'_>, of: &mut [T], change: impl FnOnce(&mut Source<'_>, &mut T)) {
        let at = source.index(of.len());
        if let Some(item) = of.get_mut(at) {
            change(source, item);
        }
    }
    match source.below(9) {
        0 | 1 => one(source, &mut plan.items, |source, item| {
            let to = if source.chance(128) { source.hostile() } else { source.between(0, 300) };
            let fields = [
                &mut item.first_row,
                &mut item.num_rows,
                &mut item.page_begin,
                &mut item.kv_begin,
                &mut item.kv_end,
                &mut item.partial,
                &mut item.pool,
                &mut item.reserved,
            ];
            let at = source.index(fields.len());
            if let Some(field) = fields.into_iter().nth(at) {
                *field = to;
            }
        }),
        2 => one(source, &mut plan.queries, |source, query| match source.below(2) {
            0 => query.token = source.hostile(),
            _ => query.visible = source.hostile(),
        }),
        3 => one(source, &mut plan.merges, |source, merge| match source.below(3) {
            0 => merge.token = source.hostile(),
            1 => merge.begin = source.hostile(),
            _ => merge.end = source.hostile(),
        }),
        4 => one(source, &mut plan.merge_partials, |source, partial| *partial = source.hostile()),
        5 => plan.num_partials = source.hostile(),
        6 => plan.num_queries = source.pick(&[0, 1, 2, 100, u32::MAX]),
        7 => one(source, &mut plan.seq_lens, |source, len| *len = source.hostile()),
        _ => one(source, &mut plan.page_begin, |source, begin| *begin = source.hostile()),
    }
}
