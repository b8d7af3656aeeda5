//! `indexer_append`: the index keys of new tokens into the cache of a lightning indexer. Arguments and checks.

use super::indexer::{INDEX_SHAPE, IndexFormat, IndexSpec};
use super::kv_append::KvAppend;
use super::op::{Op, Use};
use super::rope_append::{RopeAppendBatch, RopeAppendExtent};
use super::samples::{FLOATS, pairs};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::view::{View, fits, normal, wide};
use crate::cache::{INDEX_DIM, KvLayout, KvView};

/// Makes the index keys of new tokens and writes them to their slots of the index cache: LayerNorm, RoPE of the first 64 of 128 elements,
/// the Hadamard rotation, quantisation with a scale a token, in one dispatch. [`IndexSpec::format`] says which of these a model has.
///
/// Sums are in f32, and mean and variance are those of all 128 elements. With e4m3 the scale is `max(amax, 1e-4) / 448`, or the power of
/// two from there on (`ue8m0`), and codes are `y / scale`, rounded to nearest even and saturated. Other dtypes hold the key, rounded once
/// to nearest even. A key of which an element is NaN or infinite becomes 128 NaNs, and its scale NaN; elements past 1e18 may overflow.
///
/// Arguments of a layer: [`IndexerAppendArgs`]. Input of a step: a [`RopeAppendBatch`], with the errors of a
/// [`RopeAppend`](crate::RopeAppend)'s.
///
/// Room of a binding: a [`RopeAppendExtent`], usually [`RopeAppendExtent::of`] so many tokens. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{Device, Dtype, IndexFormat, IndexSpec, IndexerAppend, IndexerAppendArgs, RopeAppendBatch, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // Without RoPE and Hadamard, to see the LayerNorm: half of the elements are 3, the others 1.
/// let format = IndexFormat { rope: None, hadamard: false, ..IndexFormat::DEEPSEEK_V32 };
/// let index = IndexSpec { format, page_size: 4, num_pages: 2 };
/// let cpu = Cpu::new();
/// let (k, cache) = (cpu.buffer(128 * 4)?, cpu.buffer(index.cache_bytes())?);
/// let (norm_weight, norm_bias, unread) = (cpu.buffer(128 * 4)?, cpu.buffer(128 * 4)?, cpu.buffer(0)?);
/// cpu.upload(&k, 0, &Dtype::F32.encode_all(&[[3.0, 1.0]; 64].concat()))?;
/// cpu.upload(&norm_weight, 0, &Dtype::F32.encode_all(&[448.0; 128]))?;
/// let args = IndexerAppendArgs {
///     k: View::dense(&k, 1, 128),
///     norm_weight: &norm_weight,
///     norm_bias: &norm_bias,
///     norm_eps: 1e-6,
///     positions: &unread,
///     cos_sin: &unread,
///     max_position: 0,
///     cache: index.view(&cache),
/// };
///
/// // The mean is 2 and the variance 1, so the key is 448 and -448 by turns; 448 / 448 is a power of two. Slot 5 is token 1 of page 1.
/// cpu.once(IndexerAppend { index, input: Dtype::F32 }, RopeAppendBatch::slots(&[5]), &args)?;
/// let page = &cpu.download(&cache, index.cache_bytes())?[4 * 132..];
/// assert_eq!(Dtype::E4m3.decode_all(&page[128..][..2]), [448.0, -448.0]);
/// assert_eq!(Dtype::F32.decode_all(&page[4 * 128 + 4..][..4]), [1.0]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexerAppend {
    /// The index cache, and how its keys are made.
    pub index: IndexSpec,
    /// Dtype of `k`: f32, f16 or bf16.
    pub input: Dtype,
}

/// One layer of an [`IndexerAppend`]: projected keys, the LayerNorm's weights, and the index cache.
#[derive(Debug, Clone)]
pub struct IndexerAppendArgs<B> {
    /// `[tokens, 128]`, what the layer's `wk` gives; offset and stride are multiples of 4 elements, and `head_stride` is unread.
    pub k: View<B>,
    /// f32 `[128]`, the LayerNorm's weight.
    pub norm_weight: B,
    /// f32 `[128]`, its bias.
    pub norm_bias: B,
    /// Added to the variance: finite and at least 2^-126. 1e-6 in DeepSeek's and GLM's models.
    pub norm_eps: f32,
    /// i32 `[tokens]`; see [`RopeArgs::positions`](crate::RopeArgs::positions). Unread by a step that has positions of its own, and in a
    /// format without RoPE, where it may be any buffer.
    pub positions: B,
    /// f32 `[max_position, 64]`, in each row 32 cosines, then 32 sines: [`RopeFrequencies::cos_sin`](crate::RopeFrequencies::cos_sin).
    /// Unread in a format without RoPE.
    pub cos_sin: B,
    /// Rows of `cos_sin`. Unread in a format without RoPE.
    pub max_position: u32,
    /// The layer's index cache: [`IndexSpec::view`].
    pub cache: KvView<B>,
}

