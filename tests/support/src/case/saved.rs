//! Writes a case file.

use std::path::Path;

use safetensors::tensor::{Dtype as FileDtype, TensorView};
use wgpu_mla::Dtype;

/// A computed tensor, to be saved.
#[derive(Debug, Clone)]
pub struct Saved {
    /// Its name in the file.
    pub name: &'static str,
    dtype: FileDtype,
    /// Its dims.
    pub shape: Vec<usize>,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

impl Saved {
    /// A tensor of f32.
    pub fn f32s(name: &'static str, shape: &[usize], values: &[f32]) -> Self {
        Self::encoded(name, Dtype::F32, shape, Dtype::F32.encode_all(values))
    }

    /// A tensor of i32.
    pub fn i32s(name: &'static str, shape: &[usize], values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { name, dtype: FileDtype::I32, shape: shape.to_vec(), bytes }
    }

    /// A tensor of bytes.
    pub fn bytes(name: &'static str, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { name, dtype: FileDtype::U8, shape: shape.to_vec(), bytes }
    }

    /// A tensor of elements that are encoded already.
    pub fn encoded(name: &'static str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        let dtype = match dtype {
            Dtype::F32 => FileDtype::F32,
            Dtype::F16 => FileDtype::F16,
            Dtype::Bf16 => FileDtype::BF16,
            Dtype::E4m3 => FileDtype::F8_E4M3,
        };
        Self { name, dtype, shape: shape.to_vec(), bytes }
    }
}

/// Writes computed tensors to a safetensors file.
pub fn save(path: &Path, tensors: &[Saved]) -> Result<(), String> {
    let mut views = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
        views.push((tensor.name, view.map_err(|error| format!("tensor {}: {error}", tensor.name))?));
    }
    let written = safetensors::serialize_to_file(views, None, path);
    written.map_err(|error| format!("{}: {error}", path.display()))
}
