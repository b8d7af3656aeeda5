//! `mla_prefill`: attention in MLA's expanded form. Arguments, checks and its work list.

use super::features::Asks;
use super::op::{Op, Use};
use super::samples::{FLOATS, pairs};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::mask::Mask;
use crate::base::memory::room_for;
use crate::base::view::{View, distinct, logit_scale, normal, wide};

pub(crate) mod tiles;

/// The attention of a prefill in expanded form: each head has keys and values of its own, as `kv_b_proj` makes them of latents.
/// Variable-length, causal or not: what vLLM calls `flash_attn_varlen_func` for.
///
/// Arguments of a layer: [`MlaPrefillArgs`]. Input of a step: a list of [`PrefillSequence`]s, with the errors of [`PrefillExtent::of`].
/// Options: [`PrefillOptions`].
///
/// Room of a binding: a [`PrefillExtent`], query tokens, keys and rows of results. Capacity of a step: `u32`, tiles.
///
/// ```
/// use wgpu_mla::{Device, Dtype, MlaPrefill, MlaPrefillArgs, PrefillSequence, View, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let (num_heads, dtype, out) = (1, Dtype::F32, Dtype::F32);
/// let spec = MlaPrefill { num_heads, qk_nope_head_dim: 8, qk_rope_head_dim: 0, v_head_dim: 8, dtype, out };
/// let cpu = Cpu::new();
/// let (q, out, lse) = (cpu.buffer(2 * 8 * 4)?, cpu.buffer(2 * 8 * 4)?, cpu.buffer(2 * 4)?);
/// let (k, v) = (cpu.buffer(3 * 8 * 4)?, cpu.buffer(3 * 8 * 4)?);
/// cpu.upload(&v, 0, &Dtype::F32.encode_all(&[[0.0; 8], [1.0; 8], [2.0; 8]].concat()))?;
/// let [q_nope, k_nope, v] = [&q, &k, &v].map(|buffer| View::dense(buffer, 1, 8));
/// let (q_pe, k_pe) = (q_nope, k_nope); // unread
/// let (rows, lses) = (View::dense(&out, 1, 8), View::dense(&lse, 1, 1));
/// let layer = MlaPrefillArgs { q_nope, q_pe, k_nope, k_pe, v, out: rows, lse: lses, softmax_scale: 0.1, v_scale: 1.0 };
///
/// // Two query tokens and three keys: the first sees two of them, the second all. All logits are 0.
/// cpu.once(spec, &[PrefillSequence::causal(0, 2, 0, 3)], &layer)?;
/// let out = Dtype::F32.decode_all(&cpu.download(&out, 2 * 8 * 4)?);
/// assert!((out[0] - 0.5).abs() < 1e-6 && (out[8] - 1.0).abs() < 1e-6);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaPrefill {
    /// `H`, at least 1.
    pub num_heads: u32,
    /// `P`: a multiple of 8 from 8 to 512.
    pub qk_nope_head_dim: u32,
    /// `R`: a multiple of 8 up to 256; 0 for none.
    pub qk_rope_head_dim: u32,
    /// `V`: a multiple of 8 from 8 to 256.
    pub v_head_dim: u32,
    /// Dtype of queries, keys and values: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Dtype of the output: f32, f16 or bf16.
    pub out: Dtype,
}

/// The fewest keys of a part: with fewer, its overhead exceeds the gain. See [`PrefillSequence::split_keys`].
const LEAST_PART_KEYS: u32 = 256;

/// A sequence's part of the queries and of the keys. Several may share keys or queries; each has rows of the output of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefillSequence {
    /// Its first query token in `q_nope` and `q_pe`.
    pub q_begin: u32,
    /// Its query tokens.
    pub q_len: u32,
    /// Its first key in `k_nope`, `k_pe` and `v`.
    pub kv_begin: u32,
    /// Its keys.
    pub kv_len: u32,
    /// Which of them a query sees; [`Mask::Bounds`] is refused.
    pub mask: Mask<'static>,
    /// Its first row in `out` and `lse`: `q_begin`, unless several sequences have the same queries and other keys, whose partial
    /// results are merged later: see [`crate::MergeStatesArgs`].
    pub out_begin: u32,
}

