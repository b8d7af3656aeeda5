//! An NCCL communicator whose calls never block longer than its time-out.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::super::deadline::Deadline;
use super::library::{Api, Code, Config, Handle, UniqueId};
use crate::base::error::{Error, Result};
use crate::ops::Replay;

/// Makes the card current on a thread.
pub type Bind = Arc<dyn Fn() + Send + Sync>;

/// How long the kernels of an aborted communicator may take to end.
const AFTER_ABORT: Duration = Duration::from_secs(2);

pub struct Comm {
    api: Api,
    pub rank: u32,
    pub world: u32,
    pub timeout: Duration,
    bind: Bind,
    state: Mutex<State>,
    /// Held while NCCL is called: it takes one call of a communicator at a time.
    busy: Mutex<()>,
}

enum State {
    Open(Owned),
    /// Why the communicator is broken, if it is.
    Broken(String),
}

/// NCCL's pointer. It is used by one thread at a time: see [`Comm::busy`].
#[derive(Clone, Copy)]
struct Owned(Handle);

// SAFETY: NCCL allows calls of one communicator from any thread, one at a time.
unsafe impl Send for Owned {}

impl Comm {
    /// Joins the group; comes back when all ranks have.
    ///
    /// # Errors
    /// [`Error::Exchange`], within the time-out.
    pub fn init(
        api: &Api,
        id: UniqueId,
        rank: u32,
        world: u32,
        timeout: Duration,
        blocking: bool,
        bind: Bind,
    ) -> Result<Self> {
        let (api, deadline) = (*api, Deadline::after(timeout));
        let failed = |detail| Error::Exchange { what: "joining the group", rank, detail };
        let bind_too = bind.clone();
        // A blocking call comes back when all ranks came, or never.
        let joined = bounded(timeout, move || {
            bind_too();
            // A call that does not block writes it once more when it is done: it is leaked.
            let handle: *mut Handle = Box::into_raw(Box::new(std::ptr::null_mut()));
            let mut config = Config::new(blocking);
            // SAFETY: of the types that NCCL writes and reads; it reads the configuration before it comes back.
            let code = unsafe { (api.init)(handle, world as i32, id, rank as i32, &raw mut config) };
            // SAFETY: NCCL's later write is of the same value.
            (code, Owned(unsafe { handle.read_volatile() }))
        });
        let (code, handle) = joined.ok_or_else(|| failed(late(timeout)))?;
        let comm = Self {
            api,
            rank,
            world,
            timeout,
            bind,
            state: Mutex::new(State::Open(handle)),
            busy: Mutex::default(),
        };
        let done = match code {
            Code::SUCCESS | Code::IN_PROGRESS => comm.settle(handle, deadline),
            _ => Err(api.said(code, std::ptr::null_mut())),
        };
        done.map_err(|why| failed(comm.give_up(why)))?;
        Ok(comm)
    }

    /// Makes calls as one group, and waits until all of it is on the stream.
    ///
    /// # Errors
    /// [`Error::Exchange`].
    pub fn group(&self, what: &'static str, calls: impl FnOnce(&Api, Handle) -> Code) -> Result<()> {
        let _busy = self.busy();
        let handle = self.open(what)?;
        let api = &self.api;
        // SAFETY: neither takes anything; the end follows whatever the calls gave.
        let code = unsafe { (api.group_start)() };
        let codes = if code == Code::SUCCESS {
            let called = calls(api, handle.0);
            // SAFETY: as above.
            [called, unsafe { (api.group_end)() }]
        } else {
            [code, Code::SUCCESS]
        };
        let bad = codes.into_iter().find(|&code| code != Code::SUCCESS && code != Code::IN_PROGRESS);
        let done = match bad {
            Some(code) => Err(api.said(code, handle.0)),
            None => self.settle(handle, Deadline::after(self.timeout)),
        };
        done.map_err(|why| self.failed(what, self.give_up(why)))
    }

    /// Waits until the stream is idle.
    ///
    /// # Errors
    /// [`Error::Exchange`] where that takes longer than the time-out, or where NCCL found an error meanwhile; what was on the stream has
    /// then been aborted, and its results are worth nothing. Those of `is_idle`.
    pub fn wait(&self, is_idle: impl Fn() -> Result<bool>) -> Result<()> {
        let what = "waiting for an exchange";
        let deadline = Deadline::after(self.timeout);
        let mut pause = Pause::default();
        while !is_idle()? {
            let busy = self.busy();
            let handle = self.open(what)?;
            let why = match self.asked(handle) {
                Ok(Code::SUCCESS | Code::IN_PROGRESS) if !deadline.is_over() => {
                    drop(busy);
                    pause.next();
                    continue;
                }
                Ok(Code::SUCCESS | Code::IN_PROGRESS) => late(self.timeout),
                Ok(code) | Err(code) => self.api.said(code, handle.0),
            };
            let why = self.give_up(why);
            let until = Deadline::after(AFTER_ABORT);
            while !is_idle()? && !until.is_over() {
                pause.next();
            }
            return Err(self.failed(what, why));
        }
        // An exchange before it may have failed, and been aborted.
        self.open(what).map(drop)
    }

