//! Exchanges between the ranks of a group, by which the partial results of a sequence on several devices are joined.
//!
//! ```text
//! once       group = InProcess::group(world, timeout)?            or Nccl::new(..), an MPI communicator, the host's own
//! per step   digest.agree(&communicator)?                         every rank works on the same batch, or all get an error
//! per layer  communicator.all_to_all(&device, &[exchange])?       on device buffers; ContextParallel calls it
//! ```
//!
//! | engine | between | in stream order |
//! |---|---|---|
//! | [`InProcess`] | threads of a process, a device each, of any kinds | no |
//! | `Nccl`, feature `nccl` | NVIDIA cards, of one process or many | yes: part of a captured graph |
//! | `wgpu_mla_mpi::Mpi`, the package `examples/mpi` | processes, on one host or many | no |
//! | the host's own | what it likes | as it says |
//!
//! This crate has no wire protocol of its own: existing communication libraries carry the bytes.

#[cfg(not(target_arch = "wasm32"))]
mod deadline;
mod digest;
pub(crate) mod digest_fields;
pub(crate) mod form;
#[cfg(not(target_arch = "wasm32"))]
mod in_process;
#[cfg(feature = "nccl")]
mod nccl;
mod staged;

pub use digest::StepDigest;
#[cfg(not(target_arch = "wasm32"))]
pub use in_process::InProcess;
#[cfg(feature = "nccl")]
pub use nccl::{Nccl, NcclId, NcclSetup};

use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::ops::Device;

/// One rank's end of a group: the collectives that context parallelism needs, in NCCL's terms. Every rank makes the same calls in the
/// same order, with the same sizes.
///
/// A host that has its own engine implements three methods, on host bytes; exchanges of device buffers then go through the host. An
/// engine that works in the order of the device's stream overrides those, and [`Communicator::in_stream_order`].
///
/// Every call ends within the engine's time-out: with an [`Error::Exchange`] where another rank is gone, failed
/// or did not come. The group is of no use after that.
///
/// ```
/// use std::sync::mpsc::{Receiver, Sender, channel};
/// use std::time::Duration;
/// use wgpu_mla::communicator::{Communicator, Exchange};
/// use wgpu_mla::{Device, Error, Result, cpu::Cpu};
///
/// /// Two ranks, joined by channels: whatever carries bytes will do.
/// struct Pair { rank: u32, to: Sender<Vec<u8>>, from: Receiver<Vec<u8>> }
///
/// impl<D: Device> Communicator<D> for Pair {
///     fn rank(&self) -> u32 {
///         self.rank
///     }
///     fn world(&self) -> u32 {
///         2
///     }
///     fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
///         let failed = |detail: &str| Error::Exchange { what: "all_gather", rank: self.rank, detail: detail.into() };
///         self.to.send(mine.into()).map_err(|_| failed("the other rank is gone"))?;
///         let theirs = self.from.recv_timeout(Duration::from_secs(5)).map_err(|error| failed(&error.to_string()))?;
///         Ok(if self.rank == 0 { [mine, &theirs].concat() } else { [&theirs, mine].concat() })
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let ((to_1, from_0), (to_0, from_1)) = (channel(), channel());
/// let ranks = [Pair { rank: 0, to: to_1, from: from_1 }, Pair { rank: 1, to: to_0, from: from_0 }];
/// std::thread::scope(|scope| {
///     for pair in ranks {
///         scope.spawn(move || -> Result<()> {
///             let communicator: &dyn Communicator<Cpu> = &pair;
///             let cpu = Cpu::with_threads(1);
///             let (from, to) = (cpu.buffer(8)?, cpu.buffer(8)?);
///             cpu.upload(&from, 0, &[10 * communicator.rank() as u8; 8])?;
///             communicator.all_to_all(&cpu, &[Exchange { from: &from, to: &to, bytes: 4 }])?;
///             assert_eq!(cpu.download(&to, 8)?, [0, 0, 0, 0, 10, 10, 10, 10]);
///             Ok(())
///         });
///     }
/// });
/// # Ok(()) }
/// ```
pub trait Communicator<D: Device> {
    /// This rank, below [`Communicator::world`].
    fn rank(&self) -> u32;

