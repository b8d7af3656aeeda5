//! The host's processor and memory as a device, and how an op that is a function of them runs.

use crate::base::id::next_id;
use std::fmt::Debug;
use std::sync::Arc;

use super::buffer::Buffer;
use super::pool::Pool;
use crate::base::error::Result;
use crate::ops::op::sealed::Sealed;
use crate::ops::op::{Device, Kernel, Op};
use crate::ops::variants::only;
use crate::ops::{Choice, OpOptions};

/// The host's processor and memory, with a pool of threads that sleep between calls. A clone is another handle on the pool.
///
/// With [`crate::SplitPolicy::FixedTokens`] the number of threads changes no bit of a result; the automatic policy
/// makes more splits for more threads.
#[derive(Clone)]
pub struct Cpu {
    pub(super) pool: Arc<Pool>,
    id: u64,
}

impl Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cpu").field("threads", &self.threads()).finish()
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

/// More than any processor runs at once: each has scratch of its own in every step.
const MOST_THREADS: usize = 4096;

impl Cpu {
    /// A device with as many threads as the system says it can run at once.
    pub fn new() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// This many threads, the calling one included; at least 1 and at most 4096, and fewer where the system gives no more.
    #[must_use]
    pub fn with_threads(threads: usize) -> Self {
        Self { pool: Arc::new(Pool::new(threads.min(MOST_THREADS))), id: next_id() }
    }

    /// Threads in use, the calling one included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Work items that keep every thread busy: a few each, so that a late thread leaves little for the others to wait for.
    pub(super) fn target_items(&self) -> u32 {
        u32::try_from(self.threads()).unwrap_or(u32::MAX).saturating_mul(4)
    }
}

impl Sealed for Cpu {}

impl Device for Cpu {
    type Buffer = Buffer;
    type Recorder<'r> = ();

    fn name(&self) -> String {
        format!("CPU, {} threads", self.threads())
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer> {
        Buffer::new(bytes)
    }

    fn upload(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        buffer.upload(offset, bytes)
    }

    fn download(&self, buffer: &Buffer, bytes: u64) -> Result<Vec<u8>> {
        buffer.download(bytes)
    }

    /// What is recorded here has run when it returns.
    fn submit(&self, record: impl FnOnce(()) -> Result<()>) -> Result<()> {
        record(())
    }

    fn size(buffer: &Buffer) -> u64 {
        buffer.bytes()
    }

    fn offset(a: &Buffer, b: &Buffer) -> Option<i64> {
        a.same_as(b).then_some(0)
    }
}

/// An op that is a function of host memory.
pub trait HostOp: Op<Options = OpOptions, Facts = ()> {
    /// A step, checked.
    type Prepared: Default + Debug + Send + Sync;

    /// # Errors
    /// The errors of the op's input.
    fn prepare(&self, input: Self::Input<'_>) -> Result<(Self::Prepared, Self::Extent)>;

    /// Runs a step on buffers that have room for it.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn run(&self, pool: &Pool, prepared: &Self::Prepared, args: &Self::Args<&Buffer>) -> Result<()>;
}

impl<O: HostOp> Kernel<O> for Cpu
where
    O::Args<Buffer>: Debug + Send + Sync,
{
    const SERVES_RECORDS: bool = true;
    type Kernels = ();
    type Step = O::Prepared;
    type Binding = O::Args<Buffer>;

    fn kernel_compile(&self, _: &O, options: &OpOptions) -> Result<((), (), Choice)> {
        Ok(((), (), only(options)?))
    }

    fn kernel_step(&self, _: &O, (): &(), _: O::Capacity) -> Result<O::Prepared> {
        Ok(O::Prepared::default())
    }

    fn kernel_prepare(
        &self,
        op: &O,
        (): &(),
        step: &mut O::Prepared,
        input: O::Input<'_>,
    ) -> Result<O::Extent> {
        let (prepared, extent) = op.prepare(input)?;
        *step = prepared;
        Ok(extent)
    }

    fn kernel_bind(&self, op: &O, (): &(), args: &O::Args<&Buffer>, _: O::Extent) -> Result<O::Args<Buffer>> {
        op.map(args, |_, buffer| Ok(Buffer::clone(buffer)))
    }

    fn kernel_record(
        &self,
        op: &O,
        (): &(),
        (): &mut (),
        step: &O::Prepared,
        args: &O::Args<Buffer>,
    ) -> Result<()> {
        op.run(&self.pool, step, &op.map(args, |_, buffer| Ok(buffer))?)
    }
}