    /// Waits for what NCCL does in the background.
    fn settle(&self, handle: Owned, deadline: Deadline) -> Result<(), String> {
        let mut pause = Pause::default();
        loop {
            match self.asked(handle) {
                Ok(Code::SUCCESS) => return Ok(()),
                Ok(Code::IN_PROGRESS) if !deadline.is_over() => pause.next(),
                Ok(Code::IN_PROGRESS) => return Err(late(self.timeout)),
                Ok(code) | Err(code) => return Err(self.api.said(code, handle.0)),
            }
        }
    }

    /// The communicator's asynchronous state, as NCCL reports it.
    fn asked(&self, handle: Owned) -> Result<Code, Code> {
        let mut state = Code::SUCCESS;
        // SAFETY: the handle is open, and the result outlives the call.
        match unsafe { (self.api.async_error)(handle.0, &raw mut state) } {
            Code::SUCCESS => Ok(state),
            code => Err(code),
        }
    }

    /// Aborts what is under way, on a thread of its own: NCCL may wait there for graphs that hold its kernels. Gives `why` back.
    fn give_up(&self, why: String) -> String {
        let before = std::mem::replace(&mut *self.state(), State::Broken(why.clone()));
        if let State::Open(handle) = before {
            self.close(handle, |api| api.abort, AFTER_ABORT);
        }
        why
    }

    /// Calls what frees a handle; true if it came back in time.
    fn close(
        &self,
        handle: Owned,
        function: impl Fn(&Api) -> unsafe extern "C" fn(Handle) -> Code,
        timeout: Duration,
    ) -> bool {
        if handle.0.is_null() {
            return true;
        }
        let (function, bind) = (function(&self.api), self.bind.clone());
        let closed = bounded(timeout, move || {
            // The whole of it is moved to the thread, not its pointer.
            let handle = handle;
            bind();
            // SAFETY: the handle was open, and is used no more.
            unsafe { function(handle.0) }
        });
        closed.is_some()
    }

    fn open(&self, what: &'static str) -> Result<Owned> {
        match &*self.state() {
            State::Open(handle) => Ok(*handle),
            State::Broken(why) => Err(self.failed(what, why.clone())),
        }
    }

    fn failed(&self, what: &'static str, detail: String) -> Error {
        Error::Exchange { what, rank: self.rank, detail }
    }

    fn busy(&self) -> MutexGuard<'_, ()> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let State::Open(handle) = *self.state() else { return };
        let deadline = Deadline::after(self.timeout);
        // SAFETY: the handle is open.
        let code = unsafe { (self.api.finalize)(handle.0) };
        let flushed = match code {
            Code::SUCCESS | Code::IN_PROGRESS => self.settle(handle, deadline),
            _ => Err(self.api.said(code, handle.0)),
        };
        match flushed {
            Ok(()) => drop(self.close(handle, |api| api.destroy, self.timeout)),
            Err(why) => {
                log::warn!("NCCL, rank {}: {}", self.rank, self.give_up(why));
            }
        }
    }
}

/// Held by a graph that was captured of an exchange: the communicator outlives it, and a broken one is not replayed.
pub struct Alive(pub Arc<Comm>);

impl Replay for Alive {
    fn check(&self) -> Result<()> {
        self.0.open("replaying an exchange").map(drop)
    }

    fn is(&self, other: &dyn std::any::Any) -> bool {
        other.downcast_ref::<Self>().is_some_and(|other| Arc::ptr_eq(&self.0, &other.0))
    }
}

fn late(timeout: Duration) -> String {
    format!(
        "the ranks did not all come within {timeout:?}: one is gone, late, or was set up for another world"
    )
}

/// Runs a call on a thread of its own and returns its result. A call that does not return in time is left to that thread.
fn bounded<T: Send + 'static>(timeout: Duration, call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (send, receive) = channel();
    let thread = std::thread::Builder::new().name("nccl".into());
    let spawned = thread.spawn(move || drop(send.send(call())));
    if spawned.is_err() {
        return None;
    }
    receive.recv_timeout(timeout).ok()
}

/// Waits between two polls: spins at first, since exchanges take microseconds.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn next(&mut self) {
        self.0 = self.0.saturating_add(1);
        if self.0 < 2000 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
