//! `head_project`: each token's rows times the matrix of their head, as before and after an absorbed decode. Arguments and checks.

mod weights;

use std::ops::Range;

pub use weights::{WeightFormat, WeightScales, WeightView};

use super::features::Asks;
use super::guard::{GuardView, check_guard, map_guard};
use super::op::{Op, Use};
use super::samples::{FLOATS, pairs};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, distinct, normal, scale_of};

/// Dims of a model's heads, as its `kv_b_proj` has them: `[H, P + V, L]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadDims {
    /// `H`, heads on this device: 1 to 128.
    pub num_heads: u32,
    /// `L`, elements of the latent.
    pub kv_lora_rank: u32,
    /// `P`, elements of a head's key without its rotary part.
    pub qk_nope_head_dim: u32,
    /// `V`, elements of a head's value.
    pub v_head_dim: u32,
}

impl HeadDims {
    /// Rows of `kv_b_proj`: `H * (P + V)`, at most `u64::MAX`.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        (self.qk_nope_head_dim as u64 + self.v_head_dim as u64).saturating_mul(self.num_heads as u64)
    }

    /// Elements of `kv_b_proj`: `H * (P + V) * L`, at most `u64::MAX`.
    #[must_use]
    pub const fn elements(&self) -> u64 {
        self.rows().saturating_mul(self.kv_lora_rank as u64)
    }

    /// Whether a [`HeadProject`] serves these dims.
    ///
    /// # Errors
    /// [`Error::Shape`] for heads outside 1 to 128, or another dim that is no multiple of 8 from 8 to 65,536.
    pub fn check(&self) -> Result<()> {
        check_heads(self.num_heads)?;
        check_dim("kv_lora_rank", self.kv_lora_rank)?;
        check_dim("qk_nope_head_dim", self.qk_nope_head_dim)?;
        check_dim("v_head_dim", self.v_head_dim)
    }
}

/// How a head's matrix lies in its buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightOrder {
    /// `[k, n]`, `n` contiguous.
    Kn,
    /// `[n, k]`, `k` contiguous.
    Nk,
}

/// Multiplies each token's rows by the matrix of their head: `y[t,h,:] = x[t,h,:] . W[h]`, summed in f32. [`HeadProject::absorb`],
/// [`HeadProject::v_up`] and [`HeadProject::k_up`] are the three of MLA.
///
/// Weights of e4m3 are codes with an f32 scale for each head, or one for all: a sum over codes is multiplied by it, then by
/// [`HeadProjectArgs::scale`], and rounded. A NaN code gives NaN. Those of [`WeightFormat::Q8_0`] have the scales of their blocks. The dim
/// along which rows lie is a multiple of 16 for e4m3 and of 32 for `Q8_0`.
///
/// Arguments of a layer: [`HeadProjectArgs`]. Input of a step: a `Range<u32>`: the tokens that are projected, of `x` and of `y`.
/// [`Error::Shape`] is a range that ends before it begins.
///
/// Room of a binding: `u32`, one past the last token. Capacity of a step: `u32`, tokens.
///
/// ```
/// use wgpu_mla::{Device, Dtype, HeadDims, HeadProject, HeadProjectArgs, View, WeightView, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let dims = HeadDims { num_heads: 2, kv_lora_rank: 16, qk_nope_head_dim: 8, v_head_dim: 8 };
/// let cpu = Cpu::new();
/// let (q_nope, ql_nope) = (cpu.buffer(2 * 8 * 4)?, cpu.buffer(2 * 16 * 4)?);
/// let kv_b_proj = cpu.buffer(dims.elements() * 4)?;
/// cpu.upload(&q_nope, 0, &Dtype::F32.encode_all(&[1.0; 2 * 8]))?;
/// // [H, P + V, L], 1 for the first head and 2 for the second.
/// cpu.upload(&kv_b_proj, 0, &Dtype::F32.encode_all(&[[1.0; 16 * 16], [2.0; 16 * 16]].concat()))?;
/// let weight = WeightView::w_uk(&dims, &kv_b_proj);
/// let (x, y) = (View::dense(&q_nope, 2, 8), View::dense(&ql_nope, 2, 16));
/// let layer = HeadProjectArgs { x, weight, y, scale: 1.0, out_scale: 1.0, saturates: false, guard: None };
///
/// cpu.once(HeadProject::absorb(&dims, Dtype::F32, Dtype::F32, Dtype::F32), 0..1, &layer)?;
/// let ql_nope = Dtype::F32.decode_all(&cpu.download(&ql_nope, 2 * 16 * 4)?);
/// assert_eq!(ql_nope, [[8.0; 16], [16.0; 16]].concat());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadProject {
    /// Dtype of `x`: f32, f16 or bf16.
    pub input: Dtype,
    /// Format of the weights.
    pub weight: WeightFormat,
    /// Dtype of `y`: f32, f16, bf16, or e4m3 with a scale, [`HeadProjectArgs::out_scale`].
    pub output: Dtype,
    /// `H`: 1 to 128.
    pub num_heads: u32,
    /// Elements of a row of `x`: a multiple of 8 up to 65,536.
    pub k: u32,
    /// Elements of a row of `y`: a multiple of 8 up to 65,536.
    pub n: u32,
    /// How each `W[h]` lies.
    pub order: WeightOrder,
    /// Whether it counts what rounding to the output's dtype loses, in [`HeadProjectArgs::guard`].
    pub guard: bool,
}

