//! From a batch to runs of keys: the work list that every backend follows.

use super::{IndexerLogits, IndexerLogitsBatch, IndexerLogitsExtent};
use crate::base::error::{Error, Result};
use crate::base::mask::Mask;
use crate::base::memory::room_for;
use crate::cache::KvSpec;
use crate::plan::tables::{PageRows, PageTable};

/// Consecutive keys of one row, and columns behind them that get -inf. One workgroup does it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Run {
    /// Row of the logits.
    pub row: u32,
    /// Query token.
    pub token: u32,
    /// Where the pages of its sequence begin in [`Runs::pages`]; that of key `j` is `j / page_size` further.
    pub pages: u32,
    /// The first key: a multiple of the device's block.
    pub begin: u32,
    /// One past the last key, all of which the row sees; `begin` or less for none.
    pub end: u32,
    /// Columns from `end` up to this one get -inf; none where it is no larger.
    pub fill_end: u32,
}

/// Words of a run in a table.
#[cfg(feature = "cuda")]
pub(crate) const RUN_WORDS: u32 = 6;

/// How a device cuts its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Keys that a workgroup scores at a time: runs are multiples of it.
    pub block: u32,
    /// Workgroups that fill the device.
    pub target: u32,
}

/// A batch, cut and checked.
#[derive(Debug, Default)]
pub struct Runs {
    /// The longest first, so that a device ends on short ones.
    pub runs: Vec<Run>,
    /// Pages of the scored sequences, each id in the pool.
    pub pages: Vec<u32>,
    /// How far they reach.
    pub extent: IndexerLogitsExtent,
}

/// The most runs of a step, and entries of its page list.
const MOST: u64 = 1 << 26;
/// Waves of runs where rows alone fill the device: more than one, so that rows of different lengths even out.
const WAVES: u64 = 4;
/// Columns that one run fills, where it has no key.
const FILL: u32 = 1 << 14;

/// A row that is scored.
#[derive(Debug, Clone, Copy)]
struct Row {
    token: u32,
    pages: u32,
    visible: u32,
}

impl IndexerLogits {
    /// Checks a batch and cuts it for a device.
    ///
    /// # Errors
    /// The errors of `prepare`: see [`IndexerLogits`].
    pub(crate) fn runs(&self, batch: &IndexerLogitsBatch<'_>, cut: Cut) -> Result<Runs> {
        let kv = self.index.kv();
        check_tables(batch)?;
        let mut all = Runs::default();
        let rows = self.rows(batch, &kv, &mut all)?;
        let longest = rows.iter().map(|row| row.visible).max().unwrap_or(0);
        all.extent = IndexerLogitsExtent {
            tokens: if rows.is_empty() { 0 } else { batch.tokens.end },
            rows: rows.len() as u32,
            columns: if rows.is_empty() { 0 } else { longest.max(batch.fill) },
        };
        let run_keys = run_blocks(&rows, cut).saturating_mul(cut.block);
        let fills = |row: &Row| batch.fill.saturating_sub(row.visible).div_ceil(FILL);
        let need = |row: &Row| u64::from(row.visible.div_ceil(run_keys)) + u64::from(fills(row));
        let need = rows.iter().map(need).sum::<u64>();
        counted("runs of indexer_logits", need)?;
        all.runs = room_for(need as usize, "runs of indexer_logits")?;
        for (number, &Row { token, pages, visible }) in rows.iter().enumerate() {
            let run = Run { row: number as u32, token, pages, ..Run::default() };
            let mut begin = 0;
            while begin < visible {
                let end = visible.min(begin.saturating_add(run_keys));
                all.runs.push(Run { begin, end, fill_end: end, ..run });
                begin = end;
            }
            while begin < batch.fill {
                let fill_end = batch.fill.min(begin.saturating_add(FILL));
                all.runs.push(Run { begin, end: begin, fill_end, ..run });
                begin = fill_end;
            }
        }
        // An unstable sort needs no memory; with row and first key the order is total.
        all.runs.sort_unstable_by_key(|run| (std::cmp::Reverse(run.end - run.begin), run.row, run.begin));
        Ok(all)
    }

    /// The rows that are scored; their pages go to `all`.
    fn rows(&self, batch: &IndexerLogitsBatch<'_>, kv: &KvSpec, all: &mut Runs) -> Result<Vec<Row>> {
        let tokens = batch.tokens.clone();
        let pages = PageRows::new(batch.pages, batch.seq_lens.len(), kv)?;
        let mut rows = room_for(tokens.len(), "rows of indexer_logits")?;
        for (seq, loc) in batch.query_start_loc.windows(2).enumerate() {
            let (q_begin, q_end) = (loc[0] as u32, loc[1] as u32);
            let (first, end) = (q_begin.max(tokens.start), q_end.min(tokens.end));
            let len = batch.seq_lens[seq];
            let Ok(len) = u32::try_from(len) else { return Err(pages.too_short(seq, len.into())) };
            let used = pages.used(seq, len)?;
            if first >= end {
                continue;
            }
            let list = all.pages.len() as u32;
            let visible = |token: u32| {
                let seen = batch.mask.visible((token - q_begin).into(), q_end - q_begin, len, token as usize);
                seen.min(len)
            };
            let most = (first..end).map(visible).max().unwrap_or(0);
            let used = &used[..kv.pages_for(most) as usize];
            counted("pages of indexer_logits", all.pages.len() as u64 + used.len() as u64)?;
            let out_of_memory = |_| Error::OutOfMemory { what: "pages of indexer_logits" };
            all.pages.try_reserve(used.len()).map_err(out_of_memory)?;
            // A negative id becomes a large one, so one comparison finds both kinds.
            if let Some(block) = used.iter().position(|&page| page as u32 >= kv.num_pages) {
                let (page, num_pages) = (used[block].into(), kv.num_pages);
                return Err(Error::PageOutOfRange { seq, block, page, num_pages });
            }
            all.pages.extend(used.iter().map(|&page| page as u32));
            rows.extend((first..end).map(|token| Row { token, pages: list, visible: visible(token) }));
        }
        Ok(rows)
    }
}

