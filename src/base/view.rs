//! Strided views of buffers, and their checks. Generic over a handle `B` on a buffer: `&Buffer` where a caller hands it over.

use std::ops::Range;

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};

/// A strided view of `[tokens, heads, dim]` (or `[tokens, heads]`) elements in a buffer.
///
/// Offset and strides count elements, not bytes. Each op's arguments say what they are multiples of: 8 elements always do, and those of
/// an LSE are free. The stride of a dimension of 1 is unread.
#[derive(Debug, Clone, Copy)]
pub struct View<B> {
    /// The buffer.
    pub buffer: B,
    /// Elements before the first one.
    pub offset: u64,
    /// Elements from a token to the next.
    pub token_stride: u64,
    /// Elements from a head to the next.
    pub head_stride: u64,
}

impl<B> View<B> {
    /// A dense `[tokens, heads, dim]` array that starts at the front of its buffer.
    pub fn dense(buffer: B, heads: u32, dim: u32) -> Self {
        let head_stride = u64::from(dim);
        Self { buffer, offset: 0, token_stride: u64::from(heads) * head_stride, head_stride }
    }

    /// The same view of its buffer, lent.
    pub(crate) fn lent(&self) -> View<&B> {
        let Self { ref buffer, offset, token_stride, head_stride } = *self;
        View { buffer, offset, token_stride, head_stride }
    }

    /// Some columns of its rows, such as the parts of a fused tensor: of `q`, `[tokens, heads, P + R]`, columns `0..P` are `q_nope` and
    /// `P..P + R` are `q_pe`. Nothing is copied.
    ///
    /// ```
    /// use wgpu_mla::View;
    ///
    /// # fn main() -> wgpu_mla::Result<()> {
    /// let (heads, nope, rope) = (16, 128, 64);
    /// let q = View::dense("q", heads, nope + rope);
    /// let (q_nope, q_pe) = (q.columns(0..nope)?, q.columns(nope..nope + rope)?);
    /// assert_eq!((q_nope.offset, q_pe.offset, q_pe.head_stride), (0, 128, 192));
    /// assert!(q.columns(nope..nope + rope + 8).is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for a range that ends before it begins, or past the row: a row is at most as long as the strides, but for those
    /// that are 0.
    pub fn columns(self, columns: Range<u32>) -> Result<Self> {
        let (begin, end) = (u64::from(columns.start), u64::from(columns.end));
        let (what, got) = ("the end of columns", end);
        if end < begin {
            return Err(Error::Shape { what, got, cure: "must not be before their start" });
        }
        let row = [self.token_stride, self.head_stride].into_iter().filter(|&stride| stride > 0).min();
        if row.is_some_and(|row| end > row) {
            let cure = "must be inside the row, which is at most as long as the token and head strides";
            return Err(Error::Shape { what, got, cure });
        }
        Ok(Self { offset: self.offset.saturating_add(begin), ..self })
    }

    /// The same view of another handle.
    pub(crate) fn map<'a, C>(&'a self, f: impl FnOnce(&'a B) -> Result<C>) -> Result<View<C>> {
        let Self { offset, token_stride, head_stride, .. } = *self;
        Ok(View { buffer: f(&self.buffer)?, offset, token_stride, head_stride })
    }

    /// Checks `[tokens, heads, dim]` elements of `bytes` bytes: offset and strides in multiples of `unit` elements, the end inside a
    /// buffer of `size` bytes, and rows that do not overlap. The stride of a dimension of 1 is unread, and may be anything.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::BufferTooSmall`] and [`Error::Shape`].
    pub(crate) fn check(
        &self,
        what: &'static str,
        dims: [u32; 3],
        bytes: usize,
        unit: u64,
        size: u64,
    ) -> Result<()> {
        self.check_inside(what, dims, bytes, unit, size)?;
        let [tokens, heads, dim] = dims.map(u64::from);
        distinct(what, self, tokens, heads, dim)
    }

    /// Like [`View::check`], where a stride of 0 gives all tokens, or all heads, one row, as `repeats` allows.
    pub(crate) fn check_repeats(
        &self,
        repeats: [bool; 2],
        what: &'static str,
        [tokens, heads, dim]: [u32; 3],
        bytes: usize,
        unit: u64,
        size: u64,
    ) -> Result<()> {
        let rows = |repeats: bool, count: u32, stride: u64| {
            if repeats && stride == 0 { count.min(1) } else { count }
        };
        let tokens = rows(repeats[0], tokens, self.token_stride);
        let heads = rows(repeats[1], heads, self.head_stride);
        self.check(what, [tokens, heads, dim], bytes, unit, size)
    }

