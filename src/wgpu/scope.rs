//! Objects are made inside error scopes, so that a full device is an [`Error`] and not a panic in the host's handler.

use crate::{Error, Result};

/// Runs `f`, which makes wgpu objects, and turns what wgpu has against them into an [`Error`].
///
/// A browser reports only after the call returns and must not be waited for: there the errors go to the host's own
/// handler.
///
/// # Errors
/// [`Error::OutOfMemory`] and [`Error::Internal`].
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn scoped<T>(device: &wgpu::Device, what: &'static str, f: impl FnOnce() -> T) -> Result<T> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let made = f();
    // Scopes end in the reverse order of their begin; on native the futures are ready at once.
    let validation = pollster::block_on(validation.pop());
    let internal = pollster::block_on(internal.pop());
    let memory = pollster::block_on(memory.pop());
    // A buffer that got no memory makes what is bound to it invalid: the first cause is the one to tell.
    if memory.is_some() {
        return Err(Error::OutOfMemory { what });
    }
    match validation.or(internal) {
        Some(error) => Err(Error::Internal { what, detail: error.to_string() }),
        None => Ok(made),
    }
}

#[cfg(target_arch = "wasm32")]
pub(crate) fn scoped<T>(_: &wgpu::Device, _: &'static str, f: impl FnOnce() -> T) -> Result<T> {
    Ok(f())
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_an_error_and_not_a_panic() {
        let (device, _queue) = wgpu::Device::noop(&wgpu::DeviceDescriptor::default());
        let buffer = |size| {
            let usage = wgpu::BufferUsages::STORAGE;
            scoped(&device, "a test buffer", || {
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: None,
                    size,
                    usage,
                    mapped_at_creation: false,
                })
            })
        };
        assert!(matches!(buffer(u64::MAX / 2), Err(Error::Internal { what: "a test buffer", .. })));
        assert!(buffer(16).is_ok());
    }
}
