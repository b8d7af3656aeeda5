//! The largest logits of rows.

use wgpu_mla::{Dtype, Error, PageTable, TopK, TopKArgs, TopKBatch, TopKPages, TopKSlots};

use super::array::{Array, Holds};
use super::case::{Case, Draw};
use super::view;

/// Rows, and where what is chosen of them goes.
#[derive(Debug)]
pub struct Chosen {
    rows: u32,
    columns: u32,
    out_row: u32,
    lengths: Option<Vec<i32>>,
    has_values: bool,
    table: Vec<i32>,
    max_pages: u32,
    starts: Vec<i32>,
    first_token: u32,
}

impl Chosen {
    fn out_rows(&self) -> u32 {
        if self.rows == 0 { 0 } else { self.out_row.saturating_add(self.rows) }
    }
}

impl Case for TopK {
    type Call = Chosen;

    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Chosen) {
        let slots = draw
            .source
            .chance(128)
            .then(|| TopKSlots { page_size: draw.number(1, 4), num_pages: draw.number(1, 6) });
        let spec = TopK { k: draw.number(1, 9), slots };
        let (rows, columns, out_row) = (draw.number(0, 4), draw.number(1, 12), draw.number(0, 2));
        let count = rows.min(16);
        let lengths = draw
            .source
            .chance(160)
            .then(|| (0..count).map(|_| draw.number(0, columns.min(64)) as i32).collect::<Vec<_>>());
        let has_values = draw.source.chance(128);
        let first_token = draw.number(0, 2);
        // Two sequences, the first perhaps empty.
        let end = first_token.min(64) + count;
        let first_end = draw.number(0, end);
        draw.is_broken |= first_end > end;
        let starts = vec![0, first_end as i32, end as i32];
        let (mut table, mut max_pages) = (Vec::new(), 0);
        if let Some(slots) = slots {
            max_pages = columns.min(64).div_ceil(slots.page_size.max(1));
            let last = slots.num_pages.clamp(1, 64) - 1;
            table = (0..2 * max_pages).map(|_| draw.number(0, last) as i32).collect();
        }
        (spec, Chosen { rows, columns, out_row, lengths, has_values, table, max_pages, starts, first_token })
    }

    fn arrays(&self, call: &Chosen) -> Vec<Array> {
        let chosen = || Array::written(Holds::Counters, [1, call.out_rows(), 1], self.k, 1);
        let mut all = vec![
            Array::read(Holds::Lses, [1, call.rows, 1], call.columns, 1),
            Array::whole(Holds::Positions(call.columns), call.rows, 1),
            chosen(),
        ];
        if call.has_values {
            all.push(Array { holds: Holds::Elements(Dtype::F32), ..chosen() });
        }
        all
    }

    fn args<B: Copy>(&self, call: &Chosen, arrays: &[Array], at: &[B]) -> Result<TopKArgs<B>, Error> {
        Ok(TopKArgs {
            logits: view(&arrays[0], at[0]),
            columns: call.columns,
            lengths: at[1],
            indices: view(&arrays[2], at[2]),
            values: call.has_values.then(|| view(&arrays[3], at[3])),
        })
    }

    fn with_input<R>(
        &self,
        (): &(),
        call: &Chosen,
        then: impl FnOnce(Result<TopKBatch<'_>, Error>) -> R,
    ) -> R {
        let pages = PageTable::Dense { block_table: &call.table, max_pages: call.max_pages };
        let pages = TopKPages { pages, query_start_loc: &call.starts, first_token: call.first_token };
        then(Ok(TopKBatch {
            rows: call.rows,
            lengths: call.lengths.as_deref(),
            pages: self.slots.map(|_| pages),
            out_row: call.out_row,
        }))
    }

    fn touches(&self, call: &Chosen, _: usize, [_, row, _]: [u64; 3]) -> bool {
        (call.out_row.into()..u64::from(call.out_rows())).contains(&row)
    }
}
