//! `rope_append`: the steps before a decode in one dispatch. It rotates queries and new keys, and appends new rows to the cache. Arguments
//! and checks.

use super::guard::{GuardView, check_guard, step_row};
use super::kv_append::{KvAppend, KvAppendArgs};
use super::op::{Op, Use};
use super::rope::{Rope, RopeArgs, RopeLayout};
use super::samples::pairs;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, scale_of};
use crate::cache::KvLayout;

/// Does in one dispatch what comes before a decode: rotates queries, rotates the keys of new tokens and appends their rows to the cache,
/// like [`Rope`] of `q_pe`, [`Rope`] of `k_pe` and [`KvAppend`] one after the other.
///
/// Arguments of a layer: [`RopeAppendArgs`]. Input of a step: a [`RopeAppendBatch`], with the errors of a [`KvAppend`]'s, [`Error::Length`]
/// for another number of positions than tokens, and [`Error::Shape`] for a negative position.
///
/// Room of a binding: a [`RopeAppendExtent`], usually [`RopeAppendExtent::of`] so many tokens. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{Device, Dtype, KvAppend, KvAppendArgs, RopeAppend, RopeAppendArgs, RopeAppendBatch, cpu::Cpu};
/// # use wgpu_mla::{KvSpec, KvView, MlaDecode, MlaShape, RopeFrequencies, RopeLayout, View};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
/// let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 1 };
/// let mla = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
/// let cpu = Cpu::new();
/// # let (q, kv_c, k) = (cpu.buffer(32 * 4)?, cpu.buffer(256 * 4)?, cpu.buffer(32 * 4)?);
/// # let (cache, positions, cos_sin) = (cpu.buffer(mla.cache_bytes())?, cpu.buffer(4)?, cpu.buffer(8 * 32 * 4)?);
/// cpu.upload(&k, 0, &Dtype::F32.encode_all(&[1.0]))?; // then zeros
/// cpu.upload(&cos_sin, 0, &Dtype::F32.encode_all(&RopeFrequencies::plain(32, 10_000.0)?.cos_sin(8)?))?;
/// let (q_pe, kv_c, k_pe) = (View::dense(&q, 1, 32), View::dense(&kv_c, 1, 256), View::dense(&k, 1, 32));
/// let layer = KvAppendArgs { kv_c, k_pe, kv: KvView::dense(&cache, &mla), k_scale: 1.0, guard: None };
/// let (positions, cos_sin) = (&positions, &cos_sin); // the step's positions are those that count
/// let (q_pe_scale, q_scale) = (1.0, 1.0);
/// let args = RopeAppendArgs { q_pe, q_pe_out: q_pe, layer, positions, cos_sin, max_position: 8, q_pe_scale, q_scale };
///
/// // One token at position 7, into slot 0.
/// let append = KvAppend { shape, kv, input: Dtype::F32, guard: false };
/// let (query, query_out, layout) = (Dtype::F32, Dtype::F32, RopeLayout::Interleaved);
/// let spec = RopeAppend { append, query, query_out, num_heads: 1, layout };
/// cpu.once(spec, RopeAppendBatch { slot_mapping: &[0], positions: Some(&[7]) }, &args)?;
/// let row = Dtype::F32.decode_all(&cpu.download(&cache, 288 * 4)?);
/// assert_eq!(row[256..258], [7f64.cos() as f32, 7f64.sin() as f32]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeAppend {
    /// The rows to append and the cache. `qk_rope_head_dim` is what is rotated: 0 is refused. With [`KvAppend::guard`] queries that are
    /// codes are counted too, in the row behind that of the keys.
    pub append: KvAppend,
    /// Dtype of `q_pe`: f32, f16 or bf16.
    pub query: Dtype,
    /// Dtype of `q_pe_out`: that of `q_pe`, or e4m3 with a scale, [`RopeAppendArgs::q_scale`].
    pub query_out: Dtype,
    /// Query heads: at most 1024.
    pub num_heads: u32,
    /// Which elements make a pair, in queries and keys.
    pub layout: RopeLayout,
}

/// One layer of a [`RopeAppend`]: queries and new rows before their rotation, where the queries go, and the cache.
///
/// The bits are those of [`Rope`] of `q_pe`, [`Rope`] of `k_pe` and [`KvAppend`] one after the other. Queries of tokens that the slot
/// mapping skips are rotated too. Codes are those of the rotation in f32, which is rounded once.
#[derive(Debug, Clone)]
pub struct RopeAppendArgs<B> {
    /// `[tokens, heads, R]`; see [`RopeArgs::x`].
    pub q_pe: View<B>,
    /// `[tokens, heads, R]`; see [`RopeArgs::y`]. Codes have a buffer of their own.
    pub q_pe_out: View<B>,
    /// The new rows, `k_pe` not yet rotated, and the cache.
    pub layer: KvAppendArgs<B>,
    /// i32 `[tokens]`; see [`RopeArgs::positions`]. Unread by a step that has [`RopeAppendBatch::positions`].
    pub positions: B,
    /// f32 `[max_position, R]`; see [`RopeArgs::cos_sin`].
    pub cos_sin: B,
    /// Rows of `cos_sin`.
    pub max_position: u32,
    /// Factor of `q_pe_out`, not of the keys; see [`RopeArgs::scale`].
    pub q_pe_scale: f32,
    /// Scale of an e4m3 `q_pe_out`, which holds the nearest codes of the rotated elements over it: past 448 they saturate, and NaN stays.
    /// 1 for other dtypes.
    pub q_scale: f32,
}

