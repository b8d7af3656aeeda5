//! `top_k`: the positions of the largest logits of each row, exactly. Arguments and checks.

use super::features::Asks;
use super::op::{Op, Use};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::memory::{collected, room_for};
use crate::base::view::{View, fits};
use crate::cache::KvSpec;
use crate::plan::tables::{PageRows, PageTable};

/// Chooses the `k` largest logits of each row: the tokens that a query token of sparse attention (DeepSeek Sparse Attention) attends, as
/// [`MlaDecodeArgs::indices`](crate::MlaDecodeArgs) takes them. vLLM's `top_k_per_row`.
///
/// Only the first `length` logits of a row count, the others are never read. The result is the same on every backend, variant and run:
///
/// - **set**: the best `min(k, length)`, NaN and -inf too where nothing better is left. Larger first, +0 equals -0, and NaN comes after
///   -inf.
/// - **tie-break**: of logits that are equal, those of lower index.
/// - **order**: ascending indices, then -1 up to `k` entries. With [`TopK::slots`] each index becomes the slot of its token, in that order.
///
/// Arguments of a layer: [`TopKArgs`]. Input of a step: a [`TopKBatch`]. `prepare` refuses one with [`Error::Length`], [`Error::Shape`],
/// [`Error::Limit`], [`Error::OutOfMemory`], and [`Error::LayoutMismatch`] for pages without [`TopK::slots`] or slots without pages; with
/// pages also [`Error::QueryStartLoc`], [`Error::OtherSpec`], [`Error::KvIndptr`], [`Error::SeqLen`], [`Error::PageOutOfRange`], and
/// [`Error::LayoutMismatch`] for [`PageTable::Device`].
///
/// Room of a binding: a [`TopKExtent`]. Capacity of a step: a [`TopKCapacity`].
///
/// ```
/// use wgpu_mla::{Device, Dtype, TopK, TopKArgs, TopKBatch, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // Two rows of 5 logits, of which the second has 2 that count.
/// let logits = [0.5, 2.0, -1.0, 2.0, 7.0, /* */ 1.0, 3.0, 9.0, 9.0, 9.0];
/// let cpu = Cpu::new();
/// let (scores, indices) = (cpu.buffer(10 * 4)?, cpu.buffer(2 * 3 * 4)?);
/// cpu.upload(&scores, 0, &Dtype::F32.encode_all(&logits))?;
/// let (logits, indices) = (View::dense(&scores, 1, 5), View::dense(&indices, 1, 3));
/// // The step has the lengths, so that `lengths` is unread: any buffer of two words.
/// let args = TopKArgs { logits, columns: 5, lengths: &scores, indices, values: None };
///
/// cpu.once(TopK { k: 3, slots: None }, TopKBatch::of(&[5, 2]), &args)?;
/// let chosen = cpu.download(indices.buffer, 2 * 3 * 4)?;
/// let chosen: Vec<i32> = chosen.chunks_exact(4).map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
/// assert_eq!(chosen, [1, 3, 4, 0, 1, -1]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TopK {
    /// Entries of a row's list: 1 to 8192.
    pub k: u32,
    /// The pool whose slots are written; `None`: indices in the row.
    pub slots: Option<TopKSlots>,
}

/// The pool of pages that holds the tokens whose logits are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TopKSlots {
    /// Tokens in a page: 1 to 256.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
}

/// One layer of a [`TopK`].
#[derive(Debug, Clone, Copy)]
pub struct TopKArgs<B> {
    /// f32 `[rows, columns]`, `token_stride` between rows; offset and stride are any number of elements, `head_stride` is unread. A
    /// multiple of 4 elements is the fast way.
    pub logits: View<B>,
    /// Logits of a row, whether they count or not: at most 2^20.
    pub columns: u32,
    /// i32 `[rows]`: how many logits of each row count. A kernel takes one below 0 for 0 and one past the row for the whole row. Unread by
    /// a step that has [`TopKBatch::lengths`]; it may then be any buffer of `rows` words that is not written.
    pub lengths: B,
    /// i32 `[out_rows, k]`, `token_stride` between rows: what is chosen. Other rows than a step's are left as they are.
    pub indices: View<B>,
    /// f32 `[out_rows, k]`, `token_stride` between rows: the logits of the indices, bit by bit, and -inf where an index is -1, if they are
    /// wanted: [`Shares::merge_top_k`](crate::Shares::merge_top_k) takes them.
    pub values: Option<View<B>>,
}

