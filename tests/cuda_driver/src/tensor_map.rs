//! TMA tensor maps, as scripts/ptxemu/tma.py has them: 16 words.

use std::ffi::c_void;

use cudarc::driver::sys::{CUresult, CUtensorMap, CUtensorMapDataType as DataType};
use cudarc::driver::sys::{
    CUtensorMapFloatOOBfill as Fill, CUtensorMapInterleave as Interleave,
    CUtensorMapL2promotion as Promotion, CUtensorMapSwizzle as Swizzle,
};

use crate::state::code;

const RANK: usize = 4;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut CUtensorMap,
    dtype: DataType,
    rank: u32,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    sides: *const u32,
    steps: *const u32,
    _: Interleave,
    swizzle: Swizzle,
    _: Promotion,
    _: Fill,
) -> CUresult {
    let element = match dtype {
        DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8 => 1,
        DataType::CU_TENSOR_MAP_DATA_TYPE_UINT16 => 2,
        DataType::CU_TENSOR_MAP_DATA_TYPE_UINT32 => 4,
        _ => return CUresult::CUDA_ERROR_NOT_SUPPORTED,
    };
    if rank as usize != RANK || swizzle != Swizzle::CU_TENSOR_MAP_SWIZZLE_128B {
        return CUresult::CUDA_ERROR_NOT_SUPPORTED;
    }
    let (dims, strides, sides, steps) = unsafe {
        let array = |at: *const u32| std::slice::from_raw_parts(at, RANK);
        (
            std::slice::from_raw_parts(dims, RANK),
            std::slice::from_raw_parts(strides, RANK - 1),
            array(sides),
            array(steps),
        )
    };
    code(
        words(element, address as u64, dims, strides, sides, steps)
            .map(|words| unsafe { map.cast::<[u64; 16]>().write(words) }),
    )
}

/// With the limits that the driver's documentation states.
fn words(
    element: u64,
    address: u64,
    dims: &[u64],
    strides: &[u64],
    sides: &[u32],
    steps: &[u32],
) -> Result<[u64; 16], CUresult> {
    let fine = address.is_multiple_of(16)
        && dims.iter().all(|&dim| (1..=1 << 32).contains(&dim))
        && strides.iter().all(|&stride| stride.is_multiple_of(16) && stride < 1 << 40)
        && sides.iter().all(|&side| (1..=256).contains(&side))
        && steps.iter().all(|&step| step == 1)
        && (u64::from(sides[0]) * element).is_multiple_of(16)
        && u64::from(sides[0]) * element <= 128;
    if !fine {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let mut words = [0; 16];
    words[0] = address;
    words[1] = element;
    words[2..6].copy_from_slice(dims);
    words[6..9].copy_from_slice(strides);
    for (word, &side) in words[9..13].iter_mut().zip(sides) {
        *word = side.into();
    }
    words[13] = 128;
    words[14] = RANK as u64;
    Ok(words)
}
