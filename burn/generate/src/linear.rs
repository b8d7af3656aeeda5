//! Products, norms and gated MLPs on the device.

use burn::tensor::activation::silu;
use burn::tensor::{DType, Tensor};
use generate::Result;
use generate::parts;

use crate::upload::Upload;

/// Products with several weights of a checkpoint at once: their rows lie one below the other.
pub struct Linear {
    /// `[in, out]`: the first columns, and then others where the device binds no buffer as large as all.
    weight: Tensor<2>,
    others: Vec<Tensor<2>>,
    /// `[1, out]` in f32.
    bias: Option<Tensor<2>>,
}

impl Linear {
    pub fn of(upload: &mut Upload<'_>, parts: &[&parts::Linear]) -> Result<Self> {
        let weights: Vec<_> = parts.iter().map(|part| &part.weight).collect();
        let made = Self { weight: upload.matrices(&weights), others: Vec::new(), bias: upload.biases(parts) };
        upload.settle()?;
        Ok(made)
    }

    /// With one weight, such as that of the head, which is large.
    pub fn matrix(upload: &mut Upload<'_>, matrix: &parts::Matrix) -> Result<Self> {
        let [rows, columns] = matrix.dims();
        let at_once = upload.rows_at_once(columns).min(rows);
        let weight = upload.matrices(&[&matrix.part(0..at_once)]);
        let mut others = Vec::new();
        for first in (at_once..rows).step_by(at_once) {
            upload.settle()?;
            others.push(upload.matrices(&[&matrix.part(first..rows.min(first + at_once))]));
        }
        upload.settle()?;
        Ok(Self { weight, others, bias: None })
    }

    /// `[T, in]` of the weight's dtype to `[T, out]` of it.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let product = |weight: &Tensor<2>| x.clone().matmul(weight.clone());
        let y = match self.others.as_slice() {
            [] => product(&self.weight),
            others => Tensor::cat(std::iter::once(&self.weight).chain(others).map(product).collect(), 1),
        };
        match &self.bias {
            None => y,
            Some(bias) => {
                let dtype = y.dtype();
                (y.cast(DType::F32) + bias.clone()).cast(dtype)
            }
        }
    }

    /// The dtype of its weight.
    pub fn dtype(&self) -> DType {
        self.weight.dtype()
    }
}

/// RMS norm, in f32.
pub struct Norm {
    weight: Tensor<2>,
    eps: f32,
}

impl Norm {
    pub fn of(upload: &Upload<'_>, norm: &parts::Norm) -> Result<Self> {
        Ok(Self { weight: upload.norm(norm)?, eps: norm.eps })
    }

    /// Takes any dtype, and gives f32.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = x.cast(DType::F32);
        let size = (x.clone().square().mean_dim(1) + self.eps).sqrt();
        x / size * self.weight.clone()
    }
}

/// `down(silu(gate(x)) * up(x))`, gate and up in one product.
pub struct Mlp {
    gate_up: Linear,
    down: Linear,
    inner: usize,
}

impl Mlp {
    pub fn of(upload: &mut Upload<'_>, mlp: &parts::Mlp) -> Result<Self> {
        Ok(Self {
            gate_up: Linear::of(upload, &[&mlp.gate, &mlp.up])?,
            down: Linear::of(upload, &[&mlp.down])?,
            inner: mlp.gate.weight.dims()[0],
        })
    }

    /// `[T, hidden]` of the weights' dtype to the same in f32.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let both = self.gate_up.forward(x);
        let gate = both.clone().narrow(1, 0, self.inner).cast(DType::F32);
        let up = both.narrow(1, self.inner, self.inner).cast(DType::F32);
        self.down.forward((silu(gate) * up).cast(self.down.dtype())).cast(DType::F32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Burn;
    use crate::experts::values;

    /// The head of a large vocabulary is more than some devices bind.
    #[test]
    fn a_weight_in_several_buffers() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/generate/model");
        let checkpoint = generate::Checkpoint::open(dir.as_ref()).expect("a checkpoint");
        let (burn, head) = (Burn::default(), &checkpoint.model.head);
        let device = burn.on().expect("a device").device();
        let x = Tensor::<2>::random([3, 256], burn::tensor::Distribution::Default, device);
        let product = |limit| {
            let mut progress = |_| ();
            let mut upload = Upload::new(device, DType::F32, limit, &mut progress);
            let linear = Linear::matrix(&mut upload, head).expect("a weight");
            (1 + linear.others.len(), values(linear.forward(x.clone())).expect("a product"))
        };
        let (whole, parts) = (product(u64::MAX), product(300 * 256 * 4));
        assert_eq!((whole.0, parts.0), (1, 4));
        assert!(whole.1.iter().zip(&parts.1).all(|(a, b)| (a - b).abs() < 1e-4), "another product");
    }
}
