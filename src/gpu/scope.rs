//! Error scopes around object creation, and the question whether the device is still there.

use crate::{Error, Result};

/// Runs `make`, and turns what wgpu reports meanwhile into an error.
///
/// # Errors
/// [`Error::OutOfMemory`], [`Error::Internal`] and [`Error::DeviceLost`]. In a browser the answer cannot be waited for,
/// and the uncaptured-error handler of the device has it.
pub(crate) fn scoped<T>(device: &wgpu::Device, what: &'static str, make: impl FnOnce() -> T) -> Result<T> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let made = make();
    // Innermost first, and all of them, whatever they say.
    let (validation, internal, memory) = (now(validation.pop()), now(internal.pop()), now(memory.pop()));
    if memory.is_some() {
        return Err(Error::OutOfMemory { what });
    }
    match validation.or(internal) {
        Some(error) => Err(Error::Internal { what, detail: error.to_string() }),
        None => alive(device).map(|()| made),
    }
}

/// Whether the device still answers.
///
/// wgpu reports a loss to the host's callback only, and swallows every other error of a lost device. So a buffer that
/// no device may make is asked for: a device that is there refuses it, a lost one says nothing.
///
/// # Errors
/// [`Error::DeviceLost`].
pub(crate) fn alive(device: &wgpu::Device) -> Result<()> {
    if cfg!(target_arch = "wasm32") {
        return Ok(());
    }
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let usage = wgpu::BufferUsages::empty();
    drop(device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4,
        usage,
        mapped_at_creation: false,
    }));
    match now(scope.pop()) {
        Some(_) => Ok(()),
        None => Err(Error::DeviceLost { detail: "it no longer answers".into() }),
    }
}

#[cfg(not(target_arch = "wasm32"))]
fn now(error: impl Future<Output = Option<wgpu::Error>>) -> Option<wgpu::Error> {
    // Ready at once outside a browser.
    pollster::block_on(error)
}

#[cfg(target_arch = "wasm32")]
fn now(_: impl Future<Output = Option<wgpu::Error>>) -> Option<wgpu::Error> {
    None
}