impl PrefillSequence {
    /// A sequence whose last query sees all keys, the one before it all but the last, and so on.
    #[must_use]
    pub fn causal(q_begin: u32, q_len: u32, kv_begin: u32, kv_len: u32) -> Self {
        Self { q_begin, q_len, kv_begin, kv_len, mask: Mask::Causal, out_begin: q_begin }
    }

    /// A sequence whose queries all see all of its keys.
    #[must_use]
    pub fn full(q_begin: u32, q_len: u32, kv_begin: u32, kv_len: u32) -> Self {
        Self { q_begin, q_len, kv_begin, kv_len, mask: Mask::Full, out_begin: q_begin }
    }

    /// The same queries over `num_parts` parts of the keys, as alike as whole blocks of 64 keys allow: some have none where there are few.
    /// Part `i` has the rows of the output from `out_begin + i * row_stride` on. A step that has few queries and many keys fills a
    /// device only so; [`crate::MergeStatesArgs`] says how the parts are merged.
    pub fn split_keys(self, num_parts: u32, row_stride: u32) -> impl Iterator<Item = Self> {
        let (sequence, parts) = (self, u64::from(num_parts));
        let blocks = u64::from(self.kv_len).div_ceil(64);
        let edge = move |part: u64| (part * blocks / parts * 64).min(sequence.kv_len.into()) as u32;
        (0..parts).map(move |part| {
            let (begin, end) = (edge(part), edge(part + 1));
            let mask = match sequence.mask {
                Mask::Causal | Mask::CausalFrom(_) => {
                    let first = sequence.mask.first(sequence.q_len, sequence.kv_len);
                    Mask::CausalFrom(first.saturating_sub(begin.into()))
                }
                whole => whole,
            };
            Self {
                kv_begin: sequence.kv_begin.saturating_add(begin),
                kv_len: end - begin,
                mask,
                out_begin: sequence.out_begin.saturating_add(row_stride.saturating_mul(part as u32)),
                ..sequence
            }
        })
    }

    /// Keys that query `i` sees, whatever `i` is.
    pub(crate) fn visible(&self, i: i64) -> u32 {
        self.mask.visible(i, self.q_len, self.kv_len, 0)
    }
}

/// One layer of an [`MlaPrefill`]: queries, keys and values, and where the result goes. `T` query tokens, `S` keys.
///
/// Head `h` of query `t` attends the keys `k_nope[s, h, :] ++ k_pe[s, h, :]` with the logits `softmax_scale * (q . k)`, and `out[t, h, :]`
/// is `v_scale` times the average of `v[s, h, :]` by their softmax. A query that sees no key has `out` 0 and `lse` -inf. Rows of no
/// sequence are left as they are. Offsets and strides are multiples of 8 elements, but for the LSE's; `k_nope` and `v` may be parts of one
/// array, and `k_pe` is shared by all heads with `head_stride` 0. A `token_stride` of 0 gives all queries, or all keys, one row. Rows do
/// not overlap otherwise.
#[derive(Debug, Clone, Copy)]
pub struct MlaPrefillArgs<B> {
    /// `[T, H, P]`.
    pub q_nope: View<B>,
    /// `[T, H, R]`; unread where `R` is 0.
    pub q_pe: View<B>,
    /// `[S, H, P]`.
    pub k_nope: View<B>,
    /// `[S, H, R]`; unread where `R` is 0.
    pub k_pe: View<B>,
    /// `[S, H, V]`.
    pub v: View<B>,
    /// `[rows, H, V]`: as many rows as query tokens, or more, see [`PrefillSequence::out_begin`].
    pub out: View<B>,
    /// Natural log-sum-exp of the scaled logits, f32 `[rows, H]`.
    pub lse: View<B>,
    /// Factor of the logits; see [`crate::softmax_scale`]. Times log2(e) it is from 2^-100 to 2^100.
    pub softmax_scale: f32,
    /// Factor of the values, and so of `out`; usually 1.
    pub v_scale: f32,
}

/// How far a batch reaches: query tokens, keys and rows of the output that the arrays must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillExtent {
    /// Query tokens: the largest `q_begin + q_len`.
    pub tokens: u32,
    /// Keys: the largest `kv_begin + kv_len`.
    pub keys: u32,
    /// Rows of `out` and `lse`: the largest `out_begin + q_len`.
    pub rows: u32,
}

