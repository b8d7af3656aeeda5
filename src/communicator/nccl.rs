//! Ranks that are NVIDIA cards, through NCCL.

mod calls;
mod comm;
mod library;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use self::calls::{Ends, Target, worst};
use self::comm::{Alive, Comm};
use self::library::{Code, Stream, UniqueId};
use super::{Communicator, Exchange, staged};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::cuda::{Buffer, Cuda};
use crate::ops::Device;

/// A rank of a group of NVIDIA cards, one card each, of one process (a thread each) or of many, on one host or many.
///
/// Exchanges of device buffers are put on the device's stream, and may be captured by [`Cuda::capture`]: run a step once before, so that
/// NCCL has made its connections. [`Communicator::wait`] then waits for them; a download before it would wait for a dead rank without end.
///
/// NCCL's library is looked for at run time, as `libnccl.so.2`: 2.14 or later. NVLink multicast is left off: `NCCL_NVLS_ENABLE` is set to
/// 0 when the library is loaded, unless the environment has it.
///
/// ```no_run
/// use std::time::Duration;
/// use wgpu_mla::communicator::{Nccl, NcclId};
/// use wgpu_mla::cuda::Cuda;
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // One rank makes the id, and the host carries its bytes to the others: by a file, by MPI, by whatever is at hand.
/// let id = NcclId::new()?;
/// let bytes: [u8; 128] = id.bytes();
/// let (rank, world) = (0, 2);
/// let cuda = Cuda::new(rank as usize)?;
/// let communicator = Nccl::new(&cuda, NcclId::from(bytes), rank, world, Duration::from_secs(30))?;
/// # Ok(()) }
/// ```
pub struct Nccl {
    cuda: Cuda,
    comm: Arc<Comm>,
    /// Staging buffers for host bytes: one to send, one to receive.
    scratch: Mutex<Option<[Buffer; 2]>>,
}

/// What the ranks of a group have in common: NCCL's unique id. One rank makes it, the host carries it to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclId(UniqueId);

/// Choices of [`Nccl::with`].
#[derive(Debug, Clone, Copy)]
pub struct NcclSetup {
    /// How long a rank waits for the others: while the group is made, in each exchange, in [`Communicator::wait`], and as it is dropped.
    pub timeout: Duration,
    /// NCCL's blocking communicators: a call that sets up connections to a dead rank does not come back. For drivers or versions of
    /// NCCL that have trouble with the others.
    pub blocking: bool,
}

impl NcclSetup {
    /// With a time-out, and communicators that do not block.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, blocking: false }
    }
}

impl NcclId {
    /// A new one, which this process must outlive until all ranks have joined.
    ///
    /// # Errors
    /// [`Error::NoNccl`], and [`Error::Exchange`] where NCCL finds no network interface.
    pub fn new() -> Result<Self> {
        let api = library::api()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: it is of the size that NCCL writes.
        match unsafe { (api.get_unique_id)(&raw mut id) } {
            Code::SUCCESS => Ok(Self(id)),
            code => {
                let detail = api.said(code, std::ptr::null_mut());
                Err(Error::Exchange { what: "making an id", rank: 0, detail })
            }
        }
    }

    /// The bytes that a host carries to the other ranks.
    #[must_use]
    pub fn bytes(&self) -> [u8; 128] {
        self.0.0
    }
}

