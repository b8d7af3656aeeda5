//! `kv_gather`: tokens of the paged cache to rows of a contiguous workspace, the field's `cp_gather_cache`, and with an e4m3 cache and a
//! wider output its `gather_and_maybe_dequant_cache`. Arguments and checks.

use super::op::{Op, Use};
use super::samples::{FLOATS, SHAPE, kv, pairs, records};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::memory::collected;
use crate::base::view::{View, codes_only, positive};
use crate::cache::decode_spec::MlaDecode;
use crate::cache::{KvLayout, KvSpec, KvView, MlaShape};
use crate::plan::tables::{PageRows, PageTable};

/// Copies tokens of the paged cache to rows of a contiguous array: vLLM's `cp_gather_cache`, and with an e4m3 cache and a wider output
/// its `gather_and_maybe_dequant_cache`.
///
/// Arguments of a layer: [`KvGatherArgs`]. Input of a step: a [`GatherBatch`]. `prepare` refuses one with [`Error::Length`],
/// [`Error::OtherSpec`], [`Error::SeqLen`], [`Error::PageOutOfRange`], [`Error::GatherRange`], [`Error::GatherOverlap`], and
/// [`Error::LayoutMismatch`] for [`PageTable::Device`].
///
/// Room of a binding: `u32`, rows of the output. Capacity of a step: `u32`, pages, those in part included.
///
/// Bits are copied where the dtypes agree. An e4m3 code becomes the f32 product of its value and `k_scale`, then an element of the output:
/// rounded to nearest even both times, on every device; a NaN code becomes a quiet NaN of its sign. So do the codes of
/// [`KvLayout::Ds656`] and `Ds528`, times the token's own scales. Other pairs of dtypes are rounded once.
///
/// ```
/// use wgpu_mla::{Device, Dtype, GatherBatch, GatherRange, KvGather, KvGatherArgs, PageTable, View, cpu::Cpu};
/// # use wgpu_mla::{KvSpec, KvView, MlaDecode, MlaShape};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
/// let kv = KvSpec { layout: Dtype::F32.into(), page_size: 2, num_pages: 2 };
/// let mla = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
/// let cpu = Cpu::new();
/// let (cache, out) = (cpu.buffer(mla.cache_bytes())?, cpu.buffer(2 * 288 * 4)?);
/// let by_slot = [[0.0; 288], [1.0; 288], [2.0; 288], [3.0; 288]].concat();
/// cpu.upload(&cache, 0, &Dtype::F32.encode_all(&by_slot))?;
///
/// // The sequence has pages 1 and 0: its tokens are in slots 2, 3, 0 and 1. Tokens 1 and 2 become rows 0 and 1.
/// let pages = PageTable::Dense { block_table: &[1, 0], max_pages: 2 };
/// let ranges = &[GatherRange { sequence: 0, begin: 1, tokens: 2, out_row: 0 }];
/// let batch = GatherBatch { pages, seq_lens: &[4], ranges };
/// let layer = KvGatherArgs { kv: KvView::dense(&cache, &mla), k_scale: 1.0, out: View::dense(&out, 1, 288) };
/// cpu.once(KvGather { shape, kv, output: Dtype::F32 }, batch, &layer)?;
/// let rows = Dtype::F32.decode_all(&cpu.download(&out, 2 * 288 * 4)?);
/// assert_eq!(rows, [[3.0; 288], [0.0; 288]].concat());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvGather {
    /// `kv_lora_rank` and `qk_rope_head_dim`; the heads do not matter.
    pub shape: MlaShape,
    /// The cache.
    pub kv: KvSpec,
    /// Dtype of the rows that are written: any of an e4m3 cache, f32, f16 or bf16 of others.
    pub output: Dtype,
}

/// Tokens of one sequence, and the rows that they become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GatherRange {
    /// Index of the sequence in the batch.
    pub sequence: u32,
    /// First token: anywhere in a page.
    pub begin: u32,
    /// Tokens, 0 allowed; `begin + tokens` is at most the sequence's `seq_len`.
    pub tokens: u32,
    /// Row of the first token in the output; the others follow.
    pub out_row: u32,
}

