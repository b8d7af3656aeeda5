//! Error scopes around object creation, and the question whether the device is still there.

use crate::base::error::{Error, Result};

/// Runs `make`, which makes wgpu objects, and returns wgpu's complaint about them as an error.
///
/// A browser reports only after the call returns and must not be waited for: there this reports nothing, and
/// [`checked`] around the caller does.
///
/// # Errors
/// [`Error::OutOfMemory`], [`Error::Internal`] and [`Error::DeviceLost`].
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn scoped<T>(device: &wgpu::Device, what: &'static str, make: impl FnOnce() -> T) -> Result<T> {
    // Outside a browser the futures are ready at once.
    let made = pollster::block_on(in_scopes(device, what, make))?;
    alive(device).map(|()| made)
}

#[cfg(target_arch = "wasm32")]
pub(crate) fn scoped<T>(_: &wgpu::Device, _: &'static str, make: impl FnOnce() -> T) -> Result<T> {
    Ok(make())
}

/// Like [`scoped`], for calls that use the host's own resources. Everything else was checked before, so an error of wgpu is about these
/// resources.
///
/// # Errors
/// [`Error::ForeignResource`], [`Error::OutOfMemory`] and [`Error::DeviceLost`].
pub(crate) fn hosts<T>(device: &wgpu::Device, what: &'static str, use_them: impl FnOnce() -> T) -> Result<T> {
    scoped(device, what, use_them).map_err(|error| match error {
        Error::Internal { what, detail } => Error::ForeignResource { what, detail },
        other => other,
    })
}

/// Runs `make`, such as [`crate::Device::compile`], a `bind` or a `run`, and awaits the errors that the device reports about it.
///
/// It is for browsers, which compile and check after the call returned: without it their errors reach only the device's
/// own handler. Elsewhere the calls report all that themselves. `what` names it in the error.
///
/// ```no_run
/// # async fn f(gpu: &wgpu_mla::gpu::Gpu, spec: wgpu_mla::MlaDecode) -> wgpu_mla::Result<()> {
/// use wgpu_mla::{Device, gpu::checked};
/// let mla = checked(gpu.device(), "a decode", || gpu.compile(spec)).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// The errors of `make`, [`Error::OutOfMemory`], [`Error::ForeignResource`] for a buffer that was destroyed or is mapped, and
/// [`Error::Internal`].
pub async fn checked<T>(
    device: &wgpu::Device,
    what: &'static str,
    make: impl FnOnce() -> Result<T>,
) -> Result<T> {
    in_scopes(device, what, make).await?
}

async fn in_scopes<T>(device: &wgpu::Device, what: &'static str, make: impl FnOnce() -> T) -> Result<T> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let made = make();
    // Scopes end here, in the reverse order of their begin, and not where their answers are awaited.
    let (validation, internal, memory) = (validation.pop(), internal.pop(), memory.pop());
    let (validation, internal, memory) = (validation.await, internal.await, memory.await);
    // A buffer that got no memory makes what is bound to it invalid: the first cause is the one to tell.
    if memory.is_some() {
        return Err(Error::OutOfMemory { what });
    }
    match validation.or(internal) {
        Some(error) => {
            let detail = error.to_string();
            // Both errors can only be about a resource of the host. wgpu has nothing but the message to tell them by.
            let is_foreign = ["doesn't match Device", "has been destroyed", "is still mapped"]
                .iter()
                .any(|it| detail.contains(it));
            Err(if is_foreign {
                Error::ForeignResource { what, detail }
            } else {
                Error::Internal { what, detail }
            })
        }
        None => Ok(made),
    }
}

/// A uniform buffer with its contents. To be called inside [`scoped`], which tells why it may be without them: on a lost
/// device, or without memory, there is nothing to map, and `create_buffer_init` would panic.
pub(crate) fn uniform(device: &wgpu::Device, label: &str, contents: &[u8]) -> wgpu::Buffer {
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size: contents.len() as u64,
        usage: wgpu::BufferUsages::UNIFORM,
        mapped_at_creation: true,
    });
    if let Ok(mut mapped) = buffer.get_mapped_range_mut(..) {
        mapped.copy_from_slice(contents);
        drop(mapped);
        buffer.unmap();
    }
    buffer
}

/// Whether the device still answers.
///
/// wgpu reports a loss to the host's callback only, and swallows every other error of a lost device. So a buffer that
/// no device may make is asked for: a device that is there refuses it, a lost one says nothing.
///
/// # Errors
/// [`Error::DeviceLost`].
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn alive(device: &wgpu::Device) -> Result<()> {
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let usage = wgpu::BufferUsages::empty();
    drop(device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4,
        usage,
        mapped_at_creation: false,
    }));
    match pollster::block_on(scope.pop()) {
        Some(_) => Ok(()),
        None => Err(Error::DeviceLost { detail: "it no longer answers".into() }),
    }
}

#[cfg(target_arch = "wasm32")]
pub(crate) fn alive(_: &wgpu::Device) -> Result<()> {
    Ok(())
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use super::*;

    fn buffer(device: &wgpu::Device, size: u64) -> Result<wgpu::Buffer> {
        let usage = wgpu::BufferUsages::STORAGE;
        let descriptor = wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
        scoped(device, "a test buffer", || device.create_buffer(&descriptor))
    }

    #[test]
    fn a_refusal_is_an_error_and_not_a_panic() {
        let (device, _queue) = wgpu::Device::noop(&wgpu::DeviceDescriptor::default());
        assert!(matches!(buffer(&device, u64::MAX / 2), Err(Error::Internal { what: "a test buffer", .. })));
        assert!(buffer(&device, 16).is_ok());
    }

    #[test]
    fn a_lost_device_is_noticed() {
        let (device, _queue) = wgpu::Device::noop(&wgpu::DeviceDescriptor::default());
        device.destroy();
        assert!(matches!(buffer(&device, 16), Err(Error::DeviceLost { .. })));
    }
}
