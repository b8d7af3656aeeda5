//! Arrays as TMA tensor maps (CUtensorMap), copied in boxes of some tokens.

use cudarc::driver::sys;

use crate::base::error::Result;
use crate::cache::decode_spec::MlaDecode;
use crate::cuda::formats::copied;
use crate::cuda::library::failed;

/// The limit of a tensor map's strides, in bytes.
pub(in crate::cuda) const MOST_STRIDE: u64 = 1 << 40;

/// Bytes of a line within which the hardware swizzles.
const LINE: u64 = 128;
/// Elements of 16 bits of a line.
pub(in crate::cuda) const LINE_ELEMENTS: u32 = 64;

/// A tensor as the driver encodes it: a parameter of the kernels that copy TMA boxes of it.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// The map of the cache at `address`, whose pages are `block_bytes` apart and a multiple of a box's tokens, copied in boxes of so many
    /// tokens and lines, or all lines of a token: [pages, lines, tokens, columns], a line being 128 bytes, so that requests are whole
    /// lines: where a token is no multiple of that, two tokens are one row of the tensor. Address and strides are multiples of 16 bytes,
    /// strides below [`MOST_STRIDE`]. `BoxOrder` and `GroupOrder` of shaders/cuda/kernels/decode/decode_order.cuh describe the same layout
    /// in shared memory.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn of_cache(
        spec: &MlaDecode,
        address: u64,
        block_bytes: u64,
        (tokens, lines): (u32, Option<u32>),
    ) -> Result<Self> {
        let element = spec.kv.dtype().bytes() as u64;
        let row = u64::from(spec.shape.row_elems()) * element;
        let together = if row.is_multiple_of(LINE) { 1 } else { 2 };
        let row = row * u64::from(together);
        let dtype = copied(spec.kv.dtype());
        let tokens_of_page = u64::from(spec.kv.page_size / together);
        let dims = [LINE / element, tokens_of_page, row / LINE, spec.kv.num_pages.into()];
        let strides = [row, LINE, block_bytes];
        let lines = lines.unwrap_or((row / LINE) as u32);
        let sides = [(LINE / element) as u32, tokens / together, lines, 1];
        Self::encoded(dtype, address, dims, strides, sides)
    }

    /// The map of an array of [tokens, heads, dim] elements of 16 bits at `address`, `dim` a multiple of 64: [heads, lines, tokens, 64
    /// elements], a line being 128 bytes of a row, copied in boxes of so many tokens and lines of a head. Address and strides are multiples
    /// of 16 bytes. A `head_stride` of 0 makes the map of one head; other strides of 0 are of dimensions of 1.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn of_rows(
        address: u64,
        [tokens, heads, dim]: [u32; 3],
        [token_stride, head_stride]: [u64; 2],
        [box_tokens, box_lines]: [u32; 2],
    ) -> Result<Self> {
        if tokens == 0 || dim == 0 {
            return Ok(Self::none());
        }
        let heads = if head_stride == 0 { 1 } else { heads };
        let (elements, lines) = (LINE_ELEMENTS, dim / LINE_ELEMENTS);
        let strides = [token_stride, LINE, if heads == 1 { LINE } else { head_stride }];
        Self::encoded(
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            address,
            [elements.into(), tokens.into(), lines.into(), heads.into()],
            strides,
            [elements, box_tokens, box_lines, 1],
        )
    }

    /// By dims, strides in bytes (the innermost dimension has none) and sides of a box, in elements.
    fn encoded(
        dtype: sys::CUtensorMapDataType,
        address: u64,
        dims: [u64; 4],
        strides: [u64; 3],
        sides: [u32; 4],
    ) -> Result<Self> {
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
        .map_err(failed("to describe an array by a tensor map"))?;
        Ok(Self(map))
    }

    /// A placeholder, for a launch whose kernel uses no tensor map.
    pub fn none() -> Self {
        Self(sys::CUtensorMap { opaque: [0; 16] })
    }
}
