//! What the tests share: the device, and attention in plain burn operations.
#![allow(dead_code)]

use std::sync::OnceLock;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Distribution, Tensor};
use wgpu_mla_burn::MlaDevice;

/// burn makes its default device once a process.
pub fn on() -> &'static MlaDevice {
    static ON: OnceLock<MlaDevice> = OnceLock::new();
    ON.get_or_init(|| {
        let on = MlaDevice::new().expect("burn's default wgpu device");
        println!("{}", on.gpu().describe());
        on
    })
}

/// Random numbers that are not computed yet.
pub fn random<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().try_into_vec_as::<f32>().expect("f32")
}

/// Compares with a tolerance that is a part of the largest expected value.
pub fn assert_close<const D: usize>(what: &str, got: Tensor<D>, want: Tensor<D>, tolerance: f32) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let (got, want) = (values(got), values(want));
    let largest = want.iter().fold(0f32, |most, x| most.max(x.abs()));
    let worst = got
        .iter()
        .zip(&want)
        .fold(0f32, |most, (a, b)| if (a - b).abs() <= most { most } else { (a - b).abs() });
    assert!(largest > 0.0 && worst <= tolerance * largest, "{what}: {worst} from values of up to {largest}");
}

/// Causal attention of one sequence in f32: `q [T, H, D]`, `k [S, H, D]`, `v [S, H, V]`; the last query sees all keys.
pub fn plain_attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, scale: f32) -> (Tensor<3>, Tensor<2>) {
    let [q, k, v] = [q, k, v].map(|it| it.cast(DType::F32).swap_dims(0, 1));
    let [heads, tokens, _] = q.dims();
    let [_, keys, _] = k.dims();
    let device = q.device();
    let row = Tensor::<1, burn::tensor::Int>::arange(0..tokens as i64, &device).reshape([1, tokens, 1]);
    let column = Tensor::<1, burn::tensor::Int>::arange(0..keys as i64, &device).reshape([1, 1, keys]);
    let past = (keys - tokens) as i64;
    let hidden = column.greater(row + past).expand([heads, tokens, keys]);
    let logits = (q.matmul(k.swap_dims(1, 2)) * scale).mask_fill(hidden, -1e30);
    let top = logits.clone().max_dim(2);
    let lse = ((logits.clone() - top.clone()).exp().sum_dim(2).log() + top).reshape([heads, tokens]);
    let out = softmax(logits, 2).matmul(v);
    (out.swap_dims(0, 1), lse.swap_dims(0, 1))
}

/// RoPE of neighbouring elements, in f32: `x [T, H, R]` at the positions from `first` on.
pub fn plain_rope(x: Tensor<3>, first: usize, theta: f32) -> Tensor<3> {
    let [tokens, heads, dim] = x.dims();
    let angles: Vec<f32> = (first..first + tokens)
        .flat_map(|at| (0..dim / 2).map(move |i| at as f32 * theta.powf(-2.0 * i as f32 / dim as f32)))
        .collect();
    let angles = Tensor::<1>::from_floats(angles.as_slice(), &x.device()).reshape([tokens, 1, dim / 2, 1]);
    let (cos, sin) = (angles.clone().cos(), angles.sin());
    let x = x.cast(DType::F32).reshape([tokens, heads, dim / 2, 2]);
    let (a, b) = (x.clone().narrow(3, 0, 1), x.narrow(3, 1, 1));
    let rotated = [a.clone() * cos.clone() - b.clone() * sin.clone(), a * sin + b * cos];
    Tensor::cat(rotated.to_vec(), 3).reshape([tokens, heads, dim])
}

/// A module with its parameters cast.
pub fn cast<M: Module>(module: M, dtype: DType) -> M {
    struct Cast(DType);
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(self.0))
        }
    }
    module.map(&mut Cast(dtype))
}