impl IndexerAppend {
    /// Checks a slot mapping and turns it into words: see [`KvAppend::slots`].
    ///
    /// # Errors
    /// The errors of [`KvAppend::slots`].
    pub fn slots(&self, slot_mapping: &[i64]) -> Result<Vec<u32>> {
        KvAppend { shape: INDEX_SHAPE, kv: self.index.kv(), input: self.input, guard: false }
            .slots(slot_mapping)
    }
}

impl Op for IndexerAppend {
    const NAME: &'static str = "indexer_append";
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = RopeAppendBatch<'a>;
    type Args<B> = IndexerAppendArgs<B>;
    type Extent = RopeAppendExtent;
    /// Tokens.
    type Capacity = u32;

    /// Kernels take all of the format but its dtype at run time.
    fn samples() -> Vec<Self> {
        pairs(&FLOATS, &Dtype::ALL, |input, dtype| {
            let format = IndexFormat { dtype, ..IndexFormat::DEEPSEEK_V32 };
            IndexerAppend { index: IndexSpec { format, page_size: 64, num_pages: 64 }, input }
        })
    }

    fn check(&self) -> Result<()> {
        self.index.check()?;
        wide("k", self.input)
    }

    fn kv_layout(&self) -> Option<KvLayout> {
        Some(self.index.kv().layout)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a IndexerAppendArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<IndexerAppendArgs<C>> {
        let angles = self.index.format.reads_angles();
        Ok(IndexerAppendArgs {
            k: args.k.map(|buffer| f(Use::Read("k"), buffer))?,
            norm_weight: f(Use::Read("norm_weight"), &args.norm_weight)?,
            norm_bias: f(Use::Read("norm_bias"), &args.norm_bias)?,
            norm_eps: args.norm_eps,
            positions: f(angles("positions"), &args.positions)?,
            cos_sin: f(angles("cos_sin"), &args.cos_sin)?,
            max_position: args.max_position,
            cache: args.cache.map(|buffer| f(Use::Write("kv"), buffer))?,
        })
    }

    fn check_args<B>(
        &self,
        args: &IndexerAppendArgs<&B>,
        room: RopeAppendExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("norm_eps", args.norm_eps)?;
        args.cache.check(&self.index.kv(), &INDEX_SHAPE, size)?;
        args.k.check("k", [room.tokens, 1, INDEX_DIM], self.input.bytes(), 4, size(args.k.buffer))?;
        for (what, buffer) in [("norm_weight", args.norm_weight), ("norm_bias", args.norm_bias)] {
            fits(what, u64::from(INDEX_DIM) * 4, size(buffer))?;
        }
        let sizes = [args.positions, args.cos_sin].map(size);
        self.index.format.check_angles(room.tokens, args.max_position, sizes)
    }

    fn each_slab<B: Copy>(&self, args: &IndexerAppendArgs<B>) -> Vec<IndexerAppendArgs<B>> {
        args.cache.each_slab().map(|cache| IndexerAppendArgs { cache, ..*args }).collect()
    }

    fn room<B>(&self, args: &IndexerAppendArgs<B>, room: RopeAppendExtent) -> RopeAppendExtent {
        RopeAppendExtent { positions: self.index.format.positions(args.max_position), ..room }
    }

    fn fits(used: RopeAppendExtent, room: RopeAppendExtent) -> Result<(), &'static str> {
        if used.positions > room.positions {
            return Err(
                "the step has positions past IndexerAppendArgs::max_position: bind a RoPE table (cos_sin) of more positions",
            );
        }
        KvAppend::fits(used.tokens, room.tokens)
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for IndexerAppend {
    /// The slots. Where a step's own positions go is the device's.
    fn table(
        &self,
        batch: RopeAppendBatch<'_>,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<StepTable<RopeAppendExtent>> {
        let extent = batch.extent()?;
        check(batch.slot_mapping.len() as u64)?;
        Ok(StepTable { count: extent.tokens, words: self.slots(batch.slot_mapping)?, extent })
    }
}