impl HeadProject {
    /// `ql_nope[t,h,:] = q_nope[t,h,:] . W_UK[h]`: queries into the latent space. The weights are [`WeightView::w_uk`].
    #[must_use]
    pub fn absorb(dims: &HeadDims, input: Dtype, weight: impl Into<WeightFormat>, output: Dtype) -> Self {
        let (k, n) = (dims.qk_nope_head_dim, dims.kv_lora_rank);
        Self {
            input,
            weight: weight.into(),
            output,
            num_heads: dims.num_heads,
            k,
            n,
            order: WeightOrder::Kn,
            guard: false,
        }
    }

    /// `o[t,h,:] = attn[t,h,:] . W_UV[h]^T`: latents to values. The weights are [`WeightView::w_uv`].
    #[must_use]
    pub fn v_up(dims: &HeadDims, input: Dtype, weight: impl Into<WeightFormat>, output: Dtype) -> Self {
        let (k, n) = (dims.kv_lora_rank, dims.v_head_dim);
        Self {
            input,
            weight: weight.into(),
            output,
            num_heads: dims.num_heads,
            k,
            n,
            order: WeightOrder::Nk,
            guard: false,
        }
    }

    /// `k_nope[s,h,:] = kv_c[s,:] . W_UK[h]^T`: latents to keys, for a prefill. The weights are [`WeightView::w_uk`].
    #[must_use]
    pub fn k_up(dims: &HeadDims, input: Dtype, weight: impl Into<WeightFormat>, output: Dtype) -> Self {
        let (k, n) = (dims.kv_lora_rank, dims.qk_nope_head_dim);
        Self {
            input,
            weight: weight.into(),
            output,
            num_heads: dims.num_heads,
            k,
            n,
            order: WeightOrder::Nk,
            guard: false,
        }
    }

    /// The same of matrices whose rows and columns are exchanged, such as GGUF's `attn_k_b`: see [`WeightView::attn_k_b`].
    #[must_use]
    pub fn transposed(self) -> Self {
        let order = match self.order {
            WeightOrder::Kn => WeightOrder::Nk,
            WeightOrder::Nk => WeightOrder::Kn,
        };
        Self { order, ..self }
    }

    /// Heads, rows of a head's matrix and elements of each, as they lie.
    pub(crate) const fn matrices(&self) -> [u32; 3] {
        match self.order {
            WeightOrder::Kn => [self.num_heads, self.k, self.n],
            WeightOrder::Nk => [self.num_heads, self.n, self.k],
        }
    }
}

/// One layer of a [`HeadProject`]: tokens, their heads' matrices, and where the products go. Offsets and strides are multiples of 8
/// elements.
#[derive(Debug, Clone, Copy)]
pub struct HeadProjectArgs<B> {
    /// `[tokens, H, k]`. A `head_stride` of 0 gives all heads the same row.
    pub x: View<B>,
    /// The matrix of each head.
    pub weight: WeightView<B>,
    /// `[tokens, H, n]`.
    pub y: View<B>,
    /// Factor of the products, before they are rounded to the output's dtype; usually 1.
    pub scale: f32,
    /// Scale of an e4m3 output, which holds the nearest codes of the products over it: past 448 they saturate, infinities too, and NaN
    /// stays. 1 for other outputs.
    pub out_scale: f32,
    /// Whether a finite product past the largest number of an f16 or bf16 output becomes that number. Else it becomes infinite. Codes
    /// always saturate.
    pub saturates: bool,
    /// Counters of the products times `scale`; `Some` where [`HeadProject::guard`] is set. What `saturates` keeps finite is counted too.
    pub guard: Option<GuardView<B>>,
}

impl<B> HeadProjectArgs<B> {
    /// The largest magnitude that a finite product is stored with.
    pub(crate) fn limit(&self, output: Dtype) -> f32 {
        // What saturates of codes is the quotient by their scale.
        if self.saturates && !output.is_fp8() { output.max() } else { f32::MAX }
    }
}

impl Asks for HeadProject {}