/// The rows of a step of a [`TopK`].
#[derive(Debug, Clone, Copy)]
pub struct TopKBatch<'a> {
    /// Rows of logits, from the binding's first on.
    pub rows: u32,
    /// How many logits of each row count, at most [`TopKArgs::columns`]. `None`: what [`TopKArgs::lengths`] holds when the commands run.
    pub lengths: Option<&'a [i32]>,
    /// Where the tokens are, for a spec with [`TopK::slots`]; `None` for one without.
    pub pages: Option<TopKPages<'a>>,
    /// Row of `indices`, and of `values`, that row 0 is written to: the others follow.
    pub out_row: u32,
}

/// The pages of a [`TopKBatch`], by which an index becomes a slot.
#[derive(Debug, Clone, Copy)]
pub struct TopKPages<'a> {
    /// The pages of each sequence, from the host: not [`PageTable::Device`]. Entries past a sequence's longest row are unread. Where the
    /// device has the lengths they are not known, and every entry may be read: an index in a page that is not in the pool becomes -1.
    pub pages: PageTable<'a>,
    /// `[sequences + 1]`: where each sequence's query tokens begin.
    pub query_start_loc: &'a [i32],
    /// Query token of row 0: the others follow.
    pub first_token: u32,
}

impl<'a> TopKBatch<'a> {
    /// Rows with these lengths, whose indices are written from row 0 on.
    #[must_use]
    pub fn of(lengths: &'a [i32]) -> Self {
        let rows = u32::try_from(lengths.len()).unwrap_or(u32::MAX);
        Self { rows, lengths: Some(lengths), pages: None, out_row: 0 }
    }

    /// Rows whose lengths are in [`TopKArgs::lengths`], and whose indices are written from row 0 on.
    #[must_use]
    pub const fn rows(rows: u32) -> Self {
        Self { rows, lengths: None, pages: None, out_row: 0 }
    }
}

/// How far a step of a [`TopK`] reaches, or a binding has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TopKExtent {
    /// Rows of logits.
    pub rows: u32,
    /// The greatest length of a row that the host knows of. A binding has [`TopKArgs::columns`], whatever stands here.
    pub columns: u32,
    /// Rows of `indices`, up to the last that is written.
    pub out_rows: u32,
}

/// What a step of a [`TopK`] has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TopKCapacity {
    /// Rows.
    pub rows: u32,
    /// Pages of all sequences, with [`TopK::slots`].
    pub pages: u32,
}

/// The most entries of a list.
pub(crate) const MOST_K: u32 = 8192;

/// The most logits of a row.
pub(crate) const MOST_COLUMNS: u32 = 1 << 20;

/// The most rows of a step.
const MOST_ROWS: u32 = 1 << 24;

/// The most words of a step's table: half a gibibyte.
const MOST_WORDS: u64 = 1 << 27;

/// In place of a length that only the device knows, and of a page that is not in the pool.
pub(crate) const UNKNOWN: u32 = u32::MAX;

/// A step, checked. Every backend reads these words.
#[derive(Debug, Default)]
pub struct Rows {
    /// Rows of logits.
    pub rows: u32,
    /// The row of `indices` that row 0 is written to; then for each row its length, or [`UNKNOWN`], and with slots the place of its first
    /// page in these words and how many pages it has; then the pages, or [`UNKNOWN`].
    pub words: Vec<u32>,
    /// How far they reach.
    pub extent: TopKExtent,
}

