//! What all calls share: one lock, one interpreter, one memory.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{CUcontext, CUresult};

use crate::interpreter::Interpreter;
use crate::memory::Memory;

pub struct State {
    pub memory: Memory,
    pub interpreter: Interpreter,
}

thread_local! {
    /// The card that a thread's calls are for, by its context.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Held for the time of a call.
pub fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    let start = || {
        let memory = Memory::new();
        let interpreter = Interpreter::start(&memory);
        Mutex::new(State { memory, interpreter })
    };
    STATE.get_or_init(start).lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context's handle is its card's number, counted from 1.
pub fn context(card: usize) -> CUcontext {
    (card + 1) as CUcontext
}

pub fn set_current(context: CUcontext) {
    CURRENT.set((context as usize).checked_sub(1));
}

/// The card whose context is current on this thread.
pub fn current() -> Option<usize> {
    CURRENT.get()
}

/// The same, as most calls need it.
pub fn card() -> Result<usize, CUresult> {
    current().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

/// A call's result as the driver returns it.
pub fn code(result: Result<(), CUresult>) -> CUresult {
    result.err().unwrap_or(CUresult::CUDA_SUCCESS)
}