/// Blocks of a run: as long as fill the device in one wave or in a few.
fn run_blocks(rows: &[Row], cut: Cut) -> u32 {
    let blocks = |row: &Row| u64::from(row.visible.div_ceil(cut.block));
    let runs = |length: u64| rows.iter().map(|row| blocks(row).div_ceil(length)).sum::<u64>();
    let (longest, target) = (rows.iter().map(blocks).max().unwrap_or(0).max(1), u64::from(cut.target.max(1)));
    let scored = rows.iter().filter(|row| row.visible > 0).count() as u64;
    let most = if scored > target { scored.max(target * WAVES) } else { target };
    // The shortest with no more runs than that: longer ones are no more.
    let (mut least, mut enough) = (1, longest);
    while least < enough {
        let length = least.midpoint(enough);
        if runs(length) <= most { enough = length } else { least = length + 1 }
    }
    enough as u32
}

fn counted(what: &'static str, need: u64) -> Result<()> {
    if need > MOST {
        let cure = "score fewer query tokens a step: IndexerLogitsBatch::tokens";
        return Err(Error::Limit { what, need, limit: MOST, cure });
    }
    Ok(())
}

/// The lists of a batch agree with each other.
fn check_tables(batch: &IndexerLogitsBatch<'_>) -> Result<()> {
    if matches!(batch.pages, PageTable::Device) {
        let detail = "indexer_logits takes its pages from the host: PageTable::Dense or PageTable::Csr";
        return Err(Error::LayoutMismatch { detail });
    }
    let (starts, cure) = (batch.query_start_loc, "one entry a sequence and one more for the end");
    let (got, want) = (starts.len() as u64, batch.seq_lens.len() as u64 + 1);
    if got != want {
        return Err(Error::Length { what: "query_start_loc", got, want, cure });
    }
    let wrong = |i: &usize| if *i == 0 { starts[0] != 0 } else { starts[*i] < starts[*i - 1] };
    if let Some(index) = (0..starts.len()).find(wrong) {
        return Err(Error::QueryStartLoc { index, got: starts[index].into() });
    }
    let num_queries = starts[starts.len() - 1] as u32;
    if batch.tokens.start > batch.tokens.end || batch.tokens.end > num_queries {
        let cure = "must not be before their start, nor past the batch's query tokens";
        return Err(Error::Shape { what: "the end of tokens", got: batch.tokens.end.into(), cure });
    }
    if let Mask::Bounds(bounds) = batch.mask
        && bounds.len() != num_queries as usize
    {
        let (got, want) = (bounds.len() as u64, num_queries.into());
        return Err(Error::Length { what: "Mask::Bounds", got, want, cure: "one bound a query token" });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{IndexFormat, IndexSpec};

    const SPEC: IndexerLogits = IndexerLogits {
        index: IndexSpec { format: IndexFormat::DEEPSEEK_V32, page_size: 4, num_pages: 9 },
        num_heads: 64,
        query: crate::base::dtype::Dtype::E4m3,
    };

    fn batch<'a>(seq_lens: &'a [i32], query_start_loc: &'a [i32], mask: Mask<'a>) -> IndexerLogitsBatch<'a> {
        let pages = PageTable::Dense { block_table: &[5, 3, 8, i32::MIN, 2, 0, i32::MAX, -1], max_pages: 4 };
        let tokens = 0..query_start_loc.last().map_or(0, |&end| end.max(0) as u32);
        IndexerLogitsBatch { pages, seq_lens, query_start_loc, mask, tokens, fill: 0 }
    }

    /// Each key that a row sees is in one run, each column behind it up to `fill` is filled once.
    #[test]
    fn runs_are_what_rows_see() {
        for (mask, seen) in [
            (Mask::Causal, [9, 10, 11, 0, 6]),
            (Mask::Full, [11, 11, 11, 7, 6]),
            (Mask::CausalFrom(-1), [0, 0, 1, 0, 0]),
            (Mask::Bounds(&[1, 99, 0, 3, 6]), [1, 11, 0, 3, 6]),
        ] {
            for (tokens, fill) in [(0..5, 0), (0..5, 12), (1..4, 9), (2..2, 7), (4..5, 1 << 15)] {
                for cut in [(4, 1), (4, 100), (64, 7)].map(|(block, target)| Cut { block, target }) {
                    // The second sequence has more query tokens than tokens, of which the last is in the first row's place.
                    let base = batch(&[11, 6], &[0, 3, 5], mask);
                    let seen = if mask == Mask::Causal {
                        [9, 10, 11, 5, 6]
                    } else {
                        [seen[0], seen[1], seen[2], seen[3].min(6), seen[4]]
                    };
                    let seen = if matches!(mask, Mask::Full) { [11, 11, 11, 6, 6] } else { seen };
                    let found = SPEC.runs(&IndexerLogitsBatch { tokens: tokens.clone(), fill, ..base }, cut);
                    let found = found.expect("a good batch");
                    let mut columns = vec![vec![None; 1 << 15]; tokens.len()];
                    for run in &found.runs {
                        assert!(run.begin.is_multiple_of(cut.block) || run.end <= run.begin, "{run:?}");
                        assert_eq!(run.token, tokens.start + run.row);
                        for j in run.begin..run.end.max(run.fill_end) {
                            let page = (j < run.end).then(|| found.pages[(run.pages + j / 4) as usize]);
                            assert_eq!(
                                columns[run.row as usize][j as usize].replace(page),
                                None,
                                "{run:?} {j}"
                            );
                        }
                    }
                    for (row, columns) in columns.iter().enumerate() {
                        let token = tokens.start as usize + row;
                        let pages: [u32; 3] = if token < 3 { [5, 3, 8] } else { [2, 0, 99] };
                        for (j, column) in columns.iter().enumerate() {
                            let want = (j < seen[token]).then(|| Some(pages[j / 4]));
                            let want = want.or((j < fill as usize).then_some(None));
                            assert_eq!(*column, want, "{mask:?} {tokens:?} row {row} column {j}");
                        }
                    }
                    let most = tokens.clone().map(|token| seen[token as usize] as u32).max();
                    let want = most.map_or(IndexerLogitsExtent::default(), |most| IndexerLogitsExtent {
                        tokens: tokens.end,
                        rows: tokens.len() as u32,
                        columns: most.max(fill),
                    });
                    assert_eq!(found.extent, want);
                }
            }
        }
    }

    #[test]
    fn runs_fill_the_device_in_one_wave_or_in_a_few() {
        let row = |visible| Row { token: 0, pages: 0, visible };
        let blocks = |rows: &[Row], target| run_blocks(rows, Cut { block: 128, target });
        // 1024 blocks over 132 workgroups; 64 rows of 64 blocks, each in two.
        assert_eq!(blocks(&[row(131_072)], 132), 8);
        assert_eq!(blocks(&[row(8192); 64], 132), 32);
        assert_eq!(blocks(&[row(8192); 1024], 132), 64);
        assert_eq!(blocks(&[row(8192); 140], 132), 22);
        assert_eq!(blocks(&[], 132), 1);
        assert_eq!(blocks(&[row(0); 3], 132), 1);
        assert_eq!(blocks(&[row(5), row(1000)], 132), 1);
    }

    #[test]
    fn every_refusal_says_what_is_wrong() {
        let refused = |batch: IndexerLogitsBatch<'_>| {
            SPEC.runs(&batch, Cut { block: 64, target: 8 }).map(|_| ()).expect_err("refused")
        };
        let good = || batch(&[11, 6], &[0, 3, 5], Mask::Causal);
        let lens = |seq_lens| refused(IndexerLogitsBatch { seq_lens, ..good() });
        assert!(matches!(lens(&[17, 6]), Error::SeqLen { seq: 0, got: 17, max: 16, .. }));
        assert!(matches!(lens(&[11, -1]), Error::SeqLen { seq: 1, got: -1, .. }));
        assert!(matches!(lens(&[11]), Error::Length { what: "query_start_loc", .. }));
        assert!(matches!(lens(&[13, 6]), Error::PageOutOfRange { seq: 0, block: 3, .. }));
        let starts = |query_start_loc| refused(IndexerLogitsBatch { query_start_loc, ..good() });
        assert!(matches!(starts(&[1, 3, 5]), Error::QueryStartLoc { index: 0, got: 1 }));
        assert!(matches!(starts(&[0, 3, 2]), Error::QueryStartLoc { index: 2, got: 2 }));
        let tokens = |tokens| refused(IndexerLogitsBatch { tokens, ..good() });
        assert!(matches!(tokens(0..6), Error::Shape { what: "the end of tokens", got: 6, .. }));
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = tokens(3..2);
        assert!(matches!(reversed, Error::Shape { what: "the end of tokens", got: 2, .. }));
        let mask = refused(IndexerLogitsBatch { mask: Mask::Bounds(&[1; 4]), ..good() });
        assert!(matches!(mask, Error::Length { what: "Mask::Bounds", .. }));
        for pages in [PageTable::Device, PageTable::Indices] {
            let error = refused(IndexerLogitsBatch { pages, ..good() });
            assert!(matches!(error, Error::LayoutMismatch { .. }), "{error}");
        }
    }
}
