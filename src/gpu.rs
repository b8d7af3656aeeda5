//! The wgpu backend: the host's device, queue, buffers and encoder, never our own submit.
//!
//! ```text
//! once       gpu = Gpu::on(&adapter, &device, &queue)                clones of the host's handles; what is compiled is kept
//!            mla = gpu.compile(spec)?
//! per step   plan.update(..)?                                        pure; shared by every layer
//!            mla.prepare(&mut step, (&plan, pages))?                 checks and uploads
//! once       binding = mla.bind(&layer, max_queries)?                a layer of the model: checked, bind group made
//! per layer  mla.record(&mut encoder, &step, &binding)?              creates nothing
//!            the host submits
//! ```

mod buffer;
pub(crate) mod caps;
mod decode;
mod device;
pub mod disk_cache;
mod host;
pub(crate) mod kernels;
pub(crate) mod layer;
mod limits;
pub mod ops;
mod pipelines;
mod read;
mod ring;
mod scope;
mod wanted;

pub use caps::{Caps, DeviceKind};
#[cfg(test)]
pub(crate) use decode::{LayerUniform, SliceUniform};
pub use decode::{MAX_SLICES, SliceBudget, decode_sources};
pub use device::{Gpu, Setup};
pub use kernels::compose::Source;
pub use read::read;
pub use scope::checked;
pub use wanted::{Wanted, caps, caps_on, wanted};