/// One layer of a [`KvGather`]: its cache, and the array that its rows go to.
#[derive(Debug, Clone)]
pub struct KvGatherArgs<B> {
    /// The cache.
    pub kv: KvView<B>,
    /// Factor of an e4m3 cache's elements where the output is wider; unread for others. Finite and above 0.
    pub k_scale: f32,
    /// `[rows, L + R]`, latent first; offset and `token_stride` are multiples of 4 elements, `head_stride` is unread. Rows that no
    /// range names are left as they are.
    pub out: View<B>,
}

/// What a step of a [`KvGather`] gathers. Ranges may begin and end anywhere in a page.
#[derive(Debug, Clone, Copy)]
pub struct GatherBatch<'a> {
    /// The pages of each sequence, from the host: not [`PageTable::Device`].
    pub pages: PageTable<'a>,
    /// Tokens of each sequence in the cache.
    pub seq_lens: &'a [i32],
    /// What becomes which rows.
    pub ranges: &'a [GatherRange],
}

/// Neighbouring tokens of one page.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Piece {
    /// `page * page_size + offset` of the first.
    pub slot: u32,
    /// Row of the first.
    pub out_row: u32,
    /// At least 1, and all in the page.
    pub tokens: u32,
}

/// Ranges, cut at the ends of pages and checked.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pub pieces: Vec<Piece>,
    /// Rows that the output must have.
    pub rows: u32,
}

/// The most pages, those in part included, of a step: rows of 288 elements of e4m3 in pages of one token are 19 GB then.
const MOST_PIECES: u64 = 1 << 26;

impl KvGather {
    /// Whether codes become what they stand for.
    pub(crate) fn dequantises(&self) -> bool {
        self.kv.layout == Dtype::E4m3.into() && !self.output.is_fp8()
    }

    /// Checks ranges, and the page ids that they need, and cuts them at the ends of pages.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SeqLen`], [`Error::PageOutOfRange`], [`Error::GatherRange`], [`Error::GatherOverlap`],
    /// [`Error::Limit`] for more than 2^26 pages, [`Error::OutOfMemory`], and [`Error::LayoutMismatch`] for [`PageTable::Device`].
    pub(crate) fn pieces(&self, batch: GatherBatch<'_>) -> Result<Pieces> {
        let GatherBatch { pages, seq_lens, ranges } = batch;
        if matches!(pages, PageTable::Device) {
            let detail = "kv_gather takes its pages from the host: PageTable::Dense or PageTable::Csr";
            return Err(Error::LayoutMismatch { detail });
        }
        let rows = PageRows::new(pages, seq_lens.len(), &self.kv)?;
        let mut all = Pieces::default();
        for (index, range) in ranges.iter().enumerate() {
            self.add_range(&mut all, rows, seq_lens, index, range)?;
        }
        check_overlaps(ranges)?;
        Ok(all)
    }

    fn add_range(
        &self,
        all: &mut Pieces,
        rows: PageRows<'_>,
        seq_lens: &[i32],
        index: usize,
        range: &GatherRange,
    ) -> Result<()> {
        let bad = |what, got, limit, cure| Err(Error::GatherRange { index, what, got, limit, cure });
        let seq = range.sequence as usize;
        let Some(&len) = seq_lens.get(seq) else {
            let limit = (seq_lens.len() as u64).saturating_sub(1);
            return bad("sequence", seq as u64, limit, "name a sequence of the batch");
        };
        let row = rows.row(seq);
        let held = row.len() as i64 * i64::from(self.kv.page_size);
        if len < 0 || i64::from(len) > held {
            return Err(rows.too_short(seq, len.into()));
        }
        let end = u64::from(range.begin) + u64::from(range.tokens);
        if end > len as u64 {
            return bad("end", end, len as u64, "end at the sequence's seq_len");
        }
        let out_end = u64::from(range.out_row) + u64::from(range.tokens);
        if out_end > u32::MAX.into() {
            return bad("end of its rows", out_end, u32::MAX.into(), "gather in several steps");
        }
        // An empty range writes nothing, wherever it stands.
        if range.tokens > 0 {
            all.rows = all.rows.max(out_end as u32);
        }
        let need = all.pieces.len() as u64 + u64::from(self.kv.pages_for(range.tokens)) + 1;
        if need > MOST_PIECES {
            let (what, cure) = ("pages of a gather", "gather in several steps");
            return Err(Error::Limit { what, need, limit: MOST_PIECES, cure });
        }
        let out_of_memory = |_| Error::OutOfMemory { what: "a gather's pages" };
        all.pieces.try_reserve(need as usize - all.pieces.len()).map_err(out_of_memory)?;
        let mut token = range.begin;
        while u64::from(token) < end {
            let (block, offset) = ((token / self.kv.page_size) as usize, token % self.kv.page_size);
            // A negative id becomes a large one, so one comparison finds both kinds.
            let page = row[block] as u32;
            if page >= self.kv.num_pages {
                let (page, num_pages) = (row[block].into(), self.kv.num_pages);
                return Err(Error::PageOutOfRange { seq, block, page, num_pages });
            }
            let tokens = (self.kv.page_size - offset).min((end - u64::from(token)) as u32);
            all.pieces.push(Piece {
                slot: page * self.kv.page_size + offset,
                out_row: range.out_row + (token - range.begin),
                tokens,
            });
            token += tokens;
        }
        Ok(())
    }
}

