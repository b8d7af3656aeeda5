//! The CUDA backend: PTX kernels on the host's stream, for NVIDIA cards since Ampere. Only the driver is needed, 520 or later (that of
//! CUDA 11.8), and is looked for at run time.
//!
//! ```text
//! once       cuda = Cuda::new(0)?, or Cuda::on_stream(stream)?         the host's CudaStream is borrowed
//!            mla = cuda.compile(spec)?                                 a variant is selected, and loaded from PTX
//! per step   mla.prepare(&mut step, (&plan, pages))?                   checks and uploads
//! once       binding = mla.bind(&layer, max_queries)?                  a layer of the model: checked
//! per layer  mla.record(&step, &binding)?                              two launches: allocates nothing, waits for nothing
//! ```
//!
//! What `record` launches may be captured in a graph, of every op: `cuda.capture(|| mla.record(&step, &binding))?` gives a [`Graph`], which
//! keeps the memory that it names. All layers of a step may be one graph. The grid is the step's capacity: a `prepare` before a
//! replay gives the graph new lengths, slots or copies, as long as they fit; where they do not, [`Graph::launch`] is an error.

mod buffer;
mod caps;
mod captures;
mod decode;
mod device;
mod formats;
mod graph;
mod kernels;
pub(crate) mod layer;
mod library;
#[cfg(test)]
mod manifest_test;
pub mod ops;
mod turn;
mod uploads;

pub use buffer::Buffer;
pub use decode::decode_variants;
pub use device::Cuda;
pub use graph::Graph;
pub use {cudarc, cudarc::driver::CudaStream};

use device::Function;