impl Op for HeadProject {
    const NAME: &'static str = "head_project";
    /// Input of a step: a range of tokens: `absorb` and `v_up` share one.
    const SHARES_STEPS: bool = true;
    type Options = OpOptions;
    type Facts = ();
    /// Which tokens are projected, of `x` and of `y`.
    type Input<'a> = Range<u32>;
    type Args<B> = HeadProjectArgs<B>;
    /// Where the tokens end.
    type Extent = u32;
    /// Tokens that a launch's grid is for.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        let orders = pairs(&[WeightOrder::Kn, WeightOrder::Nk], &FLOATS, |order, output| (order, output));
        let inputs = pairs(&FLOATS, &FLOATS, |input, weight| (input, weight.into()));
        let mut all = pairs(&inputs, &orders, |(input, weight), (order, output)| HeadProject {
            input,
            weight,
            output,
            num_heads: 3,
            k: 40,
            n: 72,
            order,
            guard: false,
        });
        let codes =
            pairs(&[Dtype::E4m3.into(), WeightFormat::Q8_0], &FLOATS, |weight, dtype| (weight, dtype));
        all.extend(pairs(&codes, &[WeightOrder::Kn, WeightOrder::Nk], |(weight, dtype), order| {
            HeadProject {
                input: dtype,
                weight,
                output: dtype,
                num_heads: 3,
                k: 32,
                n: 96,
                order,
                guard: false,
            }
        }));
        let dims = HeadDims { num_heads: 16, kv_lora_rank: 512, qk_nope_head_dim: 128, v_head_dim: 128 };
        all.extend(pairs(&[Self::absorb, Self::v_up], &FLOATS, |of, dtype| of(&dims, dtype, dtype, dtype)));
        // Queries and outputs in codes.
        let codes =
            |of: fn(&HeadDims, Dtype, Dtype, Dtype) -> Self, dtype| of(&dims, dtype, dtype, Dtype::E4m3);
        all.extend(pairs(&[Self::absorb, Self::v_up], &FLOATS, codes));
        let counted = |weight: WeightFormat, output| HeadProject {
            guard: true,
            ..Self::v_up(&dims, Dtype::Bf16, weight, output)
        };
        let bf16 = Dtype::Bf16.into();
        all.extend([
            counted(bf16, Dtype::E4m3),
            counted(bf16, Dtype::F16),
            counted(Dtype::E4m3.into(), Dtype::E4m3),
        ]);
        all.push(HeadProject { guard: true, ..Self::absorb(&dims, Dtype::F16, Dtype::F16, Dtype::F16) });
        all
    }

    fn check(&self) -> Result<()> {
        if self.input.is_fp8() {
            let (what, cure) = ("a projection's input", "use f32, f16 or bf16");
            return Err(Error::DtypeUnsupported { what, got: self.input, cure });
        }
        check_heads(self.num_heads)?;
        check_dim("k", self.k)?;
        check_dim("n", self.n)?;
        let along = if self.order == WeightOrder::Kn { "n" } else { "k" };
        self.weight.check_row(along, self.matrices()[2])
    }

    fn map<'a, B: 'a, C>(
        &self,
        args: &'a HeadProjectArgs<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<HeadProjectArgs<C>> {
        let WeightView { ref buffer, offset, head_stride, row_stride, ref scales } = args.weight;
        Ok(HeadProjectArgs {
            x: args.x.map(|buffer| f(Use::Read("x"), buffer))?,
            weight: WeightView {
                buffer: f(Use::Read("weight"), buffer)?,
                offset,
                head_stride,
                row_stride,
                scales: match scales {
                    Some(scales) => Some(scales.map(|buffer| f(Use::Read("scales"), buffer))?),
                    None => None,
                },
            },
            y: args.y.map(|buffer| f(Use::Write("y"), buffer))?,
            scale: args.scale,
            out_scale: args.out_scale,
            saturates: args.saturates,
            guard: map_guard(&args.guard, f)?,
        })
    }

    fn check_args<B>(
        &self,
        args: &HeadProjectArgs<&B>,
        max_tokens: u32,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        normal("scale", args.scale)?;
        check_guard(self.guard, args.guard.as_ref(), 1, size)?;
        scale_of("out_scale", self.output, args.out_scale)?;
        let heads = self.num_heads;
        let dims = [max_tokens, heads, self.k];
        args.x.check_repeats([false, true], "x", dims, self.input.bytes(), 8, size(args.x.buffer))?;
        args.y.check("y", [max_tokens, heads, self.n], self.output.bytes(), 8, size(args.y.buffer))?;
        args.weight.check(self.weight, self.matrices(), |buffer| size(buffer))?;
        distinct("y", &args.y, max_tokens.into(), heads.into(), self.n.into())
    }

    fn fits(end: u32, max_tokens: u32) -> Result<(), &'static str> {
        if end > max_tokens { Err("the step's tokens end past the binding's max_tokens") } else { Ok(()) }
    }
}

fn check_heads(num_heads: u32) -> Result<()> {
    if !(1..=128).contains(&num_heads) {
        return Err(Error::Shape { what: "num_heads", got: num_heads.into(), cure: "must be 1..=128" });
    }
    Ok(())
}

fn check_dim(what: &'static str, dim: u32) -> Result<()> {
    if !dim.is_multiple_of(8) || !(8..=65_536).contains(&dim) {
        let cure = "must be a multiple of 8 in 8..=65536";
        return Err(Error::Shape { what, got: dim.into(), cure });
    }
    Ok(())
}