/// Each row is written once.
pub(super) fn check_overlaps(ranges: &[GatherRange]) -> Result<()> {
    let some = (0..ranges.len()).filter(|&i| ranges[i].tokens > 0);
    let mut order: Vec<usize> = collected(some, ranges.len(), "ranges of a gather")?;
    order.sort_unstable_by_key(|&i| (ranges[i].out_row, i));
    for pair in order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        let end = u64::from(ranges[first].out_row) + u64::from(ranges[first].tokens);
        if u64::from(ranges[second].out_row) < end {
            return Err(Error::GatherOverlap { first, second, row: ranges[second].out_row.into() });
        }
    }
    Ok(())
}

impl Op for KvGather {
    const NAME: &'static str = "kv_gather";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = GatherBatch<'a>;
    type Args<B> = KvGatherArgs<B>;
    /// Rows of the output: the end of the last range's.
    type Extent = u32;
    /// Pages, those in part included.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        let all =
            pairs(&Dtype::ALL, &Dtype::ALL, |cache, output| KvGather { shape: SHAPE, kv: kv(cache), output });
        let records = pairs(&records(), &FLOATS, |(shape, kv), output| KvGather { shape, kv, output });
        all.into_iter().filter(|spec| spec.check().is_ok()).chain(records).collect()
    }

    fn check(&self) -> Result<()> {
        MlaDecode { shape: self.shape, kv: self.kv, query: Dtype::F32, out: Dtype::F32 }.check()?;
        if self.output.is_fp8() && self.kv.layout != self.output.into() {
            let cure = "use f32, f16 or bf16; `kv_append` is what makes e4m3 codes";
            return Err(Error::DtypeUnsupported {
                what: "the output of this gather",
                got: self.output,
                cure,
            });
        }
        Ok(())
    }

    fn kv_layout(&self) -> Option<KvLayout> {
        Some(self.kv.layout)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a KvGatherArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<KvGatherArgs<C>> {
        Ok(KvGatherArgs {
            kv: args.kv.map(|buffer| f(Use::Read("kv"), buffer))?,
            k_scale: args.k_scale,
            out: args.out.map(|buffer| f(Use::Write("out"), buffer))?,
        })
    }

    fn check_args<B>(
        &self,
        args: &KvGatherArgs<&B>,
        rows: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        // Each code is multiplied exactly, by integers: the range of an append, which divides, does not matter.
        positive("k_scale", args.k_scale)?;
        match self.kv.layout {
            KvLayout::Plain(dtype) => codes_only("k_scale", dtype, args.k_scale)?,
            layout => layout.check_scale(args.k_scale)?,
        }
        let row_elems = self.shape.row_elems();
        args.kv.check(&self.kv, &self.shape, size)?;
        args.out.check("out", [rows, 1, row_elems], self.output.bytes(), 4, size(args.out.buffer))
    }

    fn each_slab<B: Copy>(&self, args: &KvGatherArgs<B>) -> Vec<KvGatherArgs<B>> {
        args.kv.each_slab().map(|kv| KvGatherArgs { kv, ..*args }).collect()
    }

    fn fits(rows: u32, max_rows: u32) -> Result<(), &'static str> {
        if rows > max_rows { Err("the step gathers to rows past the binding's max_rows") } else { Ok(()) }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for KvGather {
    fn table(&self, batch: GatherBatch<'_>, check: impl FnOnce(u64) -> Result<()>) -> Result<StepTable<u32>> {
        let all = self.pieces(batch)?;
        check(all.pieces.len() as u64)?;
        let count = all.pieces.len() as u32;
        let words: &[u32] = bytemuck::cast_slice(&all.pieces);
        let words = collected(words.iter().copied(), words.len(), "a gather's pages")?;
        Ok(StepTable { count, words, extent: all.rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: MlaShape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };

    fn spec(page_size: u32) -> KvGather {
        let kv = KvSpec { layout: Dtype::F16.into(), page_size, num_pages: 9 };
        KvGather { shape: SHAPE, kv, output: Dtype::F32 }
    }

    fn range(sequence: u32, begin: u32, tokens: u32, out_row: u32) -> GatherRange {
        GatherRange { sequence, begin, tokens, out_row }
    }

    const TABLE: PageTable<'_> =
        PageTable::Dense { block_table: &[5, 3, 8, i32::MIN, 2, 0, i32::MAX, -1], max_pages: 4 };

    fn batch<'a>(seq_lens: &'a [i32], ranges: &'a [GatherRange]) -> GatherBatch<'a> {
        GatherBatch { pages: TABLE, seq_lens, ranges }
    }

    #[test]
    fn ranges_are_cut_at_the_ends_of_pages() {
        let pieces = |ranges: &[GatherRange]| {
            let all = spec(4).pieces(batch(&[11, 6], ranges)).expect("good ranges");
            let pieces = all.pieces.iter().map(|piece| (piece.slot, piece.out_row, piece.tokens));
            (pieces.collect::<Vec<_>>(), all.rows)
        };
        assert_eq!(pieces(&[range(0, 2, 8, 10)]), (vec![(22, 10, 2), (12, 12, 4), (32, 16, 2)], 18));
        assert_eq!(pieces(&[range(1, 4, 2, 0), range(0, 0, 1, 7)]), (vec![(0, 0, 2), (20, 7, 1)], 8));
        assert_eq!(pieces(&[range(0, 11, 0, 1 << 20)]), (vec![], 0));
        assert_eq!(pieces(&[]), (vec![], 0));
    }

    #[test]
    fn every_refusal_says_which_range() {
        let refused = |lens: &[i32], ranges: &[GatherRange]| {
            spec(4).pieces(batch(lens, ranges)).map(|_| ()).expect_err("refused")
        };
        let good = range(0, 0, 4, 0);
        let at = |error| match error {
            Error::GatherRange { index, what, .. } => (index, what),
            other => panic!("{other}"),
        };
        assert_eq!(at(refused(&[11, 6], &[good, range(2, 0, 0, 9)])), (1, "sequence"));
        assert_eq!(at(refused(&[11, 6], &[good, range(1, 5, 2, 9)])), (1, "end"));
        assert_eq!(at(refused(&[11, 6], &[range(0, u32::MAX, u32::MAX, 9)])), (0, "end"));
        assert_eq!(at(refused(&[11, 6], &[range(0, 0, 2, u32::MAX - 1)])), (0, "end of its rows"));
        assert!(matches!(refused(&[17, 6], &[good]), Error::SeqLen { seq: 0, got: 17, max: 16, .. }));
        assert!(matches!(refused(&[-1, 6], &[good]), Error::SeqLen { seq: 0, got: -1, .. }));
        assert!(matches!(refused(&[11], &[good]), Error::Length { what: "block_table", .. }));
        let wild = refused(&[11, 9], &[range(1, 8, 1, 0)]);
        assert!(
            matches!(wild, Error::PageOutOfRange { seq: 1, block: 2, page: 2_147_483_647, .. }),
            "{wild}"
        );
        let overlap = refused(&[11, 6], &[range(0, 0, 4, 3), range(1, 2, 0, 4), range(1, 0, 2, 2)]);
        assert_eq!(overlap, Error::GatherOverlap { first: 2, second: 0, row: 3 });
        let device = spec(4).pieces(GatherBatch { pages: PageTable::Device, ..batch(&[], &[]) }).map(|_| ());
        assert!(matches!(device, Err(Error::LayoutMismatch { .. })));
    }
}
