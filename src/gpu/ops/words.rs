//! Outputs that shaders write by whole words, of any head_size, offset and stride: `lib/words.wgsl`.

use crate::base::dtype::Dtype;
use crate::base::view::View;
use crate::gpu::buffer::Window;
use crate::gpu::kernels::formats::Format;

/// The words that an output touches, and how an element in them is traced back to its row.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Words {
    pub first_word: u32,
    pub num_words: u32,
    pub inner_is_token: u32,
    pub inner_stride: u32,
    pub outer_stride: u32,
}

impl Words {
    /// The words of a view of `[tokens, heads, dim]`, none of which is 0, whose rows do not overlap.
    pub(super) fn of(
        view: &View<&wgpu::Buffer>,
        window: &Window<'_>,
        [tokens, heads, dim]: [u32; 3],
        dtype: Dtype,
    ) -> Self {
        let [tokens, heads, dim] = [tokens, heads, dim].map(u64::from);
        let (t, h) = (view.token_stride, view.head_stride);
        let at = |element: u64| u64::from(window.at(element, dtype.bytes(), 1));
        let (start, end) = (at(view.offset), at(view.end(tokens, heads, dim)));
        // A dimension of one row has no stride of its own: it gets one that keeps the division an inverse.
        let (inner_is_token, inner, outer) = match (tokens, heads) {
            (1, 1) => (false, dim, end - start),
            (1, _) => (false, h, end - start),
            (_, 1) => (false, dim, t),
            _ if t >= h.saturating_mul(heads - 1).saturating_add(dim) => (false, h, t),
            _ => (true, t, h),
        };
        let per_word = per_word(dtype).into();
        let first_word = (start / per_word) as u32;
        Self {
            first_word,
            num_words: end.div_ceil(per_word) as u32 - first_word,
            inner_is_token: inner_is_token.into(),
            inner_stride: inner as u32,
            outer_stride: outer as u32,
        }
    }
}

/// The constants of `lib/words.wgsl`.
pub(super) fn word_consts(dtype: Dtype, head_size: u32) -> [(&'static str, u32); 3] {
    let mask = if dtype == Dtype::F32 { u32::MAX } else { 0xFFFF };
    [("HEAD_SIZE", head_size), ("PER_WORD", per_word(dtype)), ("CODE_MASK", mask)]
}

fn per_word(dtype: Dtype) -> u32 {
    4 / dtype.bytes() as u32
}

/// The files of a shader by words, before its own.
pub(super) fn word_files(dtype: Dtype) -> [&'static str; 3] {
    [include_str!("../../../shaders/lib/words.wgsl"), Format::of(dtype).element, Format::of(dtype).out]
}
