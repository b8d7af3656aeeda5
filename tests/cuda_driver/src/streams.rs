//! Streams and events. Work is done at once, or noted while a stream is in a capture.

use std::ffi::c_uint;

use cudarc::driver::sys::{CUevent, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};

use crate::kernels::Launch;
use crate::state::{card, code, state};

/// What is put on a stream.
#[derive(Clone)]
pub enum Work {
    Launch(Launch),
    Set { address: u64, value: u8, bytes: u64 },
    Copy { to: u64, from: u64, bytes: u64 },
}

impl Work {
    pub fn run(&self, card: usize) -> Result<(), CUresult> {
        let mut state = state();
        match self {
            Self::Launch(launch) => launch.run(&mut state),
            &Self::Set { address, value, bytes } => state.memory.set(card, address, bytes, value),
            &Self::Copy { to, from, bytes } => state.memory.copy(card, to, from, bytes),
        }
    }
}

/// Behind a stream's handle.
pub struct Stream {
    card: usize,
    pub capture: std::sync::Mutex<Capture>,
}

#[derive(Default)]
pub enum Capture {
    #[default]
    None,
    Active(Vec<Work>),
    /// By a call that is not allowed in one.
    Invalid,
}

thread_local! {
    /// Captures that this thread has begun.
    static CAPTURES: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// A stream whose context is current. Every handle that this driver gives out is of a `Stream` that lives until it is destroyed.
fn stream(handle: CUstream) -> Result<&'static Stream, CUresult> {
    let card = card()?;
    if handle.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    // SAFETY: `cuStreamCreate` made the handle.
    let stream = unsafe { &*handle.cast::<Stream>() };
    if stream.card != card {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(stream)
}

fn lock(stream: &Stream) -> std::sync::MutexGuard<'_, Capture> {
    stream.capture.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The card of a stream that is in no capture. In one, the call ends it.
pub fn idle(handle: CUstream) -> Result<usize, CUresult> {
    let stream = stream(handle)?;
    let mut capture = lock(stream);
    if matches!(*capture, Capture::None) {
        return Ok(stream.card);
    }
    *capture = Capture::Invalid;
    Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// Whether a call that no thread may make in a capture of its own is allowed.
pub fn outside_of_captures() -> Result<(), CUresult> {
    if CAPTURES.get() == 0 { Ok(()) } else { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) }
}

/// Does the work, or notes it.
pub fn put(handle: CUstream, work: Work) -> Result<(), CUresult> {
    let stream = stream(handle)?;
    match &mut *lock(stream) {
        Capture::Active(noted) => {
            noted.push(work);
            return Ok(());
        }
        Capture::Invalid => return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
        Capture::None => {}
    }
    work.run(stream.card)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(made: *mut CUstream, _: c_uint) -> CUresult {
    code(card().map(|card| {
        let stream = Box::new(Stream { card, capture: Default::default() });
        unsafe { made.write(Box::into_raw(stream).cast()) };
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(handle: CUstream) -> CUresult {
    code(stream(handle).map(|_| drop(unsafe { Box::from_raw(handle.cast::<Stream>()) })))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(handle: CUstream) -> CUresult {
    code(idle(handle).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(handle: CUstream) -> CUresult {
    code(idle(handle).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(handle: CUstream, _: CUevent, _: c_uint) -> CUresult {
    code(stream(handle).map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(
    handle: CUstream,
    status: *mut CUstreamCaptureStatus,
) -> CUresult {
    code(stream(handle).map(|stream| {
        let is = match *lock(stream) {
            Capture::None => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
            Capture::Active(_) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
            Capture::Invalid => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        };
        unsafe { status.write(is) };
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(handle: CUstream, _: CUstreamCaptureMode) -> CUresult {
    code(stream(handle).and_then(|stream| {
        let mut capture = lock(stream);
        if !matches!(*capture, Capture::None) {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        *capture = Capture::Active(Vec::new());
        CAPTURES.set(CAPTURES.get() + 1);
        Ok(())
    }))
}

/// Ends a capture: its card, and what was noted.
pub fn end_capture(handle: CUstream) -> Result<(usize, Vec<Work>), CUresult> {
    let stream = stream(handle)?;
    let ended = std::mem::take(&mut *lock(stream));
    CAPTURES.set(CAPTURES.get().saturating_sub(1));
    match ended {
        Capture::Active(work) => Ok((stream.card, work)),
        Capture::Invalid => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
        Capture::None => Err(CUresult::CUDA_ERROR_ILLEGAL_STATE),
    }
}

/// Everything before an event has been done when it is recorded, so an event is only a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(made: *mut CUevent, _: c_uint) -> CUresult {
    code(card().map(|_| unsafe { made.write(1 as CUevent) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(_: CUevent) -> CUresult {
    CUresult::CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(_: CUevent, handle: CUstream) -> CUresult {
    code(stream(handle).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(_: CUevent) -> CUresult {
    code(card().and_then(|_| outside_of_captures()))
}
