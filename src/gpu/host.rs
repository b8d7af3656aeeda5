//! A device for programs that have none of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use super::device::{Gpu, Setup};
use super::wanted::{Wanted, wanted};
use crate::base::error::{Error, Result};

impl Gpu {
    /// Picks an adapter and makes a device as [`wanted`] says, cooperative matrices included, waiting for both. `WGPU_BACKEND` restricts
    /// the APIs, `WGPU_ADAPTER_NAME` (a part of the name, in any case) the adapters.
    ///
    /// With the feature `cuda` the first instance is kept to the end of the process, so that no driver is unloaded.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] and [`Error::Device`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new() -> Result<Self> {
        pollster::block_on(Self::request())
    }

    /// Like `Gpu::new`, without blocking the thread.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] and [`Error::Device`].
    pub async fn request() -> Result<Self> {
        let adapter = pick_adapter().await?;
        // SAFETY: on a device of this crate's own only its shaders use experimental features, unless a host adds some; `wanted` says how.
        let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
        let wanted = wanted(&adapter, experimental);
        Self::from_adapter(adapter, &wanted).await
    }

    /// A device with what [`wanted`] says, perhaps changed, such as a test that plays a weaker one needs.
    ///
    /// # Errors
    /// [`Error::Device`], also where wgpu panics since the driver lacks a feature that wgpu offered (unless panics abort the program).
    pub async fn from_adapter(adapter: wgpu::Adapter, wanted: &Wanted) -> Result<Self> {
        let Wanted { features, limits, experimental } = wanted;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("wgpu-mla"),
            required_features: *features,
            required_limits: limits.clone(),
            experimental_features: *experimental,
            ..Default::default()
        };
        // Outside of a browser the device is made in the call, before its future is awaited.
        let request = catch_unwind(AssertUnwindSafe(|| adapter.request_device(&descriptor)))
            .map_err(|panic| Error::Device { detail: said(&*panic) })?;
        let (device, queue) = request.await.map_err(|error| Error::Device { detail: error.to_string() })?;
        let lost = Arc::new(Mutex::new(None));
        let note = lost.clone();
        device.set_device_lost_callback(move |reason, message| {
            if let Ok(mut note) = note.lock() {
                *note = Some(format!("{reason:?}: {message}"));
            }
        });
        let info = adapter.get_info();
        log::info!("{} ({}, {:?}), features {features:?}", info.name, info.driver_info, info.backend);
        Ok(Self::open(Some(&adapter), &device, &queue, &Setup::default(), Some(lost)))
    }
}

/// The message of a panic.
fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    format!("wgpu panicked: {}", text.unwrap_or("without a message"))
}

/// NVIDIA's drivers for Vulkan and CUDA in one process: once the last Vulkan instance is gone and its driver unloaded, a thread that used
/// both crashes as it ends.
#[cfg(feature = "cuda")]
fn keep_loaded(instance: &wgpu::Instance) {
    static KEPT: std::sync::OnceLock<wgpu::Instance> = std::sync::OnceLock::new();
    KEPT.get_or_init(|| instance.clone());
}

async fn pick_adapter() -> Result<wgpu::Adapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    #[cfg(feature = "cuda")]
    keep_loaded(&instance);
    let backends = wgpu::Backends::from_env().unwrap_or(wgpu::Backends::all());
    let Ok(name) = std::env::var("WGPU_ADAPTER_NAME") else {
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::from_env()
                .unwrap_or(wgpu::PowerPreference::HighPerformance),
            ..Default::default()
        };
        return instance
            .request_adapter(&options)
            .await
            .map_err(|error| Error::NoAdapter { detail: error.to_string() });
    };
    let adapters = instance.enumerate_adapters(backends).await;
    let names: Vec<_> = adapters.iter().map(|adapter| adapter.get_info().name).collect();
    adapters
        .into_iter()
        .find(|adapter| adapter.get_info().name.to_lowercase().contains(&name.to_lowercase()))
        .ok_or_else(|| Error::NoAdapter {
            detail: format!("WGPU_ADAPTER_NAME={name} matches none of {names:?}"),
        })
}