impl TopK {
    /// Words of a row in [`Rows::words`].
    pub(crate) const fn row_words(&self) -> u32 {
        if self.slots.is_some() { 3 } else { 1 }
    }

    /// What is written for index `index` of a row.
    pub(crate) fn entry(&self, rows: &Rows, row: usize, index: u32) -> u32 {
        let Some(TopKSlots { page_size, .. }) = self.slots else { return index };
        let row = &rows.words[1 + 3 * row..][..3];
        let (begin, count) = (row[1] as usize, row[2] as usize);
        match rows.words[begin..begin + count].get((index / page_size) as usize) {
            None | Some(&UNKNOWN) => UNKNOWN,
            Some(page) => page * page_size + index % page_size,
        }
    }

    /// The pool, as a cache of some dtype: only its pages matter.
    fn pool(slots: TopKSlots) -> KvSpec {
        KvSpec::new(Dtype::F32, slots.page_size, slots.num_pages)
    }

    /// Checks a step and lays it out; `check` is given the rows before any word is made.
    ///
    /// # Errors
    /// The errors of [`TopK`], and those of `check`.
    pub(crate) fn rows(&self, batch: TopKBatch<'_>, check: impl FnOnce(u64) -> Result<()>) -> Result<Rows> {
        let TopKBatch { rows, lengths, pages, out_row } = batch;
        let limit = |what, need, limit| {
            let cure = "choose in several steps, of fewer rows each";
            Err(Error::Limit { what, need, limit, cure })
        };
        if rows > MOST_ROWS {
            return limit("rows of a top_k", rows.into(), MOST_ROWS.into());
        }
        let out_end = u64::from(out_row) + u64::from(rows);
        if rows > 0 && out_end > i32::MAX as u64 {
            return limit("the last row of indices", out_end, i32::MAX as u64);
        }
        let columns = lengths.map_or(Ok(0), |lengths| longest(lengths, rows))?;
        check(rows.into())?;
        let mut extent = TopKExtent { rows, columns, out_rows: out_end as u32 };
        if rows == 0 {
            extent = TopKExtent::default();
        }
        let length = |row: usize| lengths.map_or(UNKNOWN, |lengths| lengths[row] as u32);
        let words = match (self.slots, pages) {
            (None, None) => {
                let lengths = (0..rows as usize).map(length);
                collected(std::iter::once(out_row).chain(lengths), rows as usize + 1, WORDS)?
            }
            (Some(slots), Some(pages)) => paged_words(slots, &batch, pages)?,
            (None, Some(_)) => {
                let detail = "the batch has pages, but this TopK writes indices: compile it with TopK::slots";
                return Err(Error::LayoutMismatch { detail });
            }
            (Some(_), None) => {
                let detail =
                    "this TopK writes slots: give the batch its pages, or compile it without TopK::slots";
                return Err(Error::LayoutMismatch { detail });
            }
        };
        Ok(Rows { rows, words, extent })
    }
}

const WORDS: &str = "a top_k's rows";

/// The greatest length.
///
/// # Errors
/// [`Error::Length`], and [`Error::Shape`] for a negative length or one past 2^20.
fn longest(lengths: &[i32], rows: u32) -> Result<u32> {
    let (got, want) = (lengths.len() as u64, u64::from(rows));
    if got != want {
        return Err(Error::Length { what: "lengths", got, want, cure: "one length a row" });
    }
    let bad = |index: usize, cure| Err(Error::Shape { what: "lengths at index", got: index as u64, cure });
    if let Some(index) = lengths.iter().position(|&length| length < 0) {
        return bad(index, "holds a negative length: a row of which nothing counts has 0");
    }
    let longest = lengths.iter().max().map_or(0, |&longest| longest as u32);
    if longest > MOST_COLUMNS {
        let index = lengths.iter().position(|&length| length as u32 == longest).unwrap_or(0);
        return bad(
            index,
            "holds a length past 2^20 logits: split the row, and choose of what its parts chose",
        );
    }
    Ok(longest)
}

