//! What a rank's exchanges take: a communicator around another.

use std::cell::Cell;
use std::time::{Duration, Instant};

use wgpu_mla::communicator::{Communicator, Exchange};
use wgpu_mla::{Device, Dtype, Result};

/// Counts the time in which this rank waits for exchanges.
pub struct Timed<'a, D: Device> {
    inner: &'a dyn Communicator<D>,
    waited: Cell<Duration>,
}

impl<'a, D: Device> Timed<'a, D> {
    pub fn new(inner: &'a dyn Communicator<D>) -> Self {
        Self { inner, waited: Cell::default() }
    }

    /// The time since this was last asked.
    pub fn take(&self) -> Duration {
        self.waited.take()
    }

    fn timed<T>(&self, call: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = call();
        self.waited.set(self.waited.get() + begin.elapsed());
        result
    }
}

impl<D: Device> Communicator<D> for Timed<'_, D> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn in_stream_order(&self) -> bool {
        self.inner.in_stream_order()
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
        self.timed(|| self.inner.all_gather_host(mine))
    }

    fn all_to_all_host(&self, parts: &[u8]) -> Result<Vec<u8>> {
        self.timed(|| self.inner.all_to_all_host(parts))
    }

    fn all_gather(&self, device: &D, exchanges: &[Exchange<&D::Buffer>]) -> Result<()> {
        self.timed(|| self.inner.all_gather(device, exchanges))
    }

    fn all_to_all(&self, device: &D, exchanges: &[Exchange<&D::Buffer>]) -> Result<()> {
        self.timed(|| self.inner.all_to_all(device, exchanges))
    }

    fn reduce_scatter(&self, device: &D, exchange: &Exchange<&D::Buffer>, dtype: Dtype) -> Result<()> {
        self.timed(|| self.inner.reduce_scatter(device, exchange, dtype))
    }

    fn wait(&self, device: &D) -> Result<()> {
        self.timed(|| self.inner.wait(device))
    }
}
