//! Weights on their way to the device, one after the other.

use burn::tensor::{DType, Device, Tensor, TensorData};
use generate::parts::{KvB, Linear, Matrix, Norm};
use generate::{Error, Result};
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

/// Elements that a thread converts at a time.
const PIECE: usize = 1 << 16;

/// Bytes that may be on their way: more of them would be in memory twice.
const UNDER_WAY: u64 = 256 << 20;

/// Brings weights to a device, in one dtype.
pub struct Upload<'a> {
    pub device: &'a Device,
    /// What matrices become. Norms, biases and routers are f32.
    pub dtype: DType,
    /// Bytes of a buffer that a kernel can read.
    limit: u64,
    progress: &'a mut dyn FnMut(u64),
    done: u64,
    under_way: u64,
    /// Whether some weight is beyond the range of `dtype`.
    is_beyond: bool,
}

impl<'a> Upload<'a> {
    /// `limit` is of bytes that a kernel can read of a buffer. `progress` is told of the bytes that are there.
    pub fn new(device: &'a Device, dtype: DType, limit: u64, progress: &'a mut dyn FnMut(u64)) -> Self {
        Self { device, dtype, limit, progress, done: 0, under_way: 0, is_beyond: false }
    }

    /// Rows of a matrix of so many columns that are in one buffer at most.
    pub fn rows_at_once(&self, columns: usize) -> usize {
        let row = (columns * self.dtype.size()).max(1) as u64;
        // Whole blocks of rows, as kernels multiply them.
        usize::try_from(self.limit / row / 256 * 256).unwrap_or(usize::MAX).max(256)
    }

    /// `[columns, rows]` of matrices of the same columns, one below the other: a view of them as they are in memory, transposed.
    pub fn matrices(&mut self, parts: &[&Matrix]) -> Tensor<2> {
        self.in_dtype(parts, self.dtype)
    }

    /// The same in f32.
    pub fn exact(&mut self, matrix: &Matrix) -> Tensor<2> {
        self.in_dtype(&[matrix], DType::F32)
    }

    /// A layer's `kv_b_proj`, `[L, H * (P + V)]`.
    pub fn kv_b(&mut self, kv_b: &KvB) -> Tensor<2> {
        if let KvB::Whole(matrix) = kv_b {
            return self.matrices(&[matrix]);
        }
        let (KvB::Parts { latent, .. }, values) = (kv_b, kv_b.values()) else { return self.row(Vec::new()) };
        let mut bytes = vec![0; values.len() * self.dtype.size()];
        self.is_beyond |= encode(&values, self.dtype, &mut bytes);
        self.send(bytes, [values.len() / latent, *latent], self.dtype)
    }

    fn in_dtype(&mut self, parts: &[&Matrix], dtype: DType) -> Tensor<2> {
        let columns = parts.first().map_or(0, |part| part.dims()[1]);
        let rows: usize = parts.iter().map(|part| part.dims()[0]).sum();
        let mut bytes = Vec::with_capacity(rows * columns * dtype.size());
        for part in parts {
            self.is_beyond |= append(&mut bytes, part, dtype);
            self.done += part.bytes().len() as u64;
        }
        self.send(bytes, [rows, columns], dtype)
    }

    fn send(&mut self, bytes: Vec<u8>, shape: [usize; 2], dtype: DType) -> Tensor<2> {
        self.under_way += bytes.len() as u64;
        let data = TensorData::from_bytes_vec(bytes, shape, dtype);
        let tensor = Tensor::<2>::from_data(data, (self.device, dtype));
        (self.progress)(self.done);
        tensor.transpose()
    }

    /// Waits until what was sent is on the device, where it is much.
    ///
    /// # Errors
    /// [`Error::Engine`]; [`Error::Input`] where a weight that was sent is beyond f16.
    pub fn settle(&mut self) -> Result<()> {
        if self.is_beyond {
            let cure = "use --weight-dtype f32, or --engine cpu";
            return Err(Error::Input(format!("--weight-dtype f16: a weight is beyond 65504; {cure}")));
        }
        if self.under_way < UNDER_WAY {
            return Ok(());
        }
        self.under_way = 0;
        self.device
            .sync()
            .map_err(|error| Error::Engine(format!("weights do not reach the device: {error:?}")))
    }

    /// Biases, `[1, n]`; of those that have none 0; `None` where none has any.
    pub fn biases(&self, parts: &[&Linear]) -> Option<Tensor<2>> {
        parts.iter().find(|part| part.bias.is_some())?;
        let of = |part: &&Linear| part.bias.clone().unwrap_or_else(|| vec![0.0; part.weight.dims()[0]]);
        Some(self.row(parts.iter().flat_map(of).collect()))
    }

    /// A norm's factors, `[1, n]`.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn norm(&self, norm: &Norm) -> Result<Tensor<2>> {
        Ok(self.row(norm.weight()?))
    }

    /// `[1, n]` in f32.
    pub fn row(&self, values: Vec<f32>) -> Tensor<2> {
        let shape = [1, values.len()];
        Tensor::from_data(TensorData::new(values, shape), (self.device, DType::F32))
    }
}

/// A matrix's elements in a dtype. Whether one is beyond its range.
fn append(bytes: &mut Vec<u8>, matrix: &Matrix, dtype: DType) -> bool {
    use generate::parts::Dtype;
    let same = matches!(
        (matrix.dtype(), dtype),
        (Some(Dtype::F32), DType::F32) | (Some(Dtype::F16), DType::F16) | (Some(Dtype::Bf16), DType::BF16)
    );
    if same {
        bytes.extend_from_slice(matrix.bytes());
        return false;
    }
    // In pieces of rows, which are whole blocks of a quantised type.
    let [rows, columns] = matrix.dims();
    let at_once = (PIECE / columns.max(1)).max(1);
    let begin = bytes.len();
    bytes.resize(begin + rows * columns * dtype.size(), 0);
    let pieces = bytes[begin..].par_chunks_mut(at_once * columns * dtype.size());
    let encoded = pieces.enumerate().map(|(piece, out)| {
        let first = piece * at_once;
        let values = matrix.part(first..rows.min(first + at_once)).values();
        encode(&values, dtype, out)
    });
    encoded.reduce(|| false, |one, other| one | other)
}

/// Values in f32, f16 or bf16. Whether a finite one is beyond f16's range.
fn encode(values: &[f32], dtype: DType, out: &mut [u8]) -> bool {
    match dtype {
        DType::F16 => {
            let mut halves = vec![half::f16::ZERO; values.len()];
            halves.convert_from_f32_slice(values);
            put(out, halves.iter().map(|x| x.to_le_bytes()));
            return values.iter().zip(&halves).any(|(x, half)| x.is_finite() && half.is_infinite());
        }
        DType::BF16 => put(out, values.iter().map(|&x| half::bf16::from_f32(x).to_le_bytes())),
        _ => put(out, values.iter().map(|x| x.to_le_bytes())),
    }
    false
}

fn put<const N: usize>(out: &mut [u8], words: impl Iterator<Item = [u8; N]>) {
    out.chunks_exact_mut(N).zip(words).for_each(|(out, word)| out.copy_from_slice(&word));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_beyond_f16_is_told_of() {
        let mut out = [0; 4];
        assert!(!encode(&[65504.0, f32::INFINITY], DType::F16, &mut out));
        assert!(encode(&[1.0, -65520.0], DType::F16, &mut out));
        assert!(!encode(&[1.0], DType::F32, &mut out));
    }
}
