//! `reorg_kvcache`: gathered parts of several ranks, back in the order of their tokens. Arguments and checks.

use super::kv_gather::{GatherRange, check_overlaps};
use super::op::{Op, Use};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::memory::room_for;
use crate::base::view::{View, aligned, distinct, distinct_sets};
use crate::plan::shares::Shares;

/// Puts the gathered parts of several ranks, each with its own tokens of each sequence's chunk, back in the order of their tokens: vLLM's
/// `reorg_kvcache`, after the all-gather of a prefill over a context that is sharded by [`Shares`]. Bytes are copied.
///
/// Arguments of a layer: [`ReorgKvCacheArgs`]. Input of a step: a [`ReorgBatch`]. `prepare` refuses one with [`Error::Shape`] for a chunk
/// or rows that end past 2^31, and [`Error::GatherOverlap`].
///
/// Room of a binding: a [`ReorgExtent`], rows. Capacity of a step: a [`ReorgCapacity`].
///
/// vLLM's function leaves a sequence's keys rank by rank; here they are in their order, so that masks that depend on it hold too.
///
/// ```
/// use wgpu_mla::{Device, Dtype, ReorgBatch, ReorgChunk, ReorgKvCache, ReorgKvCacheArgs, Shares, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // Tokens 2 to 6 of a sequence, by turns on two ranks: rank 0 has 2, 4, 6 and rank 1 has 3, 5 and a row of padding.
/// let shares = Shares::even(2, 1)?;
/// let chunk = ReorgChunk { begin: 2, tokens: 5, local_row: 0, out_row: 0 };
/// assert_eq!(shares.padded_len(2, 5), 3); // rows that each rank gathers to
///
/// let cpu = Cpu::new();
/// let (gathered, out) = (cpu.buffer(6 * 4 * 4)?, cpu.buffer(5 * 4 * 4)?);
/// let rows = [[2.0; 4], [4.0; 4], [6.0; 4], [3.0; 4], [5.0; 4], [f32::NAN; 4]].concat();
/// cpu.upload(&gathered, 0, &Dtype::F32.encode_all(&rows))?;
/// let layer = ReorgKvCacheArgs { gathered: View::dense(&gathered, 1, 4), rank_stride: 3 * 4, out: View::dense(&out, 1, 4) };
/// let batch = ReorgBatch { shares: &shares, chunks: &[chunk] };
/// cpu.once(ReorgKvCache { dtype: Dtype::F32, row_elems: 4 }, batch, &layer)?;
/// let rows = Dtype::F32.decode_all(&cpu.download(&out, 5 * 4 * 4)?);
/// assert_eq!(rows, [[2.0; 4], [3.0; 4], [4.0; 4], [5.0; 4], [6.0; 4]].concat());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReorgKvCache {
    /// Dtype of what is copied: any.
    pub dtype: Dtype,
    /// Elements of a row, a multiple of 4: `L + R`, or one of them. A record of 656 bytes is a row of 656 e4m3 elements.
    pub row_elems: u32,
}

/// Consecutive tokens of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReorgChunk {
    /// The first token, in the whole sequence.
    pub begin: u32,
    /// Tokens, 0 allowed.
    pub tokens: u32,
    /// Row in each rank's part of the first of its tokens in the chunk: the others follow. [`Shares::padded_len`] says how many
    /// rows a chunk takes where all ranks lay their parts out alike; what is behind a rank's own tokens is not read.
    pub local_row: u32,
    /// Row of the first token in the output: the others follow.
    pub out_row: u32,
}

/// What a step of a [`ReorgKvCache`] copies.
#[derive(Debug, Clone, Copy)]
pub struct ReorgBatch<'a> {
    /// The rank that holds each token.
    pub shares: &'a Shares,
    /// Chunks of sequences.
    pub chunks: &'a [ReorgChunk],
}

/// One layer of a [`ReorgKvCache`].
#[derive(Debug, Clone, Copy)]
pub struct ReorgKvCacheArgs<B> {
    /// `[local rows, row_elems]` of rank 0; offset and `token_stride` are multiples of 4 elements, `head_stride` is unread.
    pub gathered: View<B>,
    /// Elements from a rank's part to the next rank's, a multiple of 4. Parts do not overlap.
    pub rank_stride: u64,
    /// `[rows, row_elems]`, as `gathered`. Rows of no chunk are left as they are.
    pub out: View<B>,
}

