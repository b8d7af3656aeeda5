//! burn's device, as wgpu-mla uses it.

use std::sync::Arc;

use burn::backend::CubeDevice;
use burn::cubecl::client::Client;
use burn::tensor::wgpu::WgpuSetup;
use burn::tensor::{Device, Tensor};
use wgpu_mla::gpu::{Gpu, Setup};

use crate::arrays::{self, Input};
use crate::error::{Error, Result};

/// burn's wgpu device and, on the same device and queue, wgpu-mla's [`Gpu`]. A clone is another handle.
///
/// burn allocates tensors as parts of large buffers, so that what an op reads and what it writes often are parts of one buffer: the `Gpu`
/// is made with [`Setup::shared_buffers`]. Whatever it submits comes after what burn has queued on the calling thread:
/// [`Gpu::flush_before_submit`].
#[derive(Debug, Clone)]
pub struct MlaDevice {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    cube: CubeDevice,
    client: Client,
    gpu: Gpu,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MlaDevice").field("device", &self.device).field("gpu", &self.gpu.describe()).finish()
    }
}

impl MlaDevice {
    /// burn's default wgpu device, which `Device::default()` is too where burn has no other backend.
    ///
    /// # Errors
    /// [`Error::Device`], also where burn has made this device before.
    pub fn new() -> Result<Self> {
        let made = Device::wgpu_options().init_with_setup();
        let (device, setup) = made.map_err(|error| Error::Device { detail: error.to_string() })?;
        Self::on(&device, &setup)
    }

    /// The device that burn made from a setup: `Device::wgpu_options()` with `init_with_setup()`, or with `setup(...)` of a host's own
    /// adapter, device and queue.
    ///
    /// # Errors
    /// [`Error::Backend`] for a device that is not burn's wgpu backend.
    pub fn on(device: &Device, setup: &WgpuSetup) -> Result<Self> {
        // burn gives a device's client away with a tensor only.
        let probe = Input::new("a tensor of the device", Tensor::<1>::zeros([8], device))?;
        let cube = probe.device().clone();
        let [probe] = arrays::compute([probe])?;
        let client = probe.client.clone();
        let choice = Setup { shared_buffers: true, ..Setup::default() };
        let gpu = Gpu::with(&setup.adapter, &setup.device, &setup.queue, &choice);
        let flushed = client.clone();
        gpu.flush_before_submit(move || {
            if let Err(error) = flushed.flush() {
                log::warn!("burn could not submit what it had queued: {error}");
            }
        });
        Ok(Self { inner: Arc::new(Inner { device: device.clone(), cube, client, gpu }) })
    }

    /// burn's device: where tensors are made.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// wgpu-mla's device, for its caches and ops.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    pub(crate) fn cube(&self) -> &CubeDevice {
        &self.inner.cube
    }

    pub(crate) fn client(&self) -> &Client {
        &self.inner.client
    }
}
