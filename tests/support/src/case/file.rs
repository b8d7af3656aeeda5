//! A case file's tensors and metadata. What is asked for is checked: a broken file is an `Err` that names what is wrong.

use std::collections::HashMap;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as FileDtype, Metadata, TensorView};
use wgpu_mla::Dtype;

pub fn narrow(what: &str, got: u64) -> Result<u32, String> {
    match u32::try_from(got) {
        Ok(got) if got <= i32::MAX as u32 => Ok(got),
        _ => Err(format!("{what} is {got}: must be below 2^31")),
    }
}

/// An open file: its tensors by name, and its metadata.
pub struct File<'a> {
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

/// A tensor whose bytes the file format has checked against its shape.
pub struct Tensor<'a> {
    name: &'a str,
    view: TensorView<'a>,
    pub dims: Vec<u64>,
}

/// A tensor of floating-point elements.
pub struct Floats<'a> {
    tensor: Tensor<'a>,
    pub dtype: Dtype,
}

impl<'a> Floats<'a> {
    pub fn tensor(self) -> Tensor<'a> {
        self.tensor
    }
}

impl<'a> std::ops::Deref for Floats<'a> {
    type Target = Tensor<'a>;
    fn deref(&self) -> &Tensor<'a> {
        &self.tensor
    }
}

impl<'a> File<'a> {
    pub fn open(bytes: &'a [u8]) -> Result<Self, String> {
        let broken = |error| format!("not a safetensors file: {error}");
        check_numbers(bytes)?;
        let (_, metadata): (usize, Metadata) = SafeTensors::read_metadata(bytes).map_err(broken)?;
        let tensors = SafeTensors::deserialize(bytes).map_err(broken)?;
        Ok(Self { tensors, metadata: metadata.metadata().clone().unwrap_or_default() })
    }

    pub fn text(&self, key: &str) -> Result<&str, String> {
        self.metadata.get(key).map(String::as_str).ok_or_else(|| format!("metadata {key} is missing"))
    }

    pub fn number(&self, key: &str) -> Result<u32, String> {
        let text = self.text(key)?;
        text.parse().map_err(|_| format!("metadata {key} is {text:?}: must be a whole number"))
    }

    pub fn flag(&self, key: &str) -> Result<bool, String> {
        match self.text(key)? {
            "true" => Ok(true),
            "false" => Ok(false),
            other => Err(format!("{key} is {other:?}: must be true or false")),
        }
    }

    pub fn softmax_scale(&self) -> Result<f32, String> {
        let text = self.text("softmax_scale")?;
        let scale =
            text.parse().map_err(|_| format!("metadata softmax_scale is {text:?}: must be a number"))?;
        positive("softmax_scale", scale)
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    pub fn tensor(&self, name: &'a str) -> Result<Tensor<'a>, String> {
        let view = self.tensors.tensor(name).map_err(|_| format!("tensor {name} is missing"))?;
        let dims = view.shape().iter().map(|&dim| dim as u64).collect();
        Ok(Tensor { name, view, dims })
    }

    pub fn typed(&self, name: &'a str, dtype: FileDtype) -> Result<Tensor<'a>, String> {
        let tensor = self.tensor(name)?;
        if tensor.view.dtype() != dtype {
            return Err(format!("tensor {name} is {:?}: must be {dtype:?}", tensor.view.dtype()));
        }
        Ok(tensor)
    }

    pub fn floats(&self, name: &'a str) -> Result<Floats<'a>, String> {
        let tensor = self.tensor(name)?;
        let dtype = match tensor.view.dtype() {
            FileDtype::F32 => Dtype::F32,
            FileDtype::F16 => Dtype::F16,
            FileDtype::BF16 => Dtype::Bf16,
            FileDtype::F8_E4M3 => Dtype::E4m3,
            other => return Err(format!("tensor {name} is {other:?}: must be F32, F16, BF16 or F8_E4M3")),
        };
        Ok(Floats { tensor, dtype })
    }

    /// A tensor of bytes.
    pub fn codes(&self, name: &'a str) -> Result<Tensor<'a>, String> {
        self.typed(name, FileDtype::U8)
    }

    pub fn f32s(&self, name: &'a str, shape: &[u64]) -> Result<Vec<f32>, String> {
        let tensor = self.typed(name, FileDtype::F32)?;
        tensor.expect(shape)?;
        Ok(tensor.elements(f32::from_le_bytes))
    }

    pub fn i32s<const N: usize>(&self, name: &'a str, dims: [&str; N]) -> Result<Vec<i32>, String> {
        let tensor = self.typed(name, FileDtype::I32)?;
        tensor.shape(dims)?;
        Ok(tensor.elements(i32::from_le_bytes))
    }

    pub fn i64s(&self, name: &'a str) -> Result<Vec<i64>, String> {
        let tensor = self.typed(name, FileDtype::I64)?;
        tensor.shape(["tokens"])?;
        Ok(tensor.elements(i64::from_le_bytes))
    }

    /// An optional `[1]` tensor, 1 where it is missing.
    pub fn scale(&self, name: &'a str) -> Result<f32, String> {
        if !self.has(name) {
            return Ok(1.0);
        }
        positive(name, self.f32s(name, &[1])?.first().copied().unwrap_or(f32::NAN))
    }
}

/// No number of the header has more than 15 digits: where overflow is checked, `safetensors` panics on offsets
/// that add up to more than a `usize`.
fn check_numbers(bytes: &[u8]) -> Result<(), String> {
    let length = bytes.first_chunk::<8>().map_or(0, |len| u64::from_le_bytes(*len));
    let end = usize::try_from(length).unwrap_or(usize::MAX).saturating_add(8).min(bytes.len());
    let (mut in_string, mut escaped, mut digits) = (false, false, 0);
    for &byte in bytes.get(8..end).unwrap_or(&[]) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ => {}
        }
        digits = if byte.is_ascii_digit() && !in_string { digits + 1 } else { 0 };
        if digits > 15 {
            return Err("not a safetensors file: a number of its header is absurdly large".to_owned());
        }
    }
    Ok(())
}

fn positive(what: &str, scale: f32) -> Result<f32, String> {
    if scale.is_finite() && scale > 0.0 {
        return Ok(scale);
    }
    Err(format!("{what} is {scale}: must be finite and above 0"))
}

impl Tensor<'_> {
    /// The dims, if there are as many as names for them.
    pub fn shape<const N: usize>(&self, names: [&str; N]) -> Result<[u64; N], String> {
        let dims = <[u64; N]>::try_from(self.dims.as_slice());
        dims.map_err(|_| format!("tensor {} is {:?}: must be [{}]", self.name, self.dims, names.join(", ")))
    }

    pub fn expect(&self, shape: &[u64]) -> Result<(), String> {
        if self.dims != shape {
            return Err(format!("tensor {} is {:?}: must be {shape:?}", self.name, self.dims));
        }
        Ok(())
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.view.data().to_vec()
    }

    pub fn elements<T, const N: usize>(&self, read: impl Fn([u8; N]) -> T) -> Vec<T> {
        self.view.data().chunks_exact(N).filter_map(|bytes| bytes.try_into().ok()).map(read).collect()
    }
}
