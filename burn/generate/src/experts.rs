//! A mixture of experts: the router's logits are read back, the host chooses, and each expert computes the tokens that asked for it.

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};
use generate::parts::{self, Routing};
use generate::{Error, Result};

use crate::linear::{Mlp, Norm};
use crate::upload::Upload;

pub struct Experts {
    /// `[hidden, experts]` in f32, as all is that decides which expert is chosen.
    router: Tensor<2>,
    routing: Routing,
    each: Vec<Mlp>,
    shared: Option<Mlp>,
    norm: Option<Norm>,
}

impl Experts {
    pub fn of(upload: &mut Upload<'_>, experts: &parts::Experts) -> Result<Self> {
        Ok(Self {
            router: upload.exact(&experts.router),
            routing: experts.routing.clone(),
            each: experts.experts.iter().map(|one| Mlp::of(upload, one)).collect::<Result<_>>()?,
            shared: experts.shared.as_ref().map(|shared| Mlp::of(upload, shared)).transpose()?,
            norm: experts.norm.as_ref().map(|norm| Norm::of(upload, norm)).transpose()?,
        })
    }

    /// From normed hidden states, in f32 and in the weights' dtype, `[T, hidden]` in f32.
    pub fn forward(&self, exact: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>> {
        let device = x.device();
        let logits = values(exact.matmul(self.router.clone()))?;
        let [tokens, hidden] = x.dims();
        let mut sum = None;
        for (expert, (rows, weights)) in self.each.iter().zip(self.routing.route(&logits)) {
            let chosen = rows.len();
            if chosen == 0 {
                continue;
            }
            if chosen == tokens {
                // All tokens, in their order, as of a decode of one.
                let part = weighted(expert.forward(x.clone()), weights);
                sum = Some(sum.map_or(part.clone(), |sum| sum + part));
                continue;
            }
            let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
            let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [chosen]), (&device, DType::I32));
            let part = weighted(expert.forward(x.clone().select(0, rows.clone())), weights);
            let into = sum.unwrap_or_else(|| Tensor::zeros([tokens, hidden], (&device, DType::F32)));
            sum = Some(into.select_assign(0, rows, part, IndexingUpdateOp::Add));
        }
        let shared = self.shared.as_ref().map(|shared| shared.forward(x.clone()));
        let sum = match (sum, shared) {
            (Some(sum), Some(shared)) => sum + shared,
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => Tensor::zeros([tokens, hidden], (&device, DType::F32)),
        };
        Ok(match &self.norm {
            Some(norm) => norm.forward(sum),
            None => sum,
        })
    }
}

/// Rows times a weight each.
fn weighted(rows: Tensor<2>, weights: Vec<f32>) -> Tensor<2> {
    let (device, shape) = (rows.device(), [weights.len(), 1]);
    if let [weight] = weights.as_slice() {
        return rows * *weight;
    }
    rows * Tensor::<2>::from_data(TensorData::new(weights, shape), (&device, DType::F32))
}

/// A tensor's elements, on the host.
pub fn values(tensor: Tensor<2>) -> Result<Vec<f32>> {
    let failed = |error: &dyn std::fmt::Debug| Error::Engine(format!("the device failed: {error:?}"));
    let data = tensor.cast(DType::F32).try_into_data().map_err(|error| failed(&error))?;
    data.try_into_vec_as::<f32>().map_err(|error| failed(&error))
}
