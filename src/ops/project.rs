//! Arguments and checks of `head_project`: what a head's own matrix does to every token, as before and after an absorbed decode.

use crate::layer::{View, aligned, distinct, fits, no_aliases};
use crate::{Dtype, Error, Result};

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
    /// Rows of `kv_b_proj`: `H * (P + V)`.
    pub const fn rows(&self) -> u64 {
        self.num_heads as u64 * (self.qk_nope_head_dim as u64 + self.v_head_dim as u64)
    }

    /// Elements of `kv_b_proj`: `H * (P + V) * L`.
    pub const fn elements(&self) -> u64 {
        self.rows() * self.kv_lora_rank as u64
    }

    /// # Errors
    /// [`Error::Shape`].
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

/// What a `head_project` is compiled for: `y[t,h,:] = x[t,h,:] . W[h]`, summed in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProjectSpec {
    /// Dtype of `x`: f32, f16 or bf16.
    pub input: Dtype,
    /// Dtype of the weights: f32, f16 or bf16.
    pub weight: Dtype,
    /// Dtype of `y`: f32, f16 or bf16.
    pub output: Dtype,
    /// `H`: 1 to 128.
    pub num_heads: u32,
    /// Elements of a row of `x`: a multiple of 8 up to 65,536.
    pub k: u32,
    /// Elements of a row of `y`: a multiple of 8 up to 65,536.
    pub n: u32,
    /// How each `W[h]` lies.
    pub order: WeightOrder,
}

impl ProjectSpec {
    /// `ql_nope[t,h,:] = q_nope[t,h,:] . W_UK[h]`: queries into the latent space. The weights are [`WeightView::w_uk`].
    pub fn absorb(dims: &HeadDims, input: Dtype, weight: Dtype, output: Dtype) -> Self {
        let (k, n) = (dims.qk_nope_head_dim, dims.kv_lora_rank);
        Self { input, weight, output, num_heads: dims.num_heads, k, n, order: WeightOrder::Kn }
    }

    /// `o[t,h,:] = attn[t,h,:] . W_UV[h]^T`: latents to values. The weights are [`WeightView::w_uv`].
    pub fn v_up(dims: &HeadDims, input: Dtype, weight: Dtype, output: Dtype) -> Self {
        let (k, n) = (dims.kv_lora_rank, dims.v_head_dim);
        Self { input, weight, output, num_heads: dims.num_heads, k, n, order: WeightOrder::Nk }
    }

    /// `k_nope[s,h,:] = kv_c[s,:] . W_UK[h]^T`: latents to keys, for a prefill. The weights are [`WeightView::w_uk`].
    pub fn k_up(dims: &HeadDims, input: Dtype, weight: Dtype, output: Dtype) -> Self {
        let (k, n) = (dims.kv_lora_rank, dims.qk_nope_head_dim);
        Self { input, weight, output, num_heads: dims.num_heads, k, n, order: WeightOrder::Nk }
    }

    /// # Errors
    /// [`Error::DtypeUnsupported`] for e4m3 and [`Error::Shape`].
    pub fn check(&self) -> Result<()> {
        let cure = "use f32, f16 or bf16; `KvBProj` dequantises e4m3 weights";
        for (what, got) in
            [("a projection's input", self.input), ("its weight", self.weight), ("its output", self.output)]
        {
            if got == Dtype::E4m3 {
                return Err(Error::DtypeUnsupported { what, got, cure });
            }
        }
        check_heads(self.num_heads)?;
        check_dim("k", self.k)?;
        check_dim("n", self.n)
    }

    /// Rows of a head's matrix and elements of each, as they lie.
    pub(crate) const fn matrix(&self) -> (u32, u32) {
        match self.order {
            WeightOrder::Kn => (self.k, self.n),
            WeightOrder::Nk => (self.n, self.k),
        }
    }
}

