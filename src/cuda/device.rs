//! A card and a stream as a device, and the kernels that were loaded on it.

use crate::base::id::next_id;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DeviceRepr, DriverError, sys};
use cudarc::nvrtc;
use wgpu_mla_ptx::Entry;

use super::buffer::Buffer;
use super::caps::Card;
use super::captures::Captures;
use super::kernels::{TensorMap, ptx};
use super::library::{self, failed, said};
use super::turn::{Taken, Turn};
use super::uploads::Uploads;
use crate::base::error::{Error, Result};
use crate::ops::Replay;
use crate::ops::op::sealed::Sealed;
use crate::ops::op::{Binding, Compiled, Device, Kernel, Op, Step};

/// An NVIDIA card, and the stream that everything is launched on. A clone is another handle on both.
#[derive(Clone)]
pub struct Cuda {
    stream: Arc<CudaStream>,
    card: Card,
    /// The loaded kernels, by their modules and names.
    kernels: Arc<Mutex<HashMap<(&'static str, &'static str), Function>>>,
    pub(super) captures: Captures,
    turn: Turn,
    uploads: Uploads,
    id: u64,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("card", &self.card).finish_non_exhaustive()
    }
}

/// A kernel that was loaded.
#[derive(Debug, Clone)]
pub struct Function {
    function: CudaFunction,
    /// Whether the kernel waits for the kernel before it by itself (`griddepcontrol.wait`), and so may be launched before that one has
    /// ended.
    waits: bool,
    /// The number of tensor maps in its second parameter.
    tensor_maps: u32,
    /// Blocks in a cluster.
    cluster: u32,
}

impl Cuda {
    /// The card of this number, with a stream of its own.
    ///
    /// # Errors
    /// [`Error::NoCuda`] where there is no driver, one older than 520, no such card, or one older than Ampere.
    pub fn new(ordinal: usize) -> Result<Self> {
        library::check()?;
        let missing = |error: DriverError| Error::NoCuda { detail: said(error) };
        let context = CudaContext::new(ordinal).map_err(missing)?;
        // With event tracking the first stream waits for the whole card, which breaks captures on other threads.
        // SAFETY: nothing is allocated in between that would miss its events.
        let stream = unsafe {
            context.disable_event_tracking();
            let stream = context.new_stream();
            context.enable_event_tracking();
            stream
        };
        Self::on_stream(stream.map_err(missing)?)
    }

    /// A `Cuda` on the host's stream. The caller keeps work on other streams from touching buffers in use.
    ///
    /// # Errors
    /// [`Error::NoCuda`] for a card older than Ampere, or a driver older than 520.
    pub fn on_stream(stream: Arc<CudaStream>) -> Result<Self> {
        library::check()?;
        let attribute = |what| {
            let value = stream.context().attribute(what).map_err(failed("to ask the card"))?;
            Ok::<_, Error>(value.max(0) as u32)
        };
        let capability = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let card = Card {
            capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            tma: capability >= 90 && library::describes_tensors(),
            fp8_mma: capability >= 89 && library::reads_ptx_8_4(),
        };
        if card.capability < 80 {
            let detail = format!("compute capability {}: 80 is needed", card.capability);
            return Err(Error::NoCuda { detail });
        }
        Ok(Self {
            stream,
            card,
            kernels: Arc::default(),
            captures: Captures::default(),
            turn: Turn::default(),
            uploads: Uploads::default(),
            id: next_id(),
        })
    }