/// [`Rows::words`] of a step with pages.
///
/// # Errors
/// The errors of [`TopK`].
fn paged_words(slots: TopKSlots, batch: &TopKBatch<'_>, pages: TopKPages<'_>) -> Result<Vec<u32>> {
    let TopKPages { pages, query_start_loc: starts, first_token } = pages;
    if matches!(pages, PageTable::Device) {
        let detail = "top_k takes its pages from the host: PageTable::Dense or PageTable::Csr";
        return Err(Error::LayoutMismatch { detail });
    }
    let Some(sequences) = starts.len().checked_sub(1) else {
        let cure = "one entry a sequence and one more for the end";
        return Err(Error::Length { what: "query_start_loc", got: 0, want: 1, cure });
    };
    let falls = |i: usize| if i == 0 { starts[0] != 0 } else { starts[i] < starts[i - 1] };
    if let Some(index) = (0..starts.len()).find(|&i| falls(i)) {
        return Err(Error::QueryStartLoc { index, got: starts[index].into() });
    }
    let kv = TopK::pool(slots);
    let table = PageRows::new(pages, sequences, &kv)?;
    let (first, end) = (u64::from(first_token), u64::from(first_token) + u64::from(batch.rows));
    if batch.rows > 0 && end > starts[sequences] as u64 {
        let cure = "is past the last query token of query_start_loc: give fewer rows, or correct first_token";
        return Err(Error::Shape { what: "the query token after the last row", got: end, cure });
    }
    let mut words = room_for(1 + 3 * batch.rows as usize, WORDS)?;
    words.push(batch.out_row);
    let mut list = Vec::new();
    let list_begin = 1 + 3 * batch.rows as usize;
    for (seq, ends) in starts.windows(2).enumerate() {
        // Rows of this sequence.
        let tokens = (ends[0] as u64).max(first)..(ends[1] as u64).min(end);
        if tokens.is_empty() {
            continue;
        }
        let rows = (tokens.start - first) as usize..(tokens.end - first) as usize;
        let row = match batch.lengths {
            Some(lengths) => {
                let longest = lengths[rows.clone()].iter().max().map_or(0, |&longest| longest as u32);
                table.used(seq, longest)?
            }
            None => table.row(seq),
        };
        let need = (list_begin + list.len() + row.len()) as u64;
        if need > MOST_WORDS {
            let (what, cure) =
                ("words of a top_k's table", "choose in several steps, of fewer sequences each");
            return Err(Error::Limit { what, need, limit: MOST_WORDS, cure });
        }
        let begin = (list_begin + list.len()) as u32;
        list.try_reserve(row.len()).map_err(|_| Error::OutOfMemory { what: WORDS })?;
        for (block, &page) in row.iter().enumerate() {
            // A negative id becomes a large one, so one comparison finds both kinds.
            let is_wild = page as u32 >= slots.num_pages;
            if is_wild && batch.lengths.is_some() {
                let (page, num_pages) = (page.into(), slots.num_pages);
                return Err(Error::PageOutOfRange { seq, block, page, num_pages });
            }
            list.push(if is_wild { UNKNOWN } else { page as u32 });
        }
        for row_index in rows {
            let length = batch.lengths.map_or(UNKNOWN, |lengths| lengths[row_index] as u32);
            words.extend([length, begin, row.len() as u32]);
        }
    }
    words.try_reserve_exact(list.len()).map_err(|_| Error::OutOfMemory { what: WORDS })?;
    words.extend(list);
    Ok(words)
}

impl Asks for TopK {}

impl Op for TopK {
    const NAME: &'static str = "top_k";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = TopKBatch<'a>;
    type Args<B> = TopKArgs<B>;
    type Extent = TopKExtent;
    type Capacity = TopKCapacity;