/// The most words of a table: a gibibyte, as 4096 chunks for 65,536 ranks.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
const MOST_WORDS: u64 = 1 << 28;

/// How far a step of a [`ReorgKvCache`] reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReorgExtent {
    /// Rows of the output, up to the last that is written.
    pub rows: u32,
    /// Rows of a rank's part, up to the last that is read.
    pub local_rows: u32,
    /// Ranks.
    pub world: u32,
}

/// What a step of a [`ReorgKvCache`] has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReorgCapacity {
    /// Tokens of all chunks.
    pub tokens: u32,
    /// Words of the table: 4, and 3 a chunk, one a chunk and rank, one a rank, and two a block of the pattern of [`Shares`].
    pub words: u32,
}

impl<B: Copy> ReorgKvCacheArgs<B> {
    /// The part of the last of so many ranks, which ends furthest back.
    pub(crate) fn last(&self, world: u32) -> View<B> {
        let last = u64::from(world.saturating_sub(1)).saturating_mul(self.rank_stride);
        View { offset: self.gathered.offset.saturating_add(last), ..self.gathered }
    }
}

impl ReorgBatch<'_> {
    /// How far it reaches.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::GatherOverlap`].
    pub(crate) fn extent(&self) -> Result<ReorgExtent> {
        const END: u32 = 1 << 31;
        let bad = |what, got| {
            let cure = "must be at most 2^31: copy in several steps, from lower rows";
            Err(Error::Shape { what, got, cure })
        };
        let mut extent = ReorgExtent { world: self.shares.world(), ..ReorgExtent::default() };
        let mut total = 0;
        let mut ranges = room_for(self.chunks.len(), "a step's chunks")?;
        for chunk in self.chunks {
            let ReorgChunk { begin, tokens, local_row, out_row } = *chunk;
            ranges.push(GatherRange { sequence: 0, begin, tokens, out_row });
            if tokens == 0 {
                continue;
            }
            let padded = u64::from(self.shares.padded_len(begin, tokens));
            for (what, first, count) in [
                ("end of a chunk", begin, u64::from(tokens)),
                ("end of a chunk's rows", out_row, tokens.into()),
                ("end of a chunk's local rows", local_row, padded),
            ] {
                if u64::from(first) + count > END.into() {
                    return bad(what, u64::from(first) + count);
                }
            }
            total += u64::from(tokens);
            extent.rows = extent.rows.max(out_row + tokens);
            extent.local_rows = extent.local_rows.max(local_row + padded as u32);
        }
        if total > END.into() {
            return bad("tokens of all chunks", total);
        }
        check_overlaps(&ranges)?;
        Ok(extent)
    }

    /// The words of `table` in `reorg_kvcache.wgsl` and `reorg_kvcache.cu`, behind the number of tokens, which comes first.
    ///
    /// # Errors
    /// [`Error::Limit`] and [`Error::OutOfMemory`].
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) fn table(&self) -> Result<(u32, Vec<u32>)> {
        let chunks = || self.chunks.iter().filter(|chunk| chunk.tokens > 0);
        let world = self.shares.world();
        let (owners, before, owned) = self.shares.blocks();
        // A chunk takes three words and one for each rank, a block of the pattern takes two, a rank one.
        let need = (chunks().count() as u64).saturating_mul(u64::from(world) + 3) + 4;
        let need = need.saturating_add(2 * owners.len() as u64 + u64::from(world));
        if need > MOST_WORDS {
            let (what, cure) = ("words of a step's chunks and ranks", "copy fewer chunks a step");
            return Err(Error::Limit { what, need, limit: MOST_WORDS, cure });
        }
        let mut words = Vec::new();
        let out_of_memory = |_| Error::OutOfMemory { what: "a step's chunks and ranks" };
        words.try_reserve_exact(need as usize).map_err(out_of_memory)?;
        words.extend([chunks().count() as u32, world, self.shares.interleave(), owners.len() as u32]);
        let mut first = 0;
        words.extend(chunks().map(|chunk| {
            first += chunk.tokens;
            first - chunk.tokens
        }));
        words.extend(chunks().map(|chunk| chunk.begin));
        words.extend(chunks().map(|chunk| chunk.out_row));
        for chunk in chunks() {
            // Added to a token's local index, which is at least the rank's count before the chunk; it may wrap.
            let held = self.shares.counts(chunk.begin);
            words.extend(held.map(|held| chunk.local_row.wrapping_sub(held)));
        }
        words.extend(owners.iter().chain(before).copied().chain(owned));
        Ok((first, words))
    }
}