    /// Ranks in the group, at least 1.
    fn world(&self) -> u32;

    /// Gathers every rank's bytes, equally many from each, in the order of the ranks.
    ///
    /// # Errors
    /// [`Error::Exchange`].
    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>>;

    /// Sends each rank its part of `parts`, equally many bytes for each, in the order of the ranks, and returns the parts that the ranks
    /// had for this one. The default implementation gathers all parts from all ranks.
    ///
    /// # Errors
    /// [`Error::Exchange`], and [`Error::Shape`] for what is no equal part a rank.
    fn all_to_all_host(&self, parts: &[u8]) -> Result<Vec<u8>> {
        staged::all_to_all_by_gather(self, parts)
    }

    /// Whether exchanges of device buffers are put in the order of the device's stream, as kernels are: then they return before they have
    /// run, may be captured by `Cuda::capture`, and [`Communicator::wait`] waits for them within the time-out. Otherwise an
    /// exchange waits for what was submitted, and ends a recorded part: the host submits what is before it first.
    fn in_stream_order(&self) -> bool {
        false
    }

    /// Gathers a part of every rank into every rank: `to` holds `[world, bytes]`, `from` this rank's `bytes`. Several exchanges are one
    /// message.
    ///
    /// # Errors
    /// [`Error::Exchange`]; [`Error::BufferTooSmall`],
    /// [`Error::Alignment`] and the device's, on this rank alone: the others are told when this rank leaves.
    fn all_gather(&self, device: &D, exchanges: &[Exchange<&D::Buffer>]) -> Result<()> {
        staged::all_gather(self, device, exchanges)
    }

    /// Gives each rank its part: `from` holds `[world, bytes]`, a part for each rank; `to` gets `[world, bytes]`, a part of each rank.
    /// Several exchanges are one message.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_gather`].
    fn all_to_all(&self, device: &D, exchanges: &[Exchange<&D::Buffer>]) -> Result<()> {
        staged::all_to_all(self, device, exchanges)
    }

    /// Sums the ranks' `from`, `[world, bytes]` of `dtype`, and leaves each rank its part: `bytes` in `to`. Through the host the sum is
    /// made in f64; an engine may round between the ranks.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_gather`], and [`Error::DtypeUnsupported`] for e4m3.
    fn reduce_scatter(&self, device: &D, exchange: &Exchange<&D::Buffer>, dtype: Dtype) -> Result<()> {
        staged::reduce_scatter(self, device, exchange, dtype)
    }

    /// Waits, within the time-out, for the exchanges that are in stream order, and for all before them. A host calls it before it waits
    /// for the device in any other way, such as a download: a rank that is gone would keep the stream busy for ever.
    ///
    /// # Errors
    /// [`Error::Exchange`].
    fn wait(&self, _: &D) -> Result<()> {
        Ok(())
    }
}

/// Device buffers of one rank in an exchange, each from its front. The two are different buffers.
#[derive(Debug, Clone, Copy)]
pub struct Exchange<B> {
    /// The buffer that this rank sends: `bytes`, or `[world, bytes]`.
    pub from: B,
    /// The buffer that it receives into: `[world, bytes]`, or `bytes`.
    pub to: B,
    /// Bytes of one rank's part, the same on every rank: a multiple of 4, of any dtype.
    pub bytes: u64,
}

/// # Errors
/// [`Error::Shape`] for no ranks, or more than 65,536.
pub(crate) fn check_world(world: u32) -> Result<()> {
    if !(1..=1 << 16).contains(&world) {
        return Err(Error::Shape {
            what: "world",
            got: world.into(),
            cure: "must be from 1 to 65,536 ranks",
        });
    }
    Ok(())
}