    fn samples() -> Vec<Self> {
        let slots = Some(TopKSlots { page_size: 64, num_pages: 64 });
        [None, slots].map(|slots| TopK { k: 2048, slots }).into()
    }

    fn check(&self) -> Result<()> {
        if !(1..=MOST_K).contains(&self.k) {
            return Err(Error::Shape { what: "k", got: self.k.into(), cure: "must be from 1 to 8192" });
        }
        self.slots.map_or(Ok(()), |slots| TopK::pool(slots).check())
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a TopKArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<TopKArgs<C>> {
        Ok(TopKArgs {
            logits: args.logits.map(|buffer| f(Use::Read("logits"), buffer))?,
            columns: args.columns,
            lengths: f(Use::Read("lengths"), &args.lengths)?,
            indices: args.indices.map(|buffer| f(Use::Write("indices"), buffer))?,
            values: match &args.values {
                Some(view) => Some(view.map(|buffer| f(Use::Write("values"), buffer))?),
                None => None,
            },
        })
    }

    fn check_args<B>(
        &self,
        args: &TopKArgs<&B>,
        room: TopKExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        let (TopKExtent { rows, out_rows, .. }, columns) = (room, args.columns);
        if rows > MOST_ROWS {
            let (what, cure) = ("rows of a top_k", "bind fewer rows, and choose in several steps");
            return Err(Error::Limit { what, need: rows.into(), limit: MOST_ROWS.into(), cure });
        }
        if rows == 0 {
            return Ok(());
        }
        if columns > MOST_COLUMNS {
            let cure = "must be at most 2^20: split the row, and choose of what its parts chose";
            return Err(Error::Shape { what: "columns", got: columns.into(), cure });
        }
        args.logits.check("logits", [rows, 1, columns], 4, 1, size(args.logits.buffer))?;
        fits("lengths", u64::from(rows) * 4, size(args.lengths))?;
        args.indices.check("indices", [out_rows, 1, self.k], 4, 1, size(args.indices.buffer))?;
        let values = args.values;
        values.map_or(Ok(()), |view| view.check("values", [out_rows, 1, self.k], 4, 1, size(view.buffer)))
    }

    fn room<B>(&self, args: &TopKArgs<B>, room: TopKExtent) -> TopKExtent {
        TopKExtent { columns: args.columns, ..room }
    }

    fn fits(used: TopKExtent, room: TopKExtent) -> Result<(), &'static str> {
        if used.rows > room.rows {
            return Err("the step has more rows than the binding");
        }
        if used.columns > room.columns {
            return Err(
                "the step has a length past the columns of the binding's logits: correct lengths, or TopKArgs::columns",
            );
        }
        if used.out_rows > room.out_rows {
            return Err("the step writes rows past the binding's out_rows");
        }
        Ok(())
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for TopK {
    fn table(
        &self,
        batch: TopKBatch<'_>,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<StepTable<TopKExtent>> {
        let Rows { rows, words, extent } = self.rows(batch, check)?;
        Ok(StepTable { count: rows, words, extent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDICES: TopK = TopK { k: 4, slots: None };
    const SLOTS: TopK = TopK { k: 4, slots: Some(TopKSlots { page_size: 4, num_pages: 9 }) };
    const TABLE: PageTable<'_> = PageTable::Dense { block_table: &[5, 3, i32::MAX, 2, 0, -1], max_pages: 3 };

    fn pages(first_token: u32) -> Option<TopKPages<'static>> {
        Some(TopKPages { pages: TABLE, query_start_loc: &[0, 2, 3], first_token })
    }

    fn words(spec: TopK, batch: TopKBatch<'_>) -> Result<Vec<u32>> {
        spec.rows(batch, |_| Ok(())).map(|rows| rows.words)
    }

    #[test]
    fn rows_know_their_lengths_and_pages() {
        let batch = TopKBatch { out_row: 7, ..TopKBatch::of(&[5, 0, 6]) };
        assert_eq!(words(INDICES, batch), Ok(vec![7, 5, 0, 6]));
        let extent = INDICES.rows(batch, |_| Ok(())).map(|rows| rows.extent);
        assert_eq!(extent, Ok(TopKExtent { rows: 3, columns: 6, out_rows: 10 }));
        assert_eq!(words(INDICES, TopKBatch::rows(2)), Ok(vec![0, UNKNOWN, UNKNOWN]));

        let paged = TopKBatch { pages: pages(0), ..batch };
        let want = vec![7, 5, 10, 2, 0, 10, 2, 6, 12, 2, 5, 3, 2, 0];
        assert_eq!(words(SLOTS, paged), Ok(want), "rows of one sequence share its pages");
        let last = TopKBatch { pages: pages(2), ..TopKBatch::of(&[3]) };
        assert_eq!(words(SLOTS, last), Ok(vec![0, 3, 4, 1, 2]), "other sequences are not looked at");
        let device = TopKBatch { pages: pages(1), ..TopKBatch::rows(2) };
        let want = vec![0, UNKNOWN, 7, 3, UNKNOWN, 10, 3, 5, 3, UNKNOWN, 2, 0, UNKNOWN];
        assert_eq!(words(SLOTS, device), Ok(want), "a page that is not in the pool is no error here");
    }

    #[test]
    fn every_refusal_says_what_is_wrong() {
        let refused = |spec, batch| words(spec, batch).expect_err("refused");
        let of = TopKBatch::of;
        assert!(matches!(
            refused(INDICES, of(&[1, -1])),
            Error::Shape { what: "lengths at index", got: 1, .. }
        ));
        assert!(matches!(refused(INDICES, of(&[1 << 20, (1 << 20) + 1])), Error::Shape { got: 1, .. }));
        let few = TopKBatch { rows: 3, ..of(&[1, 2]) };
        assert!(matches!(refused(INDICES, few), Error::Length { what: "lengths", got: 2, want: 3, .. }));
        assert!(matches!(refused(INDICES, TopKBatch::rows(u32::MAX)), Error::Limit { .. }));
        let far = TopKBatch { out_row: i32::MAX as u32, ..TopKBatch::rows(1) };
        assert!(matches!(refused(INDICES, far), Error::Limit { what: "the last row of indices", .. }));
        let paged = |batch| TopKBatch { pages: pages(0), ..batch };
        assert!(matches!(refused(INDICES, paged(of(&[1]))), Error::LayoutMismatch { .. }));
        assert!(matches!(refused(SLOTS, of(&[1])), Error::LayoutMismatch { .. }));
        let wild = refused(SLOTS, paged(of(&[9, 1])));
        assert!(matches!(wild, Error::PageOutOfRange { seq: 0, block: 2, .. }), "{wild}");
        assert!(matches!(
            refused(SLOTS, paged(of(&[1, 13]))),
            Error::SeqLen { seq: 0, got: 13, max: 12, .. }
        ));
        assert!(matches!(refused(SLOTS, paged(of(&[1; 4]))), Error::Shape { got: 4, .. }));
        let with = |pages, query_start_loc| {
            let pages = Some(TopKPages { pages, query_start_loc, first_token: 0 });
            refused(SLOTS, TopKBatch { pages, ..of(&[1]) })
        };
        assert!(matches!(with(PageTable::Device, &[0, 2, 3]), Error::LayoutMismatch { .. }));
        assert!(matches!(with(TABLE, &[]), Error::Length { what: "query_start_loc", .. }));
        assert!(matches!(with(TABLE, &[0, 2]), Error::Length { what: "block_table", .. }));
        assert!(matches!(with(TABLE, &[0, 2, 1]), Error::QueryStartLoc { index: 2, got: 1 }));
        assert!(matches!(with(TABLE, &[1, 2, 3]), Error::QueryStartLoc { index: 0, got: 1 }));
    }
}
