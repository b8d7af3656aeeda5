//! The PTX kernels, and the arguments that all of them have in common.

pub(super) mod ptx;
mod tensor_map;

pub use tensor_map::TensorMap;
pub(super) use tensor_map::{LINE_ELEMENTS, MOST_STRIDE};

use super::buffer::Buffer;

/// Where an element of `bytes` bytes is on the card. A view without elements may begin anywhere: nothing follows its address.
pub(super) fn address(buffer: &Buffer, offset: u64, bytes: usize) -> u64 {
    buffer.ptr().wrapping_add(offset.wrapping_mul(bytes as u64))
}
