//! The card: what it is, its contexts, and the driver's errors.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::sys::{CUcontext, CUdevice, CUresult};

use crate::kernels::last_fault;
use crate::state::{card, code, context, current, set_current};

/// Compute capability, and bytes of shared memory that a block may have.
const CARDS: [(i32, i32); 7] = [
    (80, 163 << 10),
    (86, 99 << 10),
    (89, 99 << 10),
    (90, 227 << 10),
    (100, 227 << 10),
    (103, 227 << 10),
    (120, 99 << 10),
];
/// Few, so that small tests fill the card, and what depends on a full card is seen.
const MULTIPROCESSORS: i32 = 4;

fn number(name: &str, default: i32) -> i32 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number is needed")))
}

fn cards() -> usize {
    static CARDS: OnceLock<usize> = OnceLock::new();
    *CARDS.get_or_init(|| number("MLA_EMULATED_CARDS", 1).max(0) as usize)
}

fn capability() -> (i32, i32) {
    static CAPABILITY: OnceLock<(i32, i32)> = OnceLock::new();
    *CAPABILITY.get_or_init(|| {
        let wanted = number("MLA_EMULATED_CAPABILITY", 90);
        let found = CARDS.into_iter().find(|&(capability, _)| capability == wanted);
        found.unwrap_or_else(|| {
            panic!("MLA_EMULATED_CAPABILITY={wanted}: one of 80, 86, 89, 90, 100, 103, 120")
        })
    })
}

/// Bytes of shared memory that a block may have.
pub fn shared_bytes() -> i32 {
    capability().1
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> CUresult {
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    unsafe { version.write(12_080) };
    CUresult::CUDA_SUCCESS
}

/// Only looked for: it tells a driver of CUDA 12.4 or later.
#[unsafe(no_mangle)]
pub extern "C" fn cuGreenCtxCreate() -> CUresult {
    CUresult::CUDA_ERROR_NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    let said: &'static CStr = match error {
        CUresult::CUDA_SUCCESS => c"no error",
        CUresult::CUDA_ERROR_INVALID_VALUE => c"invalid argument",
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => c"out of memory",
        CUresult::CUDA_ERROR_INVALID_DEVICE => c"invalid device ordinal",
        CUresult::CUDA_ERROR_INVALID_CONTEXT => c"invalid device context",
        CUresult::CUDA_ERROR_INVALID_HANDLE => c"invalid resource handle",
        CUresult::CUDA_ERROR_NOT_FOUND => c"named symbol not found",
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => {
            c"operation not permitted when stream is capturing"
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => {
            c"operation failed due to a previous error during capture"
        }
        CUresult::CUDA_ERROR_LAUNCH_FAILED => last_fault(),
        _ => c"an error of the emulated driver",
    };
    unsafe { text.write(said.as_ptr()) };
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    unsafe { count.write(cards() as c_int) };
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < cards()) {
        unsafe { device.write(ordinal) };
        return CUresult::CUDA_SUCCESS;
    }
    CUresult::CUDA_ERROR_INVALID_DEVICE
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: Attribute,
    _: CUdevice,
) -> CUresult {
    let (capability, shared_bytes) = capability();
    let is = match attribute {
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => capability / 10,
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => capability % 10,
        Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => MULTIPROCESSORS,
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => shared_bytes,
        Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 4 << 20,
        Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
        _ => return CUresult::CUDA_ERROR_INVALID_VALUE,
    };
    unsafe { value.write(is) };
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _: CUdevice) -> CUresult {
    let text = b"PTX interpreter";
    let len = text.len().min((len - 1).max(0) as usize);
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, len);
        name.add(len).write(0);
    }
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(made: *mut CUcontext, device: CUdevice) -> CUresult {
    unsafe { made.write(context(device as usize)) };
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_: CUdevice) -> CUresult {
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(found: *mut CUcontext) -> CUresult {
    unsafe { found.write(current().map_or(std::ptr::null_mut(), context)) };
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    set_current(context);
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> CUresult {
    code(card().map(drop))
}
