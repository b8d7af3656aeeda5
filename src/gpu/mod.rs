//! The wgpu backend: the host's device, queue, buffers and encoder, never our own submit.
//!
//! ```text
//! once       pipelines = Pipelines::open(&device, &setup)   what is compiled is kept, on disk too if asked
//!            mla = MlaDecode::new(&pipelines, &spec, &options)
//! per step   plan.update(..)                                 pure; shared by every layer
//!            mla.prepare(&queue, &mut step, &plan, pages)    checks and uploads
//! once       binding = mla.bind(max_queries, &layer)         a layer of the model: checked, bind group made
//! per layer  mla.record(&mut encoder, &step, &binding)       creates nothing, cannot fail
//!            the host submits
//! ```

// Its verbs wait, which a browser does not allow.
#[cfg(not(target_arch = "wasm32"))]
mod backend;
mod binding;
mod decode;
mod device;
pub mod disk_cache;
mod mla_layer;
pub mod ops;
mod pipelines;
mod read;
mod scope;
mod step;
mod wanted;
mod window;

pub use crate::compose::Source;
#[cfg(not(target_arch = "wasm32"))]
pub use backend::GpuDecode;
pub use binding::LayerBinding;
#[cfg(test)]
pub(crate) use binding::LayerUniform;
pub use decode::{MlaDecode, Options};
pub use device::Gpu;
pub use mla_layer::{LayerCapacity, MlaLayer, MlaLayerBinding, MlaLayerStep, PrefixStep};
pub use pipelines::{Pipelines, Setup};
pub use read::read;
pub use scope::checked;
#[cfg(test)]
pub(crate) use step::SliceUniform;
pub use step::{MAX_SLICES, SliceBudget, Step};
pub use wanted::{Wanted, caps, caps_on, wanted};
