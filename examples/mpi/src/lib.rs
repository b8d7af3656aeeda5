//! Ranks of [`wgpu_mla`] that are processes under `mpirun`, on one host or many, with any device each.
//!
//! Bytes go through the host. Every exchange is a non-blocking collective that is polled until it is done or the time is up. After an
//! error a program ends with a status that is not 0: `mpirun` then ends the other ranks.
//!
//! ```no_run
//! use std::time::Duration;
//! use wgpu_mla::communicator::Communicator;
//! use wgpu_mla::cpu::Cpu;
//! use wgpu_mla_mpi::Mpi;
//!
//! # fn main() -> wgpu_mla::Result<()> {
//! let mpi = Mpi::new(Duration::from_secs(5))?;
//! let communicator: &dyn Communicator<Cpu> = &mpi;
//! let all = communicator.all_gather_host(&[communicator.rank() as u8])?;
//! assert_eq!(all.len(), communicator.world() as usize);
//! # Ok(()) }
//! ```

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Communicator as _, SimpleCommunicator};
use wgpu_mla::communicator::Communicator;
use wgpu_mla::{Device, Error, Result};

/// This process as a rank of `MPI_COMM_WORLD`. MPI ends when it is dropped.
pub struct Mpi {
    world: SimpleCommunicator,
    timeout: Duration,
    /// Dropped last; `None` where an exchange is still under way, which would keep MPI from ending.
    universe: Option<Universe>,
    broken: std::cell::RefCell<Option<String>>,
}

impl Mpi {
    /// Starts MPI, once a process. `timeout` is how long a rank waits for the others in one exchange: more than the slowest rank's work
    /// between two of them.
    ///
    /// # Errors
    /// [`Error::Exchange`] where MPI was started before.
    pub fn new(timeout: Duration) -> Result<Self> {
        let universe = mpi::initialize().ok_or_else(|| Error::Exchange {
            what: "starting MPI",
            rank: 0,
            detail: "it was started before in this process".into(),
        })?;
        let world = universe.world();
        // Errors are codes rather than the end of all ranks.
        // SAFETY: the communicator is MPI's own, which is open.
        unsafe { ffi::MPI_Comm_set_errhandler(world.as_raw(), ffi::RSMPI_ERRORS_RETURN) };
        Ok(Self { world, timeout, universe: Some(universe), broken: None.into() })
    }

    /// A collective that `start` begins, of as many bytes of every rank.
    fn exchange(
        &self,
        what: &'static str,
        mine: &[u8],
        part: usize,
        start: impl FnOnce(*const c_void, *mut c_void, c_int, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<Vec<u8>> {
        let rank = self.world.rank() as u32;
        let failed = |detail: String| {
            *self.broken.borrow_mut() = Some(detail.clone());
            Error::Exchange { what, rank, detail }
        };
        if let Some(why) = &*self.broken.borrow() {
            return Err(Error::Exchange { what, rank, detail: why.clone() });
        }
        let count = c_int::try_from(part)
            .map_err(|_| failed(format!("{part} bytes a rank: MPI counts to 2^31, exchange less at once")))?;
        let from = mine.to_vec();
        let mut to = vec![0u8; part * self.world.size() as usize];
        let mut request = MaybeUninit::uninit();
        let code = start(from.as_ptr().cast(), to.as_mut_ptr().cast(), count, request.as_mut_ptr());
        if code != ffi::MPI_SUCCESS as c_int {
            return Err(failed(format!("MPI's error {code}")));
        }
        // SAFETY: MPI has written it.
        let mut request = unsafe { request.assume_init() };
        match self.poll(&mut request) {
            Ok(()) => Ok(to),
            Err(why) => {
                // MPI may still read and write them.
                std::mem::forget((from, to));
                Err(failed(why))
            }
        }
    }

    fn poll(&self, request: &mut ffi::MPI_Request) -> Result<(), String> {
        // None where it is too far off to be a point in time, as with `Duration::MAX`.
        let deadline = Instant::now().checked_add(self.timeout);
        for turn in 0u64.. {
            let mut done: c_int = 0;
            // SAFETY: a request that is open; its status is not asked for.
            let code = unsafe { ffi::MPI_Test(request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
            if code != ffi::MPI_SUCCESS as c_int {
                return Err(format!("MPI's error {code}: the ranks pass different sizes, or one is gone"));
            }
            if done != 0 {
                return Ok(());
            }
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                break;
            }
            // Exchanges take microseconds, unless the others are late.
            if turn < 10_000 {
                std::thread::yield_now()
            } else {
                std::thread::sleep(Duration::from_micros(20))
            }
        }
        Err(format!("the ranks did not all come within {:?}: one is gone or late", self.timeout))
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.broken.borrow().is_some() {
            // MPI_Finalize would wait for the others.
            std::mem::forget(self.universe.take());
        }
    }
}

impl<D: Device> Communicator<D> for Mpi {
    fn rank(&self) -> u32 {
        self.world.rank() as u32
    }

    fn world(&self) -> u32 {
        self.world.size() as u32
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
        let (byte, world) = (byte(), self.world.as_raw());
        self.exchange("all_gather", mine, mine.len(), |from, to, count, request| {
            // SAFETY: a part, and room for one of each rank, which are kept until the exchange is done.
            unsafe { ffi::MPI_Iallgather(from, count, byte, to, count, byte, world, request) }
        })
    }

    fn all_to_all_host(&self, parts: &[u8]) -> Result<Vec<u8>> {
        let size = self.world.size() as usize;
        if !parts.len().is_multiple_of(size) {
            let (what, got) = ("all_to_all bytes", parts.len() as u64);
            return Err(Error::Shape { what, got, cure: "must be as many for each rank" });
        }
        let (byte, world) = (byte(), self.world.as_raw());
        self.exchange("all_to_all", parts, parts.len() / size, |from, to, count, request| {
            // SAFETY: a part for each rank, and room for as much, which are kept until the exchange is done.
            unsafe { ffi::MPI_Ialltoall(from, count, byte, to, count, byte, world, request) }
        })
    }
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant of MPI's.
    unsafe { ffi::RSMPI_UINT8_T }
}
