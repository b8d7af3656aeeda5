//! A layer's cache as a TMA tensor map (CUtensorMap), copied in boxes of some tokens.

use cudarc::driver::sys;

use crate::cuda::library::failed;
use crate::{Dtype, MlaDecode, Result};

/// The limit of a tensor map's strides, in bytes.
pub(in crate::cuda) const MOST_STRIDE: u64 = 1 << 40;

/// Bytes of a line within which the hardware swizzles.
const LINE: u64 = 128;

/// A tensor as the driver encodes it: a parameter of the kernels that copy TMA boxes of it.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// The map of the cache at `address`, whose pages are `block_bytes` apart and a multiple of a box's `tokens`: [pages, lines, tokens, columns],
    /// a line being 128 bytes, so that requests are whole lines: where a token is no multiple of that, two tokens are one row of the tensor. Address and strides are multiples of 16 bytes, strides below [`MOST_STRIDE`].
    /// `BoxOrder` and `GroupOrder` of shaders/cuda/kernels/decode/decode_order.cuh describe the same layout in shared memory.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn of_cache(spec: &MlaDecode, address: u64, block_bytes: u64, tokens: u32) -> Result<Self> {
        let element = spec.kv.dtype.bytes() as u64;
        let row = u64::from(spec.shape.row_elems()) * element;
        let together = if row.is_multiple_of(LINE) { 1 } else { 2 };
        let row = row * u64::from(together);
        let dtype = match spec.kv.dtype {
            Dtype::E4m3 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        };
        let tokens_of_page = u64::from(spec.kv.page_size / together);
        let dims = [LINE / element, tokens_of_page, row / LINE, spec.kv.num_pages.into()];
        let strides = [row, LINE, block_bytes];
        let sides = [(LINE / element) as u32, tokens / together, (row / LINE) as u32, 1];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: each array has as many numbers as the rank says, one stride less; the driver writes the map and keeps nothing.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                dtype,
                dims.len() as u32,
                address as *mut std::ffi::c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                sides.as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(failed("to describe a cache"))?;
        Ok(Self(map))
    }

    /// For a launch whose kernel uses none.
    pub fn none() -> Self {
        Self(sys::CUtensorMap { opaque: [0; 16] })
    }

    /// The pointer to it that a launch takes.
    pub fn as_param(&self) -> *mut std::ffi::c_void {
        (&raw const self.0).cast_mut().cast()
    }
}
