//! NCCL's library: looked for at run time, its functions as a table, which a test may fill with its own.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};

pub type Handle = *mut c_void;
pub type Stream = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as it was in NCCL 2.14, the first with `blocking`, and the padding after it. Later versions take what `size` and
/// `version` say, and default the rest.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// `cgaClusterSize` of 2.17: undefined.
    undefined: c_int,
}

impl Config {
    pub fn new(blocking: bool) -> Self {
        let (magic, version) = (0xCAFE_BEEF, 21_400);
        Self { size: size_of::<Self>(), magic, version, blocking: blocking.into(), undefined: c_int::MIN }
    }
}

/// A function's result.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Code(pub c_int);

impl Code {
    pub const SUCCESS: Self = Self(0);
    pub const IN_PROGRESS: Self = Self(7);
}

/// `ncclUint8`.
pub const BYTE: c_int = 1;
/// `ncclSum`.
pub const SUM: c_int = 0;

/// # Errors
/// [`Error::DtypeUnsupported`] for FP8, which NCCL does not sum here.
pub fn sum_dtype(dtype: Dtype) -> Result<c_int> {
    match dtype {
        Dtype::F32 => Ok(7),
        Dtype::F16 => Ok(6),
        Dtype::Bf16 => Ok(9),
        Dtype::E4m3 => {
            let cure = "sums are of f32, f16 or bf16";
            Err(Error::DtypeUnsupported { what: "reduce_scatter", got: dtype, cure })
        }
    }
}

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The NCCL functions that are called here; NCCL 2.14 has all of them.
        #[derive(Clone, Copy, Debug)]
        pub struct Api {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Api {
            fn of(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    // SAFETY: the type is the function's in nccl.h, and the library is never unloaded.
                    $($field: *unsafe { library.get($name.as_bytes()) }
                        .map_err(|_| format!("the library has no {}", $name))?,)*
                })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> Code;
    init = "ncclCommInitRankConfig": fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> Code;
    async_error = "ncclCommGetAsyncError": fn(Handle, *mut Code) -> Code;
    finalize = "ncclCommFinalize": fn(Handle) -> Code;
    destroy = "ncclCommDestroy": fn(Handle) -> Code;
    abort = "ncclCommAbort": fn(Handle) -> Code;
    error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
    last_error = "ncclGetLastError": fn(Handle) -> *const c_char;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> Code;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> Code;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> Code;
    receive = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> Code;
    group_start = "ncclGroupStart": fn() -> Code;
    group_end = "ncclGroupEnd": fn() -> Code;
}

/// The names that Linux packages and pip's give it.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The system's NCCL.
///
/// # Errors
/// [`Error::NoNccl`].
pub fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let load = || {
        keep_multicast_off();
        let mut missing = String::new();
        for name in NAMES {
            match Api::load(name.as_ref()) {
                Ok(api) => return Ok(api),
                Err(why) => missing = if missing.is_empty() { why } else { format!("{missing}; {why}") },
            }
        }
        Err(missing)
    };
    API.get_or_init(load).as_ref().map_err(|detail| Error::NoNccl { detail: detail.clone() })
}

/// NVLink multicast (NVLS) needs a fabric manager that allows it, and hangs or fails where one does not.
fn keep_multicast_off() {
    if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
        // SAFETY: NCCL reads it once, when it is loaded. A host whose other threads read the environment by other means than Rust's sets
        // the variable itself.
        unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    }
}

impl Api {
    /// Loads a library for good.
    ///
    /// # Errors
    /// What is missing.
    pub fn load(path: &OsStr) -> Result<Self, String> {
        // SAFETY: NCCL's initialisers have no requirements.
        let library = unsafe { Library::new(path) }.map_err(|error| {
            // What the loader said is its source.
            std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
        })?;
        let api = Self::of(&library);
        std::mem::forget(library);
        api
    }

    /// The library's message for an error.
    pub fn said(&self, code: Code, communicator: Handle) -> String {
        // SAFETY: both give C strings that live on, or null.
        let [what, last] =
            unsafe { [(self.error_string)(code), (self.last_error)(communicator)] }.map(|text| {
                let some = !text.is_null();
                // SAFETY: a C string, which is copied.
                if some {
                    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
                } else {
                    String::new()
                }
            });
        let last = if last.is_empty() { last } else { format!(": {last}") };
        format!("{what} ({}){last}", code.0)
    }
}