    /// Like [`View::check`], but lets rows overlap.
    fn check_inside(
        &self,
        what: &'static str,
        [tokens, heads, dim]: [u32; 3],
        bytes: usize,
        unit: u64,
        size: u64,
    ) -> Result<()> {
        let [tokens, heads, dim] = [tokens, heads, dim].map(u64::from);
        if dim == 0 {
            return Ok(());
        }
        let used = |count: u64, stride: u64| if count > 1 { stride } else { 0 };
        for got in [self.offset, used(tokens, self.token_stride), used(heads, self.head_stride)] {
            aligned(what, got, unit)?;
        }
        fits(what, self.end(tokens, heads, dim).saturating_mul(bytes as u64), size)
    }

    /// Elements from the buffer's front to the end of the view.
    pub(crate) fn end(&self, tokens: u64, heads: u64, dim: u64) -> u64 {
        if tokens == 0 || dim == 0 {
            return 0;
        }
        let last = (tokens - 1).saturating_mul(self.token_stride);
        let last = last.saturating_add(heads.saturating_sub(1).saturating_mul(self.head_stride));
        self.offset.saturating_add(last).saturating_add(dim)
    }
}

/// # Errors
/// [`Error::Alignment`].
pub(crate) fn aligned(what: &'static str, got: u64, of: u64) -> Result<()> {
    aligned_in("elements", what, got, of)
}

/// # Errors
/// [`Error::Alignment`].
pub(crate) fn aligned_bytes(what: &'static str, got: u64, of: u64) -> Result<()> {
    aligned_in("bytes", what, got, of)
}

fn aligned_in(unit: &'static str, what: &'static str, got: u64, of: u64) -> Result<()> {
    if !got.is_multiple_of(of) {
        return Err(Error::Alignment { what, got, of, unit });
    }
    Ok(())
}

/// # Errors
/// [`Error::BufferTooSmall`].
pub(crate) fn fits(what: &'static str, end: u64, size: u64) -> Result<()> {
    if end > size {
        return Err(Error::BufferTooSmall { what, end, size });
    }
    Ok(())
}

/// Rows must not overlap: what is written would depend on timing, and what is read would be one row for several.
///
/// # Errors
/// [`Error::Shape`].
pub(crate) fn distinct<B>(
    what: &'static str,
    view: &View<B>,
    tokens: u64,
    heads: u64,
    dim: u64,
) -> Result<()> {
    let dims = [(tokens, view.token_stride), (heads, view.head_stride)];
    let cure = "token and head strides make rows overlap: nest one inside the other";
    nested(dims, dim).map_or(Ok(()), |got| Err(Error::Shape { what, got, cure }))
}

/// Sets of rows, such as those of ranks, must not overlap either. `set_stride` is from a set to the next.
///
/// # Errors
/// [`Error::Shape`], which names `what` with the stride of the sets.
pub(crate) fn distinct_sets<B>(
    what: &'static str,
    (sets, set_stride): (u64, u64),
    view: &View<B>,
    [tokens, heads, dim]: [u32; 3],
) -> Result<()> {
    let dims = [(sets, set_stride), (tokens.into(), view.token_stride), (heads.into(), view.head_stride)];
    let cure =
        "makes sets overlap: it must be at least a set's elements, or lie between the token and head strides";
    nested(dims, dim.into()).map_or(Ok(()), |_| Err(Error::Shape { what, got: set_stride, cure }))
}

/// The first stride that is smaller than what lies inside of it, of dimensions of so many entries in any order. The stride of a dimension
/// of 1 is unread.
pub(crate) fn nested<const N: usize>(mut dims: [(u64, u64); N], dim: u64) -> Option<u64> {
    // Rows without elements do not overlap, such as those of a rotary part that there is not: their strides are unread.
    if dim == 0 || dims.iter().any(|&(count, _)| count == 0) {
        return None;
    }
    dims.sort_unstable_by_key(|&(_, stride)| stride);
    let mut inside = dim;
    for (count, stride) in dims.into_iter().filter(|&(count, _)| count > 1) {
        if stride < inside {
            return Some(stride);
        }
        inside = inside.saturating_add((count - 1).saturating_mul(stride));
    }
    None
}

/// # Errors
/// [`Error::Scale`] for a factor that is not finite and above 0.
pub(crate) fn positive(what: &'static str, got: f32) -> Result<()> {
    if !(got.is_finite() && got > 0.0) {
        return Err(Error::Scale { what, got: got.into(), cure: "must be finite and above 0" });
    }
    Ok(())
}

/// A factor that is divided by, or multiplied with others: a device may take a smaller one for 0.
///
/// # Errors
/// [`Error::Scale`].
pub(crate) fn normal(what: &'static str, got: f32) -> Result<()> {
    if !(got.is_normal() && got > 0.0) {
        let cure = "must be finite and at least 2^-126 (1.18e-38), so that its reciprocal is finite too";
        return Err(Error::Scale { what, got: got.into(), cure });
    }
    Ok(())
}

/// The scale of elements of a dtype, which is 1 unless they are FP8 codes.
///
/// # Errors
/// [`Error::Scale`] and [`Error::ScaleWithoutCodes`].
pub(crate) fn scale_of(what: &'static str, dtype: Dtype, got: f32) -> Result<()> {
    normal(what, got)?;
    codes_only(what, dtype, got)
}

