//! Modules of PTX, their kernels, and launches.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::sys::{CUfunction, CUlaunchConfig, CUmodule, CUresult};

use crate::card::shared_bytes;
use crate::state::{State, card, code, state};
use crate::streams::{Work, put};

/// Dynamic shared memory that every kernel may have.
const DEFAULT_SHARED_BYTES: i32 = 48 << 10;

struct Module {
    card: usize,
    /// The interpreter's number of the text.
    number: u64,
    text: String,
}

struct Kernel {
    card: usize,
    module: u64,
    name: String,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
    most_shared_bytes: c_int,
}

/// A launch with its parameters, which are copied when it is put on a stream.
#[derive(Clone)]
pub struct Launch {
    pub module: u64,
    pub name: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub parameters: Arc<[Vec<u8>]>,
}

impl Launch {
    pub fn run(&self, state: &mut State) -> Result<(), CUresult> {
        let State { memory, interpreter } = state;
        interpreter.launch(self, memory.end()).map_err(|fault| {
            eprintln!("emulated CUDA: {fault}");
            note_fault(&fault);
            CUresult::CUDA_ERROR_LAUNCH_FAILED
        })
    }
}

static FAULT: Mutex<&CStr> = Mutex::new(c"no kernel has failed");

/// Keeps the sentence for [`last_fault`]. It is never freed: callers of `cuGetErrorString` may keep the pointer.
fn note_fault(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    *FAULT.lock().unwrap_or_else(PoisonError::into_inner) = Box::leak(text.into_boxed_c_str());
}

pub fn last_fault() -> &'static CStr {
    *FAULT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of an entry's parameters, `.param .align 8 .b8 NAME[BYTES]` each.
fn parameters(text: &str, name: &str) -> Option<Vec<usize>> {
    let head = text
        .split(".entry ")
        .skip(1)
        .find_map(|entry| entry.trim_start().strip_prefix(name)?.trim_start().strip_prefix('('))?;
    let (head, _) = head.split_once(')')?;
    let bytes = |parameter: &str| parameter.split_once('[')?.1.split_once(']')?.0.parse().ok();
    head.split(',').filter(|parameter| !parameter.trim().is_empty()).map(bytes).collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(made: *mut CUmodule, image: *const c_void) -> CUresult {
    code(card().and_then(|card| {
        let text = unsafe { CStr::from_ptr(image.cast()) }
            .to_str()
            .map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
        let number = state().interpreter.load(text);
        let module = Box::new(Module { card, number, text: text.to_owned() });
        unsafe { made.write(Box::into_raw(module).cast()) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: CUmodule) -> CUresult {
    drop(unsafe { Box::from_raw(module.cast::<Module>()) });
    CUresult::CUDA_SUCCESS
}

/// A kernel's handle is good for ever: it is a few bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    found: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    code(card().and_then(|card| {
        let (module, name) = unsafe { (&*module.cast::<Module>(), CStr::from_ptr(name).to_string_lossy()) };
        if module.card != card {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let parameters = parameters(&module.text, &name).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let most_shared_bytes = DEFAULT_SHARED_BYTES;
        let kernel =
            Kernel { card, module: module.number, name: name.into_owned(), parameters, most_shared_bytes };
        unsafe { found.write(Box::into_raw(Box::new(kernel)).cast()) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(
    kernel: CUfunction,
    what: FunctionAttribute,
    value: c_int,
) -> CUresult {
    code(card().and_then(|card| {
        let kernel = unsafe { &mut *kernel.cast::<Kernel>() };
        if kernel.card != card {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        if what != FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            || value > shared_bytes()
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        kernel.most_shared_bytes = value;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    kernel: CUfunction,
    parameters: *mut *mut c_void,
    _: *mut *mut c_void,
) -> CUresult {
    let (config, kernel) = unsafe { (&*config, &*kernel.cast::<Kernel>()) };
    code(card().and_then(|card| {
        if kernel.card != card {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        if config.sharedMemBytes as c_int > kernel.most_shared_bytes
            || config.gridDimX == 0
            || config.blockDimX == 0
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let copied = kernel.parameters.iter().enumerate().map(|(i, &bytes)| {
            // SAFETY: the caller hands over as many parameters, of as many bytes, as the kernel takes.
            unsafe { std::slice::from_raw_parts(parameters.add(i).read().cast::<u8>(), bytes) }.to_vec()
        });
        let launch = Launch {
            module: kernel.module,
            name: kernel.name.clone(),
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared_bytes: config.sharedMemBytes,
            parameters: copied.collect(),
        };
        put(config.hStream, Work::Launch(launch))
    }))
}
