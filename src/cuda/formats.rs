//! What PTX kernels need from a dtype. No other file of this backend matches on dtypes. The kernels for a cache's dtype are in modules with
//! its name (`mla_decode_bf16`); a dtype without a module has no variant of that kind.

use cudarc::driver::sys::CUtensorMapDataType;

use crate::base::dtype::Dtype;
use crate::cache::KvLayout;
use crate::cache::decode_spec::MlaDecode;
use crate::ops::WeightFormat;

/// `enum Dtype` of `shaders/cuda/kernels/decode/mla.cuh`.
pub(super) const fn code(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
        Dtype::E4m3 => 3,
    }
}

/// `WEIGHTS_*` of `shaders/cuda/kernels/project/weights.cuh`: the code of a dtype, or the next.
pub(super) const fn weight_code(format: WeightFormat) -> u32 {
    match format {
        WeightFormat::Elements(dtype) => code(dtype),
        WeightFormat::Q8_0 => 4,
    }
}

/// What the Tensor Memory Accelerator copies: bytes, or 16 bits.
pub(super) const fn copied(dtype: Dtype) -> CUtensorMapDataType {
    match dtype {
        Dtype::E4m3 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
    }
}

/// Whether a query is split into two parts, because the tensor cores' dtype cannot hold it even if scaled by a power of two. The rotary
/// part of records is multiplied as bf16.
pub(super) fn splits_queries(spec: &MlaDecode) -> bool {
    let has_bf16 = spec.kv.dtype() == Dtype::Bf16 || spec.kv.layout == KvLayout::Ds656;
    spec.query == Dtype::F32 || (spec.query == Dtype::F16 && has_bf16)
}
