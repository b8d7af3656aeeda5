//! An engine for `generate` that has all of a model on a GPU of any vendor: projections, norms, experts and the head by burn's operations,
//! the cache and the attention by wgpu-mla's kernels, on the same device and queue. Tensors are not copied between the two.
//!
//! Left to the host are: embeddings, a row a token, read from the checkpoint's file; the choice of experts, for which each layer's router
//! logits are read back; and sampling.

mod bench;
mod engine;
mod experts;
mod layer;
mod linear;
mod times;
mod upload;

pub use bench::bench;
pub use engine::{Burn, Engine};
pub use times::{Part, Times};
