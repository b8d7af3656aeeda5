//! A CUDA graph of what ops launched on a stream, which can be launched again.

use cudarc::driver::{CudaGraph, sys};

#[cfg(feature = "nccl")]
use super::buffer::Buffer;
use super::captures::Held;
use super::device::Cuda;
use super::library::failed;
use crate::base::error::{Error, Result};
#[cfg(feature = "nccl")]
use crate::ops::Replay;

/// Kernels that [`Cuda::capture`] took from the stream.
///
/// They name memory of steps and bindings by its address. The graph owns a share of all that memory, so that neither a step that is
/// dropped or grows, nor a binding or buffer that is dropped, leaves it with addresses of nothing. A step that grew has new tables,
/// which the graph does not read: [`Graph::launch`] refuses until it was captured again.
pub struct Graph {
    // Dropped in this order: first what uses the others.
    graph: CudaGraph,
    held: Held,
    cuda: Cuda,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("held", &self.held.buffers.len()).finish_non_exhaustive()
    }
}

const FLAGS: sys::CUgraphInstantiate_flags =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

/// A stream in a capture, which ends with it whatever happens: the stream can be used again.
struct Capture<'a> {
    cuda: &'a Cuda,
    is_open: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> (Result<Option<CudaGraph>>, Held) {
        self.is_open = false;
        let graph = self.cuda.stream().end_capture(FLAGS).map_err(failed("to end a capture"));
        (graph, self.cuda.captures.end())
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_open {
            drop(self.end());
        }
    }
}

impl Cuda {
    /// Captures as a graph what `record` would launch on the stream: calls of `record` of compiled ops, which allocate nothing and wait for
    /// nothing. The graph keeps alive the memory that they use. Only one thread may use this device meanwhile.
    ///
    /// # Errors
    /// The errors of `record`, [`Error::Cuda`], and [`Error::LayoutMismatch`] for a capture within another and for one without a launch.
    pub fn capture(&self, record: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.captures.begin()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        if let Err(error) = self.stream().begin_capture(mode) {
            self.captures.end();
            return Err(failed("to begin a capture")(error));
        }
        let mut capture = Capture { cuda: self, is_open: true };
        let recorded = record();
        let (graph, held) = capture.end();
        recorded?;
        let empty = Error::LayoutMismatch { detail: "nothing was launched in Cuda::capture: record in it" };
        Ok(Graph { graph: graph?.ok_or(empty)?, held, cuda: self.clone() })
    }
}

#[cfg(feature = "nccl")]
impl Cuda {
    /// Whether [`Cuda::capture`] is under way.
    pub(crate) fn is_capturing(&self) -> bool {
        self.captures.is_open()
    }

    /// Before something else than a kernel is put on the stream: what a graph that is captured has to keep and to check. Makes the card
    /// current.
    pub(crate) fn note_exchange<'a>(
        &self,
        buffers: impl IntoIterator<Item = &'a Buffer>,
        check: impl FnOnce() -> Box<dyn Replay>,
    ) -> Result<()> {
        self.captures.hold(buffers);
        self.captures.note(check);
        self.make_current("to use the card")
    }
}

impl Drop for Graph {
    /// What it is made of is destroyed after this, in the card's context.
    fn drop(&mut self) {
        drop(self.cuda.make_current("to destroy a graph"));
    }
}

impl Graph {
    /// Launches it on the device's stream: with what the steps hold that were prepared before.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] where it would give wrong results: a step's last prepare failed, or reached past its binding's room; or
    /// it needed more than the capacity, or other kernels of a layer, so that the graph has to be captured again. [`Error::Cuda`].
    pub fn launch(&self) -> Result<()> {
        self.held.replays.iter().try_for_each(|replay| replay.check())?;
        let _turn = self.cuda.turn();
        self.graph.launch().map_err(failed("to launch a graph"))
    }

    /// The graph itself. What is launched or copied of it uses memory that only `self` keeps, and is not checked as by
    /// [`Graph::launch`].
    #[must_use]
    pub fn raw(&self) -> &CudaGraph {
        &self.graph
    }

    /// The device that it was captured on.
    #[must_use]
    pub fn device(&self) -> &Cuda {
        &self.cuda
    }
}
