//! The matrices of a [`HeadProject`](super::HeadProject): the format of their elements, and where they lie.

use super::HeadDims;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::{View, aligned, aligned_bytes, distinct, fits};

/// What a matrix's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// f32, f16 or bf16, or codes of e4m3, which have scales: [`WeightView::scales`].
    Elements(Dtype),
    /// GGUF's `Q8_0`, as its files hold it: blocks of 34 bytes, which are an f16 scale and 32 `i8`. The value of an element is their
    /// product. A block is 32 consecutive elements of a row.
    Q8_0,
}

impl From<Dtype> for WeightFormat {
    fn from(dtype: Dtype) -> Self {
        Self::Elements(dtype)
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl WeightFormat {
    /// Elements of a `Q8_0` block.
    pub(crate) const Q8_0_BLOCK: u32 = 32;
    /// Bytes of a `Q8_0` block.
    pub(crate) const Q8_0_BYTES: u32 = 34;

    /// Its short name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Elements(dtype) => dtype.name(),
            Self::Q8_0 => "q8_0",
        }
    }

    /// Bytes of so many consecutive elements of a row, whole blocks of them; at most `u64::MAX`.
    #[must_use]
    pub const fn bytes_of(self, elements: u64) -> u64 {
        match self {
            Self::Elements(dtype) => elements.saturating_mul(dtype.bytes() as u64),
            Self::Q8_0 => (elements / Self::Q8_0_BLOCK as u64).saturating_mul(Self::Q8_0_BYTES as u64),
        }
    }

    /// The dtype, where elements lie one by one.
    #[must_use]
    pub const fn dtype(self) -> Option<Dtype> {
        match self {
            Self::Elements(dtype) => Some(dtype),
            Self::Q8_0 => None,
        }
    }

    /// Whether [`WeightView::scales`] must be there, and otherwise must not.
    #[must_use]
    pub const fn has_scales(self) -> bool {
        matches!(self, Self::Elements(dtype) if dtype.is_fp8())
    }

    /// Bytes of what offsets and strides count: elements, or bytes of blocks.
    pub(crate) const fn unit_bytes(self) -> usize {
        match self {
            Self::Elements(dtype) => dtype.bytes(),
            Self::Q8_0 => 1,
        }
    }

    /// A row's elements are a multiple of this.
    const fn row_multiple(self) -> u32 {
        match self {
            Self::Elements(dtype) => {
                if dtype.is_fp8() {
                    16
                } else {
                    8
                }
            }
            Self::Q8_0 => Self::Q8_0_BLOCK,
        }
    }

    /// Checks the dim along which rows lie.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub(crate) fn check_row(self, what: &'static str, elements: u32) -> Result<()> {
        if elements.is_multiple_of(self.row_multiple()) {
            return Ok(());
        }
        let cure = match self {
            Self::Q8_0 => {
                "must be a multiple of 32 where weights are Q8_0 blocks, which lie along it: dequantise them to f16 for other dims"
            }
            Self::Elements(_) => {
                "must be a multiple of 16 where it is the contiguous dim of e4m3 weights: use 16-bit weights for other dims"
            }
        };
        Err(Error::Shape { what, got: elements.into(), cure })
    }

    /// Checks an offset or a stride.
    fn check_place(self, got: u64) -> Result<()> {
        match self {
            Self::Elements(_) => aligned("weight", got, self.row_multiple().into()),
            Self::Q8_0 => aligned_bytes("weight", got, 2),
        }
    }
}

/// f32 scales of e4m3 weights in a buffer: an element of head `h` is its code times `scales[offset + h * head_stride]`. Any finite scale.
#[derive(Debug, Clone, Copy)]
pub struct WeightScales<B> {
    /// The buffer; it may hold the scales of many layers.
    pub buffer: B,
    /// f32 elements before the first head's.
    pub offset: u64,
    /// f32 elements from a head's to the next; 0: one scale for all.
    pub head_stride: u64,
}

impl<B> WeightScales<B> {
    /// `[H]`, from the buffer's front.
    pub fn per_head(buffer: B) -> Self {
        Self { buffer, offset: 0, head_stride: 1 }
    }

    /// One for the whole tensor, at the buffer's front.
    pub fn per_tensor(buffer: B) -> Self {
        Self { buffer, offset: 0, head_stride: 0 }
    }

    /// The scales of each head's `W_UK`, in `[2, H]` as [`KvBProj::prepare_e4m3`](crate::KvBProj::prepare_e4m3) gives them.
    pub fn w_uk(buffer: B) -> Self {
        Self::per_head(buffer)
    }

    /// The scales of each head's `W_UV`, in the same.
    pub fn w_uv(dims: &HeadDims, buffer: B) -> Self {
        Self { offset: dims.num_heads.into(), ..Self::per_head(buffer) }
    }

    pub(crate) fn map<'a, C>(&'a self, f: impl FnOnce(&'a B) -> Result<C>) -> Result<WeightScales<C>> {
        let Self { offset, head_stride, .. } = *self;
        Ok(WeightScales { buffer: f(&self.buffer)?, offset, head_stride })
    }

    /// The first f32 past the last head's.
    pub(crate) fn end(&self, num_heads: u32) -> u64 {
        let last = (u64::from(num_heads) - 1).saturating_mul(self.head_stride);
        self.offset.saturating_add(last).saturating_add(1)
    }
}

