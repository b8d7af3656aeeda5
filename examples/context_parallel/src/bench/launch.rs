//! What differs between devices: whether launches can be captured, and how large a problem is right.

use wgpu_mla::cpu::Cpu;
#[cfg(feature = "cuda")]
use wgpu_mla::cuda::Cuda;
#[cfg(feature = "wgpu")]
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Backend, Error};

/// A launch that can be repeated.
pub type Again<'a> = Box<dyn Fn() -> Result<(), Error> + 'a>;

/// A device, as a bench sees it.
pub trait Launch: Backend + 'static {
    /// Whether launches can be captured in a graph.
    const HAS_GRAPHS: bool = false;
    /// Tokens of the long sequence.
    const LONG: u32 = 16 << 10;
    /// Sequences of an exchange.
    const SEQUENCES: u32 = 8;

    /// What `record` launches, to be launched again: as a graph if `graph` is set.
    ///
    /// # Errors
    /// The errors of `record`, and of a capture.
    fn again<'a>(
        &self,
        _graph: bool,
        record: impl Fn() -> Result<(), Error> + 'a,
    ) -> Result<Again<'a>, Error> {
        Ok(Box::new(record))
    }

    /// What `record` launches as a graph that borrows nothing, so that its steps can be prepared again.
    ///
    /// # Errors
    /// The errors of `record`, of a capture, and where there are no graphs.
    fn captured(device: &Self, record: impl Fn() -> Result<(), Error>) -> Result<Again<'static>, Error> {
        let _ = (device, record);
        Err(Error::LayoutMismatch { detail: "this device has no graphs" })
    }
}

impl Launch for Cpu {}

#[cfg(feature = "wgpu")]
impl Launch for Gpu {}

#[cfg(feature = "cuda")]
impl Launch for Cuda {
    const HAS_GRAPHS: bool = true;
    const LONG: u32 = 1 << 20;
    const SEQUENCES: u32 = 64;

    fn again<'a>(
        &self,
        graph: bool,
        record: impl Fn() -> Result<(), Error> + 'a,
    ) -> Result<Again<'a>, Error> {
        if !graph {
            return Ok(Box::new(record));
        }
        Self::captured(self, record).map(|launch| launch as Again<'a>)
    }

    fn captured(device: &Self, record: impl Fn() -> Result<(), Error>) -> Result<Again<'static>, Error> {
        // Once outside of a capture: NCCL makes connections for each size.
        record()?;
        let graph = device.capture(record)?;
        Ok(Box::new(move || graph.launch()))
    }
}
