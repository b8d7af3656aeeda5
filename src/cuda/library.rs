//! The driver's library: checks that it is installed and has the functions that are called, and its errors.

use cudarc::driver::{DriverError, sys};

use crate::base::error::{Error, Result};

/// Every function that this backend cannot do without, most of them reached through cudarc, which panics where one is missing.
/// `cuLaunchKernelEx` is the newest, of CUDA 11.8.
const CALLED: [&str; 34] = [
    "cuInit",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemsetD8Async",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernelEx",
];

/// Whether the driver can be called.
///
/// # Errors
/// [`Error::NoCuda`] without its library, or with one that is too old.
pub(super) fn check() -> Result<()> {
    // SAFETY: it only looks for the driver's library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoCuda { detail: "the driver's library was not found".into() });
    }
    // SAFETY: it is there, and what is found in it is not called here.
    has_all(|name| unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok())
}

/// Whether it has the function of CUDA 12.0 that [`super::kernels::TensorMap`] calls. To be called after [`check`].
pub(super) fn describes_tensors() -> bool {
    // SAFETY: the library is there, and what is found in it is not called here.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuTensorMapEncodeTiled") }.is_ok()
}

/// Whether it belongs to CUDA 12.4 or later, whose drivers read PTX 8.4. To be called after [`check`].
pub(super) fn reads_ptx_8_4() -> bool {
    // SAFETY: the library is there, and what is found in it is not called here.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuGreenCtxCreate") }.is_ok()
}

fn has_all(has: impl Fn(&str) -> bool) -> Result<()> {
    match CALLED.into_iter().find(|name| !has(name)) {
        None => Ok(()),
        Some(name) => Err(Error::NoCuda { detail: format!("the driver's library has no {name}") }),
    }
}

/// The driver's message for an error.
pub(super) fn said(error: DriverError) -> String {
    let DriverError(code) = error;
    error
        .error_string()
        .map_or_else(|_| format!("{code:?}"), |text| format!("{} ({code:?})", text.to_string_lossy()))
}

/// An error of the driver.
pub(super) fn failed(what: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { what },
        _ => Error::Cuda { what, detail: said(error) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_told_by_what_it_lacks() {
        has_all(|_| true).expect("a driver with everything");
        let old = has_all(|name| name != "cuLaunchKernelEx").expect_err("one of CUDA 11.7");
        let text = "no CUDA device: the driver's library has no cuLaunchKernelEx; install NVIDIA's driver (520 or later)";
        assert!(old.to_string().starts_with(text), "{old}");
    }
}
