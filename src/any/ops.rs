//! Every op on [`AnyBackend`], in one generic impl.

#[cfg(not(all(feature = "cuda", feature = "wgpu")))]
use super::absent::Absent;
use super::parts::{Buffer, Part};
use super::{AnyBackend, Chosen};
use crate::base::error::{Error, Result};
use crate::cpu::Cpu;
use crate::ops::op::sealed::Sealed;
use crate::ops::op::{Binding, Compiled, Device, Kernel, Op, Step};
use crate::ops::variants::{Candidate, Choice};

#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
#[cfg(not(feature = "cuda"))]
type Cuda = Absent;
#[cfg(feature = "wgpu")]
use crate::gpu::Gpu;
#[cfg(not(feature = "wgpu"))]
type Gpu = Absent;

/// A value of the chosen backend, such as a compiled op, a step or a binding.
#[derive(Debug)]
// A program has few of them: their size matters less than a box's indirection.
#[allow(clippy::large_enum_variant)]
pub enum OneOf<C, W, P> {
    /// The value of the CUDA backend.
    Cuda(C),
    /// The value of the wgpu backend.
    Wgpu(W),
    /// The value of the CPU backend.
    Cpu(P),
}

/// The same expression for each backend.
macro_rules! on {
    ($any:expr, $backend:ident => $result:expr) => {
        match &$any.chosen {
            #[cfg(feature = "cuda")]
            Chosen::Cuda($backend) => $result,
            #[cfg(feature = "wgpu")]
            Chosen::Wgpu($backend) => $result,
            Chosen::Cpu($backend) => $result,
        }
    };
}

/// This backend's buffer in `any`.
fn own<'a, B: Part<Buffer>>(_: &B, any: &'a Buffer) -> Result<&'a B::Own> {
    B::own(any)
}

impl Sealed for AnyBackend {}

impl Device for AnyBackend {
    type Buffer = Buffer;
    type Recorder<'r> =
        OneOf<<Cuda as Device>::Recorder<'r>, <Gpu as Device>::Recorder<'r>, <Cpu as Device>::Recorder<'r>>;

    fn name(&self) -> String {
        on!(self, b => b.name())
    }

    fn id(&self) -> u64 {
        on!(self, b => b.id())
    }

    fn buffer(&self, bytes: u64) -> Result<Buffer> {
        on!(self, b => b.buffer(bytes).map(Buffer::from))
    }

    fn upload(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        on!(self, b => b.upload(own(b, buffer)?, offset, bytes))
    }

    fn download(&self, buffer: &Buffer, bytes: u64) -> Result<Vec<u8>> {
        on!(self, b => b.download(own(b, buffer)?, bytes))
    }

