//! A model's weights by their parts, as the file holds them, for engines that bring them to a device.

pub use crate::experts::Experts;
pub use crate::experts::Routing;
pub use crate::kv_b::KvB;
pub use crate::layer::{Linear, LowRank, Mlp, Norm, Projections, Query};
pub use crate::matrix::Matrix;
pub use crate::model::{Either, Layer};
pub use wgpu_mla::{Dtype, KvLayout};