    /// The stream that everything is launched on.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Whether all that was put on the stream has run. Waits for nothing, but is no call for a capture.
    #[cfg(feature = "nccl")]
    pub(crate) fn is_idle(&self) -> Result<bool> {
        self.make_current("to ask the stream")?;
        // SAFETY: the stream is open as long as `self` is.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => Err(failed("to ask the stream")(DriverError(code))),
        }
    }

    /// Keeps other threads from putting ops of several launches on the stream.
    pub(crate) fn turn(&self) -> Taken<'_> {
        self.turn.take()
    }

    /// Makes the card's context current on the calling thread, which may have another: most calls of the driver use the current context.
    pub(super) fn make_current(&self, what: &'static str) -> Result<()> {
        self.stream.context().bind_to_thread().map_err(failed(what))
    }

    pub(super) fn card(&self) -> &Card {
        &self.card
    }

    pub(super) fn describe(&self) -> String {
        let name = self.stream.context().name().unwrap_or_else(|_| "an NVIDIA card".into());
        format!("{name} (CUDA, compute capability {})", self.card.capability)
    }

    /// The kernel of a name that only one module has, loaded once.
    pub(super) fn kernel(&self, name: &str) -> Result<Function> {
        let missing = || Error::Cuda { what: "to find a kernel", detail: format!("none is called {name}") };
        self.load(ptx::named(name).ok_or_else(missing)?)
    }

    /// The kernel of an entry, loaded once.
    pub(super) fn load(&self, entry: &'static Entry) -> Result<Function> {
        self.make_current("to load a module")?;
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (entry.module, entry.name);
        if let Some(kernel) = kernels.get(&key) {
            return Ok(kernel.clone());
        }
        let text = nvrtc::Ptx::from_src(ptx::for_card(entry, &self.card));
        let loaded = self.stream.context().load_module(text);
        let module = loaded.map_err(failed("to load a module"))?;
        let function = module.load_function(entry.name).map_err(failed("to find a kernel"))?;
        let kernel = Function {
            function,
            waits: entry.waits && self.card.capability >= ptx::HOPPER,
            tensor_maps: entry.tensor_maps,
            cluster: entry.cluster,
        };
        kernels.insert(key, kernel.clone());
        Ok(kernel)
    }

    /// One block for each of `grid`. `args` is the kernel's only parameter, and all memory that it names is that of `held`.
    pub(super) fn launch<'a, A: DeviceRepr>(
        &self,
        kernel: &Function,
        grid: u32,
        threads: u32,
        shared_bytes: u32,
        args: &A,
        held: impl IntoIterator<Item = &'a Buffer>,
    ) -> Result<()> {
        self.launch_with_maps(kernel, grid, threads, shared_bytes, args, &[], held)
    }

    /// The same with tensor maps, the second parameter of the kernels that copy boxes.
    #[allow(clippy::too_many_arguments, reason = "those of a launch")]
    pub(super) fn launch_with_maps<'a, A: DeviceRepr>(
        &self,
        kernel: &Function,
        grid: u32,
        threads: u32,
        shared_bytes: u32,
        args: &A,
        maps: &[TensorMap],
        held: impl IntoIterator<Item = &'a Buffer>,
    ) -> Result<()> {
        if grid == 0 {
            return Ok(());
        }
        if maps.len() != kernel.tensor_maps as usize {
            let detail = format!("it takes {} tensor maps, not {}", kernel.tensor_maps, maps.len());
            return Err(Error::Cuda { what: "to launch a kernel", detail });
        }
        self.captures.hold(held);
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.next_multiple_of(kernel.cluster),
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut early,
            numAttrs: kernel.waits.into(),
        };
        // A kernel without tensor maps has one parameter, and the driver does not read the second pointer.
        let mut args = [std::ptr::from_ref(args).cast_mut().cast(), maps.as_ptr().cast_mut().cast()];
        self.make_current("to launch a kernel")?;
        // SAFETY: every kernel of this crate takes one struct, which `A` repeats (src/cuda/manifest_test.rs compares all fields), and its
        // callers have checked every address that it names; as many tensor maps as it takes follow. The driver copies both.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                kernel.function.cu_function(),
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(failed("to launch a kernel"))
    }
}

impl Sealed for Cuda {}

impl Device for Cuda {
    type Buffer = Buffer;
    type Recorder<'r> = ();

    fn name(&self) -> String {
        self.describe()
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer> {
        Buffer::zeroed(&self.stream, bytes)
    }

    fn upload(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        buffer.upload(&self.uploads, &self.stream, offset, bytes)
    }

    fn download(&self, buffer: &Buffer, bytes: u64) -> Result<Vec<u8>> {
        buffer.download(&self.stream, bytes)
    }

    /// What is recorded here is launched on the stream.
    fn submit(&self, record: impl FnOnce(()) -> Result<()>) -> Result<()> {
        record(())
    }

    fn note(&self, recorded: impl FnOnce() -> Box<dyn Replay>) {
        self.captures.note(recorded);
    }

    fn part(buffer: &Buffer, offset: u64, bytes: u64) -> Option<Buffer> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= buffer.bytes());
        is_inside.then(|| buffer.part(offset, bytes))
    }

    fn size(buffer: &Buffer) -> u64 {
        buffer.bytes()
    }

    fn offset(a: &Buffer, b: &Buffer) -> Option<i64> {
        a.same_as(b).then(|| b.ptr().wrapping_sub(a.ptr()) as i64)
    }
}

impl<O: Op> Compiled<O, Cuda>
where
    Cuda: Kernel<O>,
{
    /// Launches one layer on the stream. Allocates nothing, waits for nothing, and may be captured in a graph by [`Cuda::capture`], which
    /// replays with what the step holds then. A graph that is captured by other means holds addresses and nothing else: the step, the
    /// binding and the compiled op must then outlive it, and the step's [`Step::capacity`] must not grow.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], before anything is launched, and [`Error::Cuda`].
    pub fn record(&self, step: &Step<O, Cuda>, binding: &Binding<O, Cuda>) -> Result<()> {
        self.record_on(&mut (), step, binding)
    }
}

impl Function {
    /// Lets its blocks have this much dynamic shared memory. `cuda` is the device that it was loaded on.
    pub(super) fn allow_shared(&self, cuda: &Cuda, bytes: u32) -> Result<()> {
        cuda.make_current("to ask for shared memory")?;
        let what = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.function.set_attribute(what, bytes as i32).map_err(failed("to ask for shared memory"))
    }
}
