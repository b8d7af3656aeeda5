//! Addresses and strides of arrays in device memory.

use crate::base::error::Result;
use crate::base::view::View;
use crate::cuda::Buffer;
use crate::cuda::kernels::TensorMap;

/// `Place` of quads.cuh: strides count bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Array {
    address: u64,
    token_stride: u64,
    head_stride: u64,
}

impl Array {
    /// An array of [tokens, heads, dim]; `bytes` is an element's size. The stride of a dimension of 1 is unused, and may be anything.
    pub(super) fn new(view: &View<&Buffer>, bytes: usize, [tokens, heads]: [u32; 2]) -> Self {
        let bytes = bytes as u64;
        // Strides of an empty array were not checked either: no kernel follows them.
        let used = |count: u32, stride: u64| if count > 1 { stride.wrapping_mul(bytes) } else { 0 };
        Self {
            address: view.buffer.ptr().wrapping_add(view.offset.wrapping_mul(bytes)),
            token_stride: used(tokens, view.token_stride),
            head_stride: used(heads, view.head_stride),
        }
    }

    /// Its tensor map, for boxes of so many tokens and lines of a head: the array has [tokens, heads, dim] elements of 16 bits.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub(super) fn map(&self, shape: [u32; 3], sides: [u32; 2]) -> Result<TensorMap> {
        TensorMap::of_rows(self.address, shape, [self.token_stride, self.head_stride], sides)
    }
}