/// The new tokens of a step of a [`RopeAppend`].
#[derive(Debug, Clone, Copy)]
pub struct RopeAppendBatch<'a> {
    /// The slot of each token, like that of [`KvAppend`]: `page * page_size + offset`, negative for a token that is not appended.
    pub slot_mapping: &'a [i64],
    /// Position of each token, 0 or more. `None`: those that [`RopeAppendArgs::positions`] holds when the commands run.
    pub positions: Option<&'a [i32]>,
}

/// How far a step reaches, or a binding has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RopeAppendExtent {
    /// Tokens, skipped ones included.
    pub tokens: u32,
    /// One more than the largest position that the host knows of. A binding has [`RopeAppendArgs::max_position`], whatever stands here.
    pub positions: u32,
}

impl RopeAppendExtent {
    /// Room for so many tokens.
    #[must_use]
    pub const fn of(tokens: u32) -> Self {
        Self { tokens, positions: 0 }
    }
}

impl<'a> RopeAppendBatch<'a> {
    /// Tokens whose positions are in [`RopeAppendArgs::positions`].
    #[must_use]
    pub const fn slots(slot_mapping: &'a [i64]) -> Self {
        Self { slot_mapping, positions: None }
    }

    /// # Errors
    /// [`Error::Length`] and [`Error::Shape`].
    pub(crate) fn extent(&self) -> Result<RopeAppendExtent> {
        let tokens = u32::try_from(self.slot_mapping.len()).unwrap_or(u32::MAX);
        Ok(RopeAppendExtent {
            tokens,
            positions: positions_end(self.positions, self.slot_mapping.len() as u64)?,
        })
    }
}

/// One more than the largest of a step's own positions; 0 where it has none.
///
/// # Errors
/// [`Error::Length`] for another number of positions than `tokens`, [`Error::Shape`] for a negative one.
pub(super) fn positions_end(positions: Option<&[i32]>, tokens: u64) -> Result<u32> {
    let Some(positions) = positions else { return Ok(0) };
    let got = positions.len() as u64;
    if got != tokens {
        return Err(Error::Length { what: "positions", got, want: tokens, cure: "one position a token" });
    }
    if let Some(index) = positions.iter().position(|&position| position < 0) {
        let cure = "holds a negative position: the first token of a sequence has position 0";
        return Err(Error::Shape { what: "positions at index", got: index as u64, cure });
    }
    Ok(positions.iter().max().map_or(0, |&last| last as u32 + 1))
}

impl RopeAppend {
    /// Rows of counters: keys, and queries that are codes.
    pub(crate) fn guard_rows(&self) -> u32 {
        if self.query_out == self.query { 1 } else { 2 }
    }

    /// The rotation of the queries.
    pub(crate) fn rope(&self) -> Rope {
        Rope {
            dtype: self.query,
            num_heads: self.num_heads,
            rope_dim: self.append.shape.qk_rope_head_dim,
            layout: self.layout,
        }
    }
}

impl<B: Copy> RopeAppendArgs<B> {
    /// Where queries are counted, if they are.
    pub(crate) fn query_guard(&self, spec: &RopeAppend) -> Option<GuardView<B>> {
        let of_keys = self.layer.guard.filter(|_| spec.guard_rows() > 1)?;
        Some(step_row(of_keys, 1))
    }

    /// The rotation of the queries.
    pub(crate) fn rope(&self) -> RopeArgs<B> {
        RopeArgs {
            x: self.q_pe,
            y: self.q_pe_out,
            positions: self.positions,
            cos_sin: self.cos_sin,
            max_position: self.max_position,
            scale: self.q_pe_scale,
        }
    }
}

const NAMES: [&str; 2] = ["q_pe", "q_pe_out"];