    fn submit(&self, record: impl FnOnce(Self::Recorder<'_>) -> Result<()>) -> Result<()> {
        match &self.chosen {
            #[cfg(feature = "cuda")]
            Chosen::Cuda(b) => b.submit(|recorder| record(OneOf::Cuda(recorder))),
            #[cfg(feature = "wgpu")]
            Chosen::Wgpu(b) => b.submit(|recorder| record(OneOf::Wgpu(recorder))),
            Chosen::Cpu(b) => b.submit(|recorder| record(OneOf::Cpu(recorder))),
        }
    }

    fn forwards(&self) -> bool {
        true
    }

    fn largest_binding(&self) -> u64 {
        on!(self, b => b.largest_binding())
    }

    fn size(buffer: &Buffer) -> u64 {
        match buffer {
            #[cfg(feature = "cuda")]
            Buffer::Cuda(buffer) => Cuda::size(buffer),
            #[cfg(feature = "wgpu")]
            Buffer::Wgpu(buffer) => Gpu::size(buffer),
            Buffer::Cpu(buffer) => Cpu::size(buffer),
        }
    }

    fn offset(a: &Buffer, b: &Buffer) -> Option<i64> {
        match (a, b) {
            #[cfg(feature = "cuda")]
            (Buffer::Cuda(a), Buffer::Cuda(b)) => Cuda::offset(a, b),
            #[cfg(feature = "wgpu")]
            (Buffer::Wgpu(a), Buffer::Wgpu(b)) => Gpu::offset(a, b),
            (Buffer::Cpu(a), Buffer::Cpu(b)) => Cpu::offset(a, b),
            #[allow(unreachable_patterns)] // With one backend.
            _ => None,
        }
    }
}

impl<O: Op> Kernel<O> for AnyBackend
where
    Cuda: Kernel<O>,
    Gpu: Kernel<O>,
    Cpu: Kernel<O>,
{
    /// The backend that is chosen refuses what it does not serve.
    const SERVES_RECORDS: bool = true;
    type Kernels = OneOf<Compiled<O, Cuda>, Compiled<O, Gpu>, Compiled<O, Cpu>>;
    type Step = OneOf<Step<O, Cuda>, Step<O, Gpu>, Step<O, Cpu>>;
    type Binding = OneOf<Binding<O, Cuda>, Binding<O, Gpu>, Binding<O, Cpu>>;

    fn kernel_variants(&self, op: &O) -> Vec<Candidate> {
        on!(self, b => b.kernel_variants(op))
    }

    fn kernel_compile(&self, op: &O, options: &O::Options) -> Result<(Self::Kernels, O::Facts, Choice)> {
        match &self.chosen {
            #[cfg(feature = "cuda")]
            Chosen::Cuda(b) => with_facts(b.compile_with(*op, options)?, OneOf::Cuda),
            #[cfg(feature = "wgpu")]
            Chosen::Wgpu(b) => with_facts(b.compile_with(*op, options)?, OneOf::Wgpu),
            Chosen::Cpu(b) => with_facts(b.compile_with(*op, options)?, OneOf::Cpu),
        }
    }

    fn kernel_step(&self, _: &O, kernels: &Self::Kernels, capacity: O::Capacity) -> Result<Self::Step> {
        Ok(match kernels {
            OneOf::Cuda(op) => OneOf::Cuda(op.step(capacity)?),
            OneOf::Wgpu(op) => OneOf::Wgpu(op.step(capacity)?),
            OneOf::Cpu(op) => OneOf::Cpu(op.step(capacity)?),
        })
    }

    fn kernel_capacity(step: &Self::Step) -> O::Capacity {
        match step {
            OneOf::Cuda(step) => step.capacity(),
            OneOf::Wgpu(step) => step.capacity(),
            OneOf::Cpu(step) => step.capacity(),
        }
    }

    fn kernel_prepare(
        &self,
        _: &O,
        kernels: &Self::Kernels,
        step: &mut Self::Step,
        input: O::Input<'_>,
    ) -> Result<O::Extent> {
        match (kernels, step) {
            (OneOf::Cuda(op), OneOf::Cuda(step)) => op.prepare(step, input).map(|()| step.used()),
            (OneOf::Wgpu(op), OneOf::Wgpu(step)) => op.prepare(step, input).map(|()| step.used()),
            (OneOf::Cpu(op), OneOf::Cpu(step)) => op.prepare(step, input).map(|()| step.used()),
            _ => Err(MIXED),
        }
    }

    fn kernel_bind(
        &self,
        op: &O,
        kernels: &Self::Kernels,
        args: &O::Args<&Buffer>,
        room: O::Extent,
    ) -> Result<Self::Binding> {
        Ok(match kernels {
            #[cfg(feature = "cuda")]
            OneOf::Cuda(own_op) => OneOf::Cuda(own_op.bind(&op.map(args, |_, any| Cuda::own(*any))?, room)?),
            #[cfg(feature = "wgpu")]
            OneOf::Wgpu(own_op) => OneOf::Wgpu(own_op.bind(&op.map(args, |_, any| Gpu::own(*any))?, room)?),
            OneOf::Cpu(own_op) => OneOf::Cpu(own_op.bind(&op.map(args, |_, any| Cpu::own(*any))?, room)?),
            #[allow(unreachable_patterns)] // With every backend.
            _ => return Err(MIXED),
        })
    }

    fn kernel_record(
        &self,
        _: &O,
        kernels: &Self::Kernels,
        recorder: &mut Self::Recorder<'_>,
        step: &Self::Step,
        binding: &Self::Binding,
    ) -> Result<()> {
        match (kernels, recorder, step, binding) {
            (OneOf::Cuda(op), OneOf::Cuda(recorder), OneOf::Cuda(step), OneOf::Cuda(binding)) => {
                op.record_on(recorder, step, binding)
            }
            (OneOf::Wgpu(op), OneOf::Wgpu(recorder), OneOf::Wgpu(step), OneOf::Wgpu(binding)) => {
                op.record_on(recorder, step, binding)
            }
            (OneOf::Cpu(op), OneOf::Cpu(recorder), OneOf::Cpu(step), OneOf::Cpu(binding)) => {
                op.record_on(recorder, step, binding)
            }
            _ => Err(MIXED),
        }
    }
}

const MIXED: Error = Error::LayoutMismatch {
    detail: "they are of different backends; make the op, the step, the binding and the recorder with one device",
};

fn with_facts<O: Op, D: Kernel<O>, T>(
    op: Compiled<O, D>,
    one: impl FnOnce(Compiled<O, D>) -> T,
) -> Result<(T, O::Facts, Choice)> {
    let (facts, choice) = (op.facts().clone(), op.choice.clone());
    Ok((one(op), facts, choice))
}