impl Op for ReorgKvCache {
    const NAME: &'static str = "reorg_kvcache";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = ReorgBatch<'a>;
    type Args<B> = ReorgKvCacheArgs<B>;
    type Extent = ReorgExtent;
    type Capacity = ReorgCapacity;

    fn samples() -> Vec<Self> {
        Dtype::ALL.map(|dtype| ReorgKvCache { dtype, row_elems: 576 }).into()
    }

    fn check(&self) -> Result<()> {
        if self.row_elems == 0 || !self.row_elems.is_multiple_of(4) {
            let cure = "must be a multiple of 4 elements, at least 4";
            return Err(Error::Shape { what: "row_elems", got: self.row_elems.into(), cure });
        }
        Ok(())
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a ReorgKvCacheArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<ReorgKvCacheArgs<C>> {
        Ok(ReorgKvCacheArgs {
            gathered: args.gathered.map(|buffer| f(Use::Read("gathered"), buffer))?,
            rank_stride: args.rank_stride,
            out: args.out.map(|buffer| f(Use::Write("out"), buffer))?,
        })
    }

    fn check_args<B>(
        &self,
        args: &ReorgKvCacheArgs<&B>,
        room: ReorgExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        if room.world > 1 {
            aligned("rank_stride", args.rank_stride, 4)?;
        }
        let bytes = self.dtype.bytes();
        let last = args.last(room.world);
        args.gathered.check("gathered", [room.local_rows, 1, self.row_elems], bytes, 4, u64::MAX)?;
        last.check("gathered", [room.local_rows, 1, self.row_elems], bytes, 4, size(last.buffer))?;
        let ranks = (room.world.into(), args.rank_stride);
        distinct_sets("rank_stride", ranks, &args.gathered, [room.local_rows, 1, self.row_elems])?;
        distinct("out", &args.out, room.rows.into(), 1, self.row_elems.into())?;
        args.out.check("out", [room.rows, 1, self.row_elems], bytes, 4, size(args.out.buffer))
    }

    fn fits(used: ReorgExtent, room: ReorgExtent) -> Result<(), &'static str> {
        if used.rows > room.rows || used.local_rows > room.local_rows || used.world > room.world {
            return Err("the step copies more rows, or of more ranks, than the binding has");
        }
        Ok(())
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for ReorgKvCache {
    fn table(
        &self,
        batch: ReorgBatch<'_>,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<StepTable<ReorgExtent>> {
        let extent = batch.extent()?;
        let (count, words) = batch.table()?;
        check(count.into())?;
        Ok(StepTable { count, words, extent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_names_what_is_wrong() {
        let shares = Shares::even(3, 2).unwrap();
        let good = ReorgChunk { begin: 4, tokens: 7, local_row: 1, out_row: 2 };
        let extent = |chunks: &[ReorgChunk]| ReorgBatch { shares: &shares, chunks }.extent();
        // Tokens 4 to 10: rank 2 has 4, 5, 10, rank 0 has 6, 7, rank 1 has 8, 9.
        assert_eq!(extent(&[good]), Ok(ReorgExtent { rows: 9, local_rows: 4, world: 3 }));
        let empty = ReorgChunk { tokens: 0, out_row: u32::MAX, ..good };
        assert_eq!(extent(&[good, empty]), extent(&[good]));
        for (chunk, what) in [
            (ReorgChunk { begin: u32::MAX, ..good }, "end of a chunk"),
            (ReorgChunk { out_row: u32::MAX, ..good }, "end of a chunk's rows"),
            (ReorgChunk { local_row: u32::MAX, ..good }, "end of a chunk's local rows"),
        ] {
            assert!(matches!(extent(&[chunk]), Err(Error::Shape { what: got, .. }) if got == what));
        }
        let overlap = extent(&[good, ReorgChunk { out_row: 8, ..good }]);
        assert_eq!(overlap, Err(Error::GatherOverlap { first: 0, second: 1, row: 8 }));
        assert!(ReorgKvCache { dtype: Dtype::F16, row_elems: 6 }.check().is_err());
    }
}