/// The matrices of all heads somewhere in a buffer. Offset and strides count elements and are multiples of 8.
#[derive(Debug, Clone, Copy)]
pub struct WeightView<B> {
    /// The buffer; it may hold the weights of many layers.
    pub buffer: B,
    /// Elements before the first head's matrix.
    pub offset: u64,
    /// Elements from a head's matrix to the next.
    pub head_stride: u64,
    /// Elements from a row of a matrix to the next.
    pub row_stride: u64,
}

impl<'a, B> WeightView<&'a B> {
    /// `W_UK` of a prepared `kv_b_proj` `[H, P + V, L]` that begins at the front of its buffer: a head's first `P` rows.
    pub fn w_uk(dims: &HeadDims, buffer: &'a B) -> Self {
        let row_stride = u64::from(dims.kv_lora_rank);
        let rows = u64::from(dims.qk_nope_head_dim) + u64::from(dims.v_head_dim);
        Self { buffer, offset: 0, head_stride: rows * row_stride, row_stride }
    }

    /// `W_UV` of the same: a head's last `V` rows.
    pub fn w_uv(dims: &HeadDims, buffer: &'a B) -> Self {
        let w_uk = Self::w_uk(dims, buffer);
        Self { offset: u64::from(dims.qk_nope_head_dim) * w_uk.row_stride, ..w_uk }
    }

    /// Elements from the buffer's front to the end of the last matrix.
    pub(crate) fn end(&self, spec: &ProjectSpec) -> u64 {
        let (rows, columns) = spec.matrix();
        let last = (u64::from(spec.num_heads) - 1).saturating_mul(self.head_stride);
        let last = last.saturating_add((u64::from(rows) - 1).saturating_mul(self.row_stride));
        self.offset.saturating_add(last).saturating_add(columns.into())
    }
}

/// Tokens, their heads' matrices, and where the products go. Offsets and strides are multiples of 8 elements.
#[derive(Debug, Clone, Copy)]
pub struct Project<B> {
    /// `[tokens, H, k]`. A `head_stride` of 0 gives all heads the same row.
    pub x: View<B>,
    /// The matrix of each head.
    pub weight: WeightView<B>,
    /// `[tokens, H, n]`.
    pub y: View<B>,
    /// Tokens in `x` and `y`.
    pub num_tokens: u32,
}

impl<B> Project<&B> {
    /// # Errors
    /// Those of [`ProjectSpec::check`], [`Error::Alignment`], [`Error::BufferTooSmall`], given each buffer's bytes, and
    /// [`Error::Shape`] where rows of `y` overlap.
    pub(crate) fn check(&self, spec: &ProjectSpec, size: impl Fn(&B) -> u64) -> Result<()> {
        spec.check()?;
        let (tokens, heads) = (u64::from(self.num_tokens), u64::from(spec.num_heads));
        for (what, view, dim, dtype) in
            [("x", self.x, spec.k, spec.input), ("y", self.y, spec.n, spec.output)]
        {
            for got in [view.offset, view.token_stride, view.head_stride] {
                aligned(what, got)?;
            }
            let end = view.end(tokens, heads, dim.into()).saturating_mul(dtype.bytes() as u64);
            fits(what, end, size(view.buffer))?;
        }
        let weight = &self.weight;
        for got in [weight.offset, weight.head_stride, weight.row_stride] {
            aligned("weight", got)?;
        }
        let end = weight.end(spec).saturating_mul(spec.weight.bytes() as u64);
        fits("weight", end, size(weight.buffer))?;
        distinct("y", &self.y, tokens, heads, spec.n.into())
    }

    /// # Errors
    /// [`Error::Aliased`].
    pub(crate) fn check_aliases(&self, is_same: impl Fn(&B, &B) -> bool) -> Result<()> {
        let inputs = [("x", self.x.buffer), ("weight", self.weight.buffer)];
        no_aliases(&inputs, &[("y", self.y.buffer)], is_same)
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