/// # Errors
/// [`Error::ScaleWithoutCodes`].
pub(crate) fn codes_only(what: &'static str, dtype: Dtype, got: f32) -> Result<()> {
    if !dtype.is_fp8() && got != 1.0 {
        return Err(Error::ScaleWithoutCodes { what, got, dtype });
    }
    Ok(())
}

/// What logits are multiplied by, in base 2: the product of an attention's scales and log2(e). Kernels multiply it by powers of two that
/// undo the scales of staged elements, at most 2^16 either way, and compare logits with finite sentinels: within these bounds none of that
/// leaves f32's normal numbers.
const LOGIT_SCALES: std::ops::RangeInclusive<f64> = 1.0 / (1u128 << 100) as f64..=(1u128 << 100) as f64;

/// # Errors
/// [`Error::Scale`] for a product of scales that not every backend multiplies logits by.
pub(crate) fn logit_scale(what: &'static str, scales: &[f32]) -> Result<()> {
    let got: f64 = scales.iter().map(|&scale| f64::from(scale)).product();
    if !LOGIT_SCALES.contains(&(got * std::f64::consts::LOG2_E)) {
        let cure = "must be, times log2(e), from 2^-100 to 2^100 (5.5e-31 to 8.7e29 without log2(e))";
        return Err(Error::Scale { what, got, cure });
    }
    Ok(())
}

/// The number of tokens in a range, and how far it reaches: not at all without a token.
///
/// # Errors
/// [`Error::Shape`] for a range that ends before it begins.
pub(crate) fn check_tokens(tokens: &std::ops::Range<u32>) -> Result<(u32, u32)> {
    match tokens.end.checked_sub(tokens.start) {
        Some(0) => Ok((0, 0)),
        Some(count) => Ok((count, tokens.end)),
        None => Err(Error::Shape {
            what: "the end of a token range",
            got: tokens.end.into(),
            cure: "must not be before its start",
        }),
    }
}

/// # Errors
/// [`Error::DtypeUnsupported`] for FP8.
pub(crate) fn wide(what: &'static str, got: Dtype) -> Result<()> {
    if got.is_fp8() {
        return Err(Error::DtypeUnsupported { what, got, cure: "use f32, f16 or bf16" });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_inside_of_their_rows() {
        let q = View { offset: 8, ..View::dense((), 16, 192) };
        let part = |view: View<()>, columns| {
            view.columns(columns).map(|part| (part.offset, part.token_stride, part.head_stride))
        };
        assert_eq!(part(q, 0..128), Ok((8, 16 * 192, 192)));
        assert_eq!(part(q, 128..192), Ok((136, 16 * 192, 192)));
        assert_eq!(part(q, 192..192), Ok((200, 16 * 192, 192)));
        // By head: a row ends where the next token's begins.
        let by_head = View { token_stride: 192, head_stride: 192 * 5, ..q };
        assert_eq!(part(by_head, 128..192), Ok((136, 192, 960)));
        // All heads share a row.
        let shared = View { token_stride: 576, head_stride: 0, ..q };
        assert_eq!(part(shared, 512..576), Ok((520, 576, 0)));
        #[allow(clippy::reversed_empty_ranges)]
        for (view, columns) in
            [(q, 128..193), (q, 8..0), (by_head, 0..200), (shared, 512..577), (q, 0..u32::MAX)]
        {
            let error = part(view, columns).expect_err("refused");
            assert!(matches!(error, Error::Shape { what: "the end of columns", .. }), "{error}");
        }
    }

    #[test]
    fn rows_of_one_dimension_lie_inside_of_the_next() {
        for (dims, overlaps) in [
            ([(4, 8), (2, 4), (3, 32)], false),
            ([(3, 32), (4, 8), (2, 4)], false),
            ([(4, 8), (2, 4), (3, 31)], true),
            ([(4, 7), (2, 4), (3, 32)], true),
            ([(4, 8), (2, 3), (3, 32)], true),
            ([(4, 0), (2, 4), (3, 32)], true),
            ([(1, 0), (1, 0), (1, 0)], false),
            ([(0, 0), (2, 0), (3, 0)], false),
        ] {
            assert_eq!(nested(dims, 4).is_some(), overlaps, "{dims:?}");
        }
    }

    /// The rotary part of a query where there is none is unread, whatever its strides are.
    #[test]
    fn rows_without_elements_have_any_strides() {
        for (token_stride, head_stride) in [(8, 8), (24, 8), (0, 3), (u64::MAX, u64::MAX)] {
            let view = View { buffer: (), offset: 1, token_stride, head_stride };
            assert_eq!(view.check("q_pe", [5, 2, 0], 4, 8, 0), Ok(()), "{token_stride}, {head_stride}");
        }
    }
}