/// The matrices of all heads somewhere in a buffer. Offset and strides count elements and are multiples of 8, or of 16 where they are
/// e4m3. Of `Q8_0` they count bytes, and are even.
#[derive(Debug, Clone, Copy)]
pub struct WeightView<B> {
    /// The buffer; it may hold the weights of many layers.
    pub buffer: B,
    /// Elements before the first head's matrix; bytes of `Q8_0`.
    pub offset: u64,
    /// Elements from a head's matrix to the next; bytes of `Q8_0`.
    pub head_stride: u64,
    /// Elements from a row of a matrix to the next; bytes of `Q8_0`.
    pub row_stride: u64,
    /// Scales of e4m3 codes; `None` for all other formats.
    pub scales: Option<WeightScales<B>>,
}

impl<B> WeightView<B> {
    /// `W_UK` of a prepared `kv_b_proj` `[H, P + V, L]` that begins at the front of its buffer: a head's first `P` rows.
    pub fn w_uk(dims: &HeadDims, buffer: B) -> Self {
        let row_stride = u64::from(dims.kv_lora_rank);
        let rows = u64::from(dims.qk_nope_head_dim) + u64::from(dims.v_head_dim);
        Self { buffer, offset: 0, head_stride: rows.saturating_mul(row_stride), row_stride, scales: None }
    }

    /// `W_UV` of the same: a head's last `V` rows.
    pub fn w_uv(dims: &HeadDims, buffer: B) -> Self {
        let w_uk = Self::w_uk(dims, buffer);
        Self { offset: u64::from(dims.qk_nope_head_dim) * w_uk.row_stride, ..w_uk }
    }

    /// GGUF's `attn_k_b`, `[H, L, P]`, from the front of its buffer. Its rows are the columns of `W_UK`, so it is for
    /// [`HeadProject::absorb`](super::HeadProject::absorb) and `k_up` with [`HeadProject::transposed`](super::HeadProject::transposed).
    pub fn attn_k_b(dims: &HeadDims, format: WeightFormat, buffer: B) -> Self {
        Self::dense(buffer, format, dims.kv_lora_rank, dims.qk_nope_head_dim)
    }

    /// GGUF's `attn_v_b`, `[H, V, L]`, from the front of its buffer, for [`HeadProject::v_up`](super::HeadProject::v_up).
    pub fn attn_v_b(dims: &HeadDims, format: WeightFormat, buffer: B) -> Self {
        Self::dense(buffer, format, dims.v_head_dim, dims.kv_lora_rank)
    }

    /// `[H, rows, columns]`, dense.
    fn dense(buffer: B, format: WeightFormat, rows: u32, columns: u32) -> Self {
        let row_stride = format.bytes_of(columns.into()) / format.unit_bytes() as u64;
        Self {
            buffer,
            offset: 0,
            head_stride: row_stride.saturating_mul(rows.into()),
            row_stride,
            scales: None,
        }
    }

    /// The same matrices of e4m3 codes with their scales.
    #[must_use]
    pub fn with_scales(self, scales: WeightScales<B>) -> Self {
        Self { scales: Some(scales), ..self }
    }

    /// Bytes of the buffer that the matrices span, of `[heads, rows, columns]`.
    pub(crate) fn bytes(
        &self,
        format: WeightFormat,
        [heads, rows, columns]: [u32; 3],
    ) -> std::ops::Range<u64> {
        let unit = format.unit_bytes() as u64;
        let last = (u64::from(heads) - 1).saturating_mul(self.head_stride);
        let last = last.saturating_add((u64::from(rows) - 1).saturating_mul(self.row_stride));
        let end = self.offset.saturating_add(last).saturating_mul(unit);
        self.offset.saturating_mul(unit)..end.saturating_add(format.bytes_of(columns.into()))
    }

    /// # Errors
    /// [`Error::Alignment`], [`Error::BufferTooSmall`], [`Error::Shape`] for rows that overlap, and [`Error::WeightScales`].
    pub(crate) fn check(
        &self,
        format: WeightFormat,
        dims: [u32; 3],
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()> {
        for got in [self.offset, self.head_stride, self.row_stride] {
            format.check_place(got)?;
        }
        fits("weight", self.bytes(format, dims).end, size(&self.buffer))?;
        let [heads, rows, columns] = dims;
        let row = format.bytes_of(columns.into()) / format.unit_bytes() as u64;
        let matrix =
            View { buffer: (), offset: 0, token_stride: self.row_stride, head_stride: self.head_stride };
        distinct("weight", &matrix, rows.into(), heads.into(), row)?;
        match (&self.scales, format.has_scales()) {
            (None, true) => {
                let cure = "need `WeightView::with_scales`: an f32 for each head, or one for all";
                Err(Error::WeightScales { format: format.name(), cure })
            }
            (Some(_), false) => {
                let cure = "have no scales beside them: leave `WeightView::scales` empty, or multiply `scale` by them";
                Err(Error::WeightScales { format: format.name(), cure })
            }
            (Some(scales), true) => fits("scales", scales.end(heads).saturating_mul(4), size(&scales.buffer)),
            (None, false) => Ok(()),
        }
    }
}