impl Op for RopeAppend {
    const NAME: &'static str = "rope_append";
    const CHECKS_SHARED: bool = true;
    type Options = OpOptions;
    type Facts = ();
    type Input<'a> = RopeAppendBatch<'a>;
    type Args<B> = RopeAppendArgs<B>;
    type Extent = RopeAppendExtent;
    /// Tokens.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        let mut appends = KvAppend::samples();
        appends.retain(|append| append.shape.qk_rope_head_dim > 0);
        let guarded: Vec<_> = appends.iter().filter(|append| append.guard).copied().collect();
        appends.retain(|append| !append.guard);
        let outputs = pairs(&Rope::samples(), &[false, true], |rope, codes| (rope, codes));
        let of = |(rope, codes): (Rope, bool), append: KvAppend| RopeAppend {
            append,
            query: rope.dtype,
            query_out: if codes { Dtype::E4m3 } else { rope.dtype },
            num_heads: 6,
            layout: rope.layout,
        };
        let mut all = pairs(&outputs, &appends, of);
        // With counters of keys alone, and of queries too.
        let counted = pairs(&guarded, &outputs[..2], |append, output| of(output, append));
        all.extend(counted);
        all
    }

    fn check(&self) -> Result<()> {
        self.append.check()?;
        if self.query_out != self.query && !self.query_out.is_fp8() {
            let cure = "use the dtype of q_pe, or e4m3";
            return Err(Error::DtypeUnsupported { what: NAMES[1], got: self.query_out, cure });
        }
        self.rope().check_as("q_pe")
    }

    fn kv_layout(&self) -> Option<KvLayout> {
        Some(self.append.kv.layout)
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a RopeAppendArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<RopeAppendArgs<C>> {
        Ok(RopeAppendArgs {
            q_pe: args.q_pe.map(|buffer| f(Use::Read(NAMES[0]), buffer))?,
            q_pe_out: args.q_pe_out.map(|buffer| f(Use::Write(NAMES[1]), buffer))?,
            layer: self.append.map(&args.layer, &mut f)?,
            positions: f(Use::Read("positions"), &args.positions)?,
            cos_sin: f(Use::Read("cos_sin"), &args.cos_sin)?,
            max_position: args.max_position,
            q_pe_scale: args.q_pe_scale,
            q_scale: args.q_scale,
        })
    }

    fn check_args<B>(
        &self,
        args: &RopeAppendArgs<&B>,
        room: RopeAppendExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        self.append.check_args(&args.layer, room.tokens, size)?;
        check_guard(self.append.guard, args.layer.guard.as_ref(), self.guard_rows(), size)?;
        scale_of("q_scale", self.query_out, args.q_scale)?;
        args.rope().check_as(&self.rope(), self.query_out, NAMES, room.tokens, size)
    }

    fn each_slab<B: Copy>(&self, args: &RopeAppendArgs<B>) -> Vec<RopeAppendArgs<B>> {
        let layers = self.append.each_slab(&args.layer);
        layers.into_iter().map(|layer| RopeAppendArgs { layer, ..*args }).collect()
    }

    fn room<B>(&self, args: &RopeAppendArgs<B>, room: RopeAppendExtent) -> RopeAppendExtent {
        RopeAppendExtent { positions: args.max_position, ..room }
    }

    fn fits(used: RopeAppendExtent, room: RopeAppendExtent) -> Result<(), &'static str> {
        if used.positions > room.positions {
            return Err(
                "the step has positions past RopeAppendArgs::max_position: bind a RoPE table (cos_sin) of more positions",
            );
        }
        KvAppend::fits(used.tokens, room.tokens)
    }

    fn check_aliases<B>(
        &self,
        args: &RopeAppendArgs<&B>,
        room: RopeAppendExtent,
        offset: impl Fn(&B, &B) -> Option<i64> + Copy,
    ) -> Result<()> {
        let KvAppendArgs { kv_c, k_pe, kv, .. } = &args.layer;
        let inputs = [
            ("kv_c", kv_c.buffer),
            ("k_pe", k_pe.buffer),
            (NAMES[0], args.q_pe.buffer),
            (NAMES[1], args.q_pe_out.buffer),
            ("positions", args.positions),
            ("cos_sin", args.cos_sin),
        ];
        for (a, input) in inputs {
            if kv.buffers().any(|slab| offset(input, slab).is_some()) {
                return Err(Error::Aliased { a, b: "kv" });
            }
        }
        for (a, input) in &inputs[..2] {
            if offset(input, args.q_pe_out.buffer).is_some() {
                return Err(Error::Aliased { a, b: NAMES[1] });
            }
        }
        kv.check_slabs_apart(|a, b| offset(a, b))?;
        if let Some(guard) = &args.layer.guard {
            let all = inputs.into_iter().chain(kv.buffers().map(|slab| ("kv", *slab)));
            if let Some((a, _)) = all.into_iter().find(|(_, other)| offset(other, guard.counters).is_some()) {
                return Err(Error::Aliased { a, b: "guard" });
            }
        }
        if self.query_out != self.query && offset(args.q_pe.buffer, args.q_pe_out.buffer).is_some() {
            return Err(Error::Aliased { a: NAMES[0], b: NAMES[1] });
        }
        args.rope().check_aliases_as(&self.rope(), NAMES, room.tokens, offset)
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for RopeAppend {
    /// The slots. Where a step's own positions go is the device's.
    fn table(
        &self,
        batch: RopeAppendBatch<'_>,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<StepTable<RopeAppendExtent>> {
        let extent = batch.extent()?;
        check(batch.slot_mapping.len() as u64)?;
        Ok(StepTable { count: extent.tokens, words: self.append.slots(batch.slot_mapping)?, extent })
    }
}