impl From<[u8; 128]> for NcclId {
    fn from(bytes: [u8; 128]) -> Self {
        Self(UniqueId(bytes))
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Comm { rank, world, .. } = *self.comm;
        f.debug_struct("Nccl").field("rank", &rank).field("world", &world).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Joins a group; comes back when all its ranks have joined.
    ///
    /// # Errors
    /// The errors of [`Nccl::with`].
    pub fn new(cuda: &Cuda, id: NcclId, rank: u32, world: u32, timeout: Duration) -> Result<Self> {
        Self::with(cuda, id, rank, world, &NcclSetup::new(timeout))
    }

    /// Like [`Nccl::new`], with other choices.
    ///
    /// # Errors
    /// [`Error::NoNccl`] where the library is not; [`Error::Shape`] for a rank that the world has not; [`Error::Exchange`] where the others
    /// do not come in time, or NCCL fails, such as for two ranks on one card.
    pub fn with(cuda: &Cuda, id: NcclId, rank: u32, world: u32, setup: &NcclSetup) -> Result<Self> {
        let api = library::api()?;
        super::check_world(world)?;
        if rank >= world {
            return Err(Error::Shape { what: "rank", got: rank.into(), cure: "must be below world" });
        }
        let context = cuda.stream().context().clone();
        // An error shows in NCCL's own calls.
        let bind = Arc::new(move || {
            let _ = context.bind_to_thread();
        });
        let NcclSetup { timeout, blocking } = *setup;
        let comm = Arc::new(Comm::init(api, id.0, rank, world, timeout, blocking, bind)?);
        let nccl = Self { cuda: cuda.clone(), comm, scratch: Mutex::default() };
        nccl.connect()?;
        Ok(nccl)
    }

    /// The library's version, as NCCL counts: 22703 is 2.27.3.
    ///
    /// # Errors
    /// [`Error::NoNccl`].
    pub fn version() -> Result<u32> {
        let api = library::api()?;
        let mut version = 0;
        // SAFETY: it outlives the call.
        unsafe { (api.get_version)(&raw mut version) };
        Ok(version.max(0) as u32)
    }

    /// Runs one exchange of each kind. NCCL makes its connections in the first, which should not happen in a capture.
    fn connect(&self) -> Result<()> {
        let bytes = 16 * u64::from(self.comm.world);
        let [from, to] = [self.cuda.buffer(bytes)?, self.cuda.buffer(bytes)?];
        let exchange = Exchange { from: &from, to: &to, bytes: 16 };
        self.all_gather(&self.cuda, &[exchange])?;
        self.all_to_all(&self.cuda, &[exchange])?;
        self.reduce_scatter(&self.cuda, &exchange, Dtype::F32)?;
        self.wait(&self.cuda)
    }

    /// Puts calls on the stream as one NCCL group, for buffers of so many parts.
    fn exchange(
        &self,
        what: &'static str,
        device: &Cuda,
        exchanges: &[Exchange<&Buffer>],
        [from, to]: [u64; 2],
        call: impl Fn(&Target<'_>, Ends) -> Code,
    ) -> Result<()> {
        if device.id() != self.cuda.id() {
            let detail = "the communicator was made on another device: make one for each";
            return Err(Error::LayoutMismatch { detail });
        }
        staged::check::<Cuda>(exchanges, from, to)?;
        let exchanges = || exchanges.iter().filter(|exchange| exchange.bytes > 0);
        if exchanges().next().is_none() {
            return Ok(());
        }
        let buffers = exchanges().flat_map(|exchange| [exchange.from, exchange.to]);
        device.note_exchange(buffers, || Box::new(Alive(self.comm.clone())))?;
        let stream: Stream = device.stream().cu_stream().cast();
        self.comm.group(what, |api, handle| {
            let target = Target { api, handle, stream };
            worst(exchanges().map(|exchange| {
                let [from, to] = [exchange.from, exchange.to].map(|buffer| buffer.ptr() as *mut c_void);
                call(&target, Ends { from, to, bytes: exchange.bytes as usize })
            }))
        })
    }

    /// # Errors
    /// [`Error::LayoutMismatch`] in a capture.
    fn not_capturing(&self) -> Result<()> {
        if self.cuda.is_capturing() {
            let detail = "the host waits for an exchange in Cuda::capture: wait after a launch of the graph, and agree on a step before";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    fn world(&self) -> u64 {
        self.comm.world.into()
    }
}

impl Communicator<Cuda> for Nccl {
    fn rank(&self) -> u32 {
        self.comm.rank
    }

    fn world(&self) -> u32 {
        self.comm.world
    }

    fn in_stream_order(&self) -> bool {
        true
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
        self.not_capturing()?;
        let world = self.comm.world as usize;
        let bytes = mine.len().next_multiple_of(4);
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let [from, to] = match &*scratch {
            Some(buffers) if buffers[0].bytes() >= bytes as u64 => buffers.clone(),
            _ => [
                self.cuda.buffer(bytes as u64)?,
                self.cuda.buffer((bytes.next_multiple_of(16) * world) as u64)?,
            ],
        };
        *scratch = Some([from.clone(), to.clone()]);
        let mut padded = mine.to_vec();
        padded.resize(bytes, 0);
        self.cuda.upload(&from, 0, &padded)?;
        self.all_gather(&self.cuda, &[Exchange { from: &from, to: &to, bytes: bytes as u64 }])?;
        Communicator::wait(self, &self.cuda)?;
        let all = self.cuda.download(&to, (bytes * world) as u64)?;
        Ok(all.chunks(bytes.max(1)).map(|part| &part[..mine.len()]).collect::<Vec<_>>().concat())
    }

    fn all_gather(&self, device: &Cuda, exchanges: &[Exchange<&Buffer>]) -> Result<()> {
        let parts = [1, self.world()];
        // SAFETY: buffers of this card, checked to hold so many parts, which a graph keeps; the same below.
        let call = |target: &Target<'_>, ends| unsafe { target.all_gather(ends) };
        self.exchange("all_gather", device, exchanges, parts, call)
    }

    fn all_to_all(&self, device: &Cuda, exchanges: &[Exchange<&Buffer>]) -> Result<()> {
        let parts = [self.world(); 2];
        // SAFETY: as above.
        let call = |target: &Target<'_>, ends| unsafe { target.all_to_all(ends, self.comm.world) };
        self.exchange("all_to_all", device, exchanges, parts, call)
    }

    fn reduce_scatter(&self, device: &Cuda, exchange: &Exchange<&Buffer>, dtype: Dtype) -> Result<()> {
        staged::check_sum(dtype, exchange.bytes)?;
        let dtype = (library::sum_dtype(dtype)?, dtype.bytes());
        let parts = [self.world(), 1];
        // SAFETY: as above, of whole elements.
        let call = |target: &Target<'_>, ends| unsafe { target.reduce_scatter(ends, dtype) };
        self.exchange("reduce_scatter", device, std::slice::from_ref(exchange), parts, call)
    }

    fn wait(&self, device: &Cuda) -> Result<()> {
        self.not_capturing()?;
        self.comm.wait(|| device.is_idle())
    }
}