/// Choices of an [`MlaPrefill`] that have a default.
#[derive(Debug, Clone, Default)]
pub struct PrefillOptions {
    /// Forces a kernel variant by name.
    pub variant: Option<String>,
    /// The most query tokens that a sequence usually has; 0 means any number. There are variants for at most 64, such as decodes that share
    /// a prefix have. Sequences with more query tokens give right results too.
    pub query_tokens: u32,
}

/// How a prefill cuts its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillTiling {
    /// Query rows of a tile: a sequence has a tile for each so many of its query tokens, and one for the rest.
    pub rows: u32,
    /// Workgroups that fill the device.
    pub target_groups: u32,
    /// `H`.
    pub num_heads: u32,
}

impl PrefillTiling {
    /// Parts into which to split the keys of sequences that have `query_tokens` query tokens in all, so that they fill the device: see
    /// [`PrefillSequence::split_keys`].
    #[must_use]
    pub fn key_parts(&self, query_tokens: u32, keys: u32) -> u32 {
        let tiles = u64::from(query_tokens.div_ceil(self.rows.max(1)).max(1));
        let tiles = tiles * u64::from(self.num_heads.max(1));
        let parts = (u64::from(self.target_groups) / tiles).min(keys.div_ceil(LEAST_PART_KEYS).into());
        parts.max(1) as u32
    }
}

/// More than any buffer holds, and little enough that kernels may add.
const MAX_TOKENS: u64 = 1 << 30;

impl PrefillExtent {
    /// Checks a batch, and says how far it reaches.
    ///
    /// # Errors
    /// [`Error::Limit`] for tokens beyond 2^30, [`Error::Shape`] where two sequences have a row of the output in common and for
    /// [`Mask::Bounds`].
    pub fn of(sequences: &[PrefillSequence]) -> Result<Self> {
        let end = |what, begin: u32, len: u32| {
            let need = u64::from(begin) + u64::from(len);
            if need > MAX_TOKENS {
                let cure = "attend fewer tokens a call";
                return Err(Error::Limit { what, need, limit: MAX_TOKENS, cure });
            }
            Ok(need as u32)
        };
        let mut extent = Self::default();
        let mut written = room_for(sequences.len(), "sequences of a prefill")?;
        for sequence in sequences.iter().filter(|sequence| sequence.q_len > 0) {
            if let Mask::Bounds(bounds) = sequence.mask {
                let cure = "give each query token a sequence of its own, with Mask::CausalFrom its bound";
                return Err(Error::Shape {
                    what: "Mask::Bounds of a prefill",
                    got: bounds.len() as u64,
                    cure,
                });
            }
            let tokens = end("query tokens", sequence.q_begin, sequence.q_len)?;
            let keys = end("keys", sequence.kv_begin, sequence.kv_len)?;
            let rows = end("rows of out", sequence.out_begin, sequence.q_len)?;
            extent = Self {
                tokens: extent.tokens.max(tokens),
                keys: extent.keys.max(keys),
                rows: extent.rows.max(rows),
            };
            written.push(sequence.out_begin..rows);
        }
        written.sort_unstable_by_key(|range| range.start);
        if let Some(pair) = written.windows(2).find(|pair| pair[1].start < pair[0].end) {
            let cure = "is in two sequences: give each of them an `out_begin` of its own";
            return Err(Error::Shape { what: "row of out", got: pair[1].start.into(), cure });
        }
        Ok(extent)
    }
}

impl<B: Copy> MlaPrefillArgs<B> {
    /// The arguments with what stands in for views that are unread: without a rotary part, what is not rotary.
    pub(crate) fn read_views(&self, spec: &MlaPrefill) -> [(&'static str, View<B>, u32); 5] {
        let (q_pe, k_pe) =
            if spec.qk_rope_head_dim == 0 { (self.q_nope, self.k_nope) } else { (self.q_pe, self.k_pe) };
        let rope = if spec.qk_rope_head_dim == 0 { spec.qk_nope_head_dim } else { spec.qk_rope_head_dim };
        [
            ("q_nope", self.q_nope, spec.qk_nope_head_dim),
            ("q_pe", q_pe, rope),
            ("k_nope", self.k_nope, spec.qk_nope_head_dim),
            ("k_pe", k_pe, rope),
            ("v", self.v, spec.v_head_dim),
        ]
    }
}

/// A prefill, and the most query tokens of a sequence.
impl Asks for (MlaPrefill, u32) {}

impl Op for MlaPrefill {
    const NAME: &'static str = "mla_prefill";
    type Options = PrefillOptions;
    type Facts = PrefillTiling;
    type Input<'a> = &'a [PrefillSequence];
    type Args<B> = MlaPrefillArgs<B>;
    type Extent = PrefillExtent;
    /// Tiles of query rows.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        let dims = [[128, 64, 128], [192, 64, 256], [64, 32, 64], [16, 32, 16], [24, 0, 72]];
        let dtypes = pairs(&FLOATS, &FLOATS, |dtype, out| (dtype, out));
        pairs(&dims, &dtypes, |[p, r, v], (dtype, out)| MlaPrefill {
            num_heads: 16,
            qk_nope_head_dim: p,
            qk_rope_head_dim: r,
            v_head_dim: v,
            dtype,
            out,
        })
    }

    fn check(&self) -> Result<()> {
        wide("queries, keys and values", self.dtype)?;
        wide("out", self.out)?;
        if !(1..=4096).contains(&self.num_heads) {
            let got = self.num_heads.into();
            return Err(Error::Shape { what: "num_heads", got, cure: "must be from 1 to 4096" });
        }
        let dims = [
            ("qk_nope_head_dim", self.qk_nope_head_dim, 8..=512, "must be a multiple of 8 from 8 to 512"),
            ("qk_rope_head_dim", self.qk_rope_head_dim, 0..=256, "must be a multiple of 8 from 0 to 256"),
            ("v_head_dim", self.v_head_dim, 8..=256, "must be a multiple of 8 from 8 to 256"),
        ];
        for (what, got, range, cure) in dims {
            if !(got.is_multiple_of(8) && range.contains(&got)) {
                return Err(Error::Shape { what, got: got.into(), cure });
            }
        }
        Ok(())
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a MlaPrefillArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<MlaPrefillArgs<C>> {
        let rotary = if self.qk_rope_head_dim > 0 { Use::Read } else { Use::Unread };
        Ok(MlaPrefillArgs {
            q_nope: args.q_nope.map(|buffer| f(Use::Read("q_nope"), buffer))?,
            q_pe: args.q_pe.map(|buffer| f(rotary("q_pe"), buffer))?,
            k_nope: args.k_nope.map(|buffer| f(Use::Read("k_nope"), buffer))?,
            k_pe: args.k_pe.map(|buffer| f(rotary("k_pe"), buffer))?,
            v: args.v.map(|buffer| f(Use::Read("v"), buffer))?,
            out: args.out.map(|buffer| f(Use::Write("out"), buffer))?,
            lse: args.lse.map(|buffer| f(Use::Write("lse"), buffer))?,
            softmax_scale: args.softmax_scale,
            v_scale: args.v_scale,
        })
    }

    fn check_args<B>(
        &self,
        args: &MlaPrefillArgs<&B>,
        room: PrefillExtent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("softmax_scale", args.softmax_scale)?;
        logit_scale("softmax_scale", &[args.softmax_scale])?;
        normal("v_scale", args.v_scale)?;
        let (heads, bytes) = (self.num_heads, self.dtype.bytes());
        for (i, (what, view, dim)) in args.read_views(self).into_iter().enumerate() {
            let dims = [if i < 2 { room.tokens } else { room.keys }, heads, dim];
            view.check_repeats([true, what == "k_pe"], what, dims, bytes, 8, size(view.buffer))?;
        }
        for (what, view, dim, bytes, unit) in
            [("out", args.out, self.v_head_dim, self.out.bytes(), 8), ("lse", args.lse, 1, 4, 1)]
        {
            distinct(what, &view, room.rows.into(), heads.into(), dim.into())?;
            view.check(what, [room.rows, heads, dim], bytes, unit, size(view.buffer))?;
        }
        Ok(())
    }

    fn fits(used: PrefillExtent, room: PrefillExtent) -> Result<(), &'static str> {
        if used.tokens > room.tokens || used.keys > room.keys || used.rows > room.rows {
            return Err("the step reaches further than the binding's query tokens, keys or rows");
        }
        Ok(())
    }
}
