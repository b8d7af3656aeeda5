//! An operation, a device that runs it, and what a host holds of both: one set of types for every op and backend.
//!
//! ```text
//! once       mla = device.compile(spec)?                          checks the spec, selects a kernel variant, compiles
//! per step   mla.prepare(&mut step, input)?                       checks what changes with a step, and uploads it
//! once       binding = mla.bind(&args, room)?                     checks one layer's buffers: sizes, strides, aliases
//! per layer  mla.record_on(&mut recorder, &step, &binding)?       creates nothing
//! ```

mod compiled;
mod replay;
mod shared_state;

use crate::base::id::next_id;
use std::fmt::Debug;

pub use compiled::{Binding, Compiled, Step};
pub(crate) use replay::Replay;

use super::variants::{Candidate, Choice, only_candidate};
use crate::base::error::{Error, Result};
use crate::base::threads::WasmNotSendSync;
use crate::cache::{KvLayout, name_slabs};

pub(crate) mod sealed {
    /// Keeps [`super::Device`] to this crate.
    pub trait Sealed {}
}

/// An operation: a plain struct that says what it is compiled for. All of this is pure, the same for every backend. The page of an op says
/// what its [`Op::Args`], [`Op::Input`], [`Op::Extent`] (the `room` of a binding) and [`Op::Capacity`] are.
pub trait Op: Copy + Debug + Send + Sync + 'static {
    /// Its name in labels and errors.
    const NAME: &'static str;
    /// Whether a step holds nothing that depends on the spec: ops of one type and device may then record each other's steps.
    const SHARES_STEPS: bool = false;
    /// Whether [`Op::check_aliases`] also holds where arrays share buffers ([`Device::shares_buffers`]): it compares their bytes, or the op
    /// works in place.
    #[doc(hidden)]
    const CHECKS_SHARED: bool = false;
    /// Choices of a compilation, each with a default.
    type Options: Default + Debug;
    /// Plain data that a host needs from the compiled op, such as the tile sizes that a planner needs of a decode.
    type Facts: Clone + Debug + Send + Sync;
    /// What changes with a step.
    type Input<'a>;
    /// One layer's arrays, on handles `B`: `&Buffer` where a caller hands them over.
    type Args<B>;
    /// How far a step reaches, or a binding has room for: usually query tokens.
    type Extent: Copy + Default + PartialEq + Debug + Send + Sync;
    /// What a step has room for without new memory.
    type Capacity: Copy + Default + PartialEq + Debug + Send + Sync;

    /// Specs that together have every combination of dtypes, layouts and kinds of rows that kernels are made for: what tests and
    /// `examples/pipelines.rs` compile.
    fn samples() -> Vec<Self>;

    /// Whether this crate supports the op's shape and dtypes.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::DtypeUnsupported`].
    fn check(&self) -> Result<()>;

    /// The layout of the cache that it reads or writes, if it does.
    fn kv_layout(&self) -> Option<KvLayout> {
        None
    }

    /// The same arguments on other handles. The only traversal of an op's buffers.
    ///
    /// # Errors
    /// The errors of `f`.
    fn map<'a, B: 'a, C>(
        &self,
        args: &'a Self::Args<B>,
        f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<Self::Args<C>>;

    /// Checks scales, offsets, strides and sizes; `size` gives a buffer's bytes.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::ScaleWithoutCodes`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`] and
    /// [`Error::LayoutMismatch`].
    fn check_args<B>(
        &self,
        args: &Self::Args<&B>,
        room: Self::Extent,
        size: impl Fn(&B) -> u64 + Copy,
    ) -> Result<()>;

    /// The room of a binding, where its arguments say more than the caller did.
    fn room<B>(&self, _: &Self::Args<B>, room: Self::Extent) -> Self::Extent {
        room
    }

    /// The arguments of each slab of a cache that is in several, for an op that runs once a slab; empty where it runs once.
    fn each_slab<B: Copy>(&self, _: &Self::Args<B>) -> Vec<Self::Args<B>> {
        Vec::new()
    }

    /// Whether a step that reaches so far may be recorded with a binding of so much room.
    ///
    /// # Errors
    /// A sentence that says what exceeds the room.
    fn fits(used: Self::Extent, room: Self::Extent) -> Result<(), &'static str>;

    /// No buffer is both read and written, and none written twice. `offset` says where the second buffer begins, in bytes after the
    /// first, if both are of one memory.
    ///
    /// # Errors
    /// [`Error::Aliased`].
    fn check_aliases<B>(
        &self,
        args: &Self::Args<&B>,
        room: Self::Extent,
        offset: impl Fn(&B, &B) -> Option<i64> + Copy,
    ) -> Result<()> {
        let _ = room;
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        self.map(args, |how, buffer| {
            match how {
                Use::Read(name) => inputs.push((name, *buffer)),
                Use::Write(name) => outputs.push((name, *buffer)),
                Use::Unread(_) => {}
            }
            Ok(())
        })?;
        let is_same = |a: &B, b: &B| offset(a, b).is_some();
        name_slabs(&mut inputs);
        name_slabs(&mut outputs);
        // No two slabs may be the same buffer, not even where both are only read: each holds other pages of the pool.
        let slabs: Vec<_> = inputs.iter().filter(|(name, _)| name.starts_with("slab ")).collect();
        for (i, &&(b, slab)) in slabs.iter().enumerate() {
            if let Some(&&(a, _)) = slabs[..i].iter().find(|(_, other)| is_same(other, slab)) {
                return Err(Error::Aliased { a, b });
            }
        }
        for (i, &(b, output)) in outputs.iter().enumerate() {
            let written = inputs.iter().chain(&outputs[..i]);
            if let Some(&(a, _)) = written.clone().find(|(_, other)| is_same(other, output)) {
                return Err(Error::Aliased { a, b });
            }
        }
        Ok(())
    }

    /// How far a new step reaches before its first `prepare`; `None` if it must be prepared before it is recorded.
    fn initial_extent() -> Option<Self::Extent> {
        None
    }
}

/// How an op uses a buffer, by the argument's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Read only.
    Read(&'static str),
    /// Written, and perhaps read.
    Write(&'static str),
    /// Neither, with this spec.
    Unread(&'static str),
}

/// A backend's device: its memory, and where its commands go. A clone is another handle on it. Sealed; implemented by `Gpu`, `Cuda`,
/// `Cpu` and `AnyBackend`. Beside the errors that are listed, any call may be [`Error::Cuda`] on CUDA, where the driver fails it, and
/// [`Error::OtherBackend`] on `AnyBackend`, for what another backend made.
///
/// A device, its buffers and what is compiled on it are `Send + Sync`, for generic code too; not on `wasm32`. See [the crate's
/// page](crate#threads).
pub trait Device: sealed::Sealed + Clone + Debug + WasmNotSendSync {
    /// Memory that this device's kernels read and write.
    type Buffer: Clone + Debug + WasmNotSendSync;
    /// What commands are recorded to: a compute pass of wgpu; nothing on CUDA, whose stream is the device's, and on the CPU.
    type Recorder<'r>;

    /// The name of the device, to show to a person.
    fn name(&self) -> String;

    /// A number that all clones of a device share and no other device has.
    fn id(&self) -> u64;

    /// Whether the adapter, device and queue that this was made on belong together.
    ///
    /// # Errors
    /// [`Error::ForeignResource`].
    fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Zeroed memory of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`] and [`Error::DeviceLost`].
    fn buffer(&self, bytes: u64) -> Result<Self::Buffer>;

    /// Copies host bytes into a buffer, from byte `offset` on. `offset` and the length are multiples of 4.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`] and [`Error::Alignment`]; on wgpu [`Error::BufferUsage`] without `COPY_DST`, [`Error::ForeignResource`]
    /// and [`Error::DeviceLost`].
    fn upload(&self, buffer: &Self::Buffer, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Waits for what was submitted and copies a buffer to the host, from its front. `bytes` is a multiple of 4.
    ///
    /// # Errors
    /// [`Error::BufferTooSmall`], [`Error::Alignment`] and [`Error::OutOfMemory`]; on wgpu [`Error::BufferUsage`] without `COPY_SRC`,
    /// [`Error::ForeignResource`], [`Error::DeviceLost`], and in a browser [`Error::Waits`].
    fn download(&self, buffer: &Self::Buffer, bytes: u64) -> Result<Vec<u8>>;

    /// Records, and submits what was recorded.
    ///
    /// # Errors
    /// The errors of `record`, and [`Error::DeviceLost`]; on wgpu [`Error::ForeignResource`] where a buffer was destroyed or mapped after
    /// it was bound (in a browser `gpu::checked` tells), and [`Error::OutOfMemory`].
    fn submit(&self, record: impl FnOnce(Self::Recorder<'_>) -> Result<()>) -> Result<()>;

    /// While a graph is captured, keeps what each replay has to check; elsewhere `recorded` is not called.
    #[doc(hidden)]
    fn note(&self, _recorded: impl FnOnce() -> Box<dyn Replay>) {}

    /// Whether it hands bindings on to the [`Compiled`] of another device, which checks arguments and binds an op of a cache in several
    /// slabs once a slab.
    #[doc(hidden)]
    fn forwards(&self) -> bool {
        false
    }

    /// Whether arrays that are read and arrays that are written may be parts of one buffer, so that its bindings refuse what overlaps.
    #[doc(hidden)]
    fn shares_buffers(&self) -> bool {
        false
    }

    /// Bytes of the largest array that a kernel can read or write.
    fn largest_binding(&self) -> u64 {
        u64::MAX
    }

    /// A part of a buffer as a buffer of its own, where the device has such and it is inside.
    #[doc(hidden)]
    fn part(_: &Self::Buffer, _offset: u64, _bytes: u64) -> Option<Self::Buffer> {
        None
    }

    /// Bytes of a buffer.
    fn size(buffer: &Self::Buffer) -> u64;

    /// Where `b` begins, in bytes after `a`, if both are of one memory.
    fn offset(a: &Self::Buffer, b: &Self::Buffer) -> Option<i64>;

    /// Compiles an op, on the best variant that runs here.
    ///
    /// # Errors
    /// The errors of [`Op::check`], and [`Error::NoVariant`], [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`],
    /// [`Error::ForeignResource`] and [`Error::Internal`].
    fn compile<O: Op>(&self, op: O) -> Result<Compiled<O, Self>>
    where
        Self: Kernel<O>,
    {
        self.compile_with(op, &O::Options::default())
    }

    /// Like [`Device::compile`], with other choices than the defaults.
    ///
    /// # Errors
    /// The errors of [`Device::compile`], and [`Error::VariantUnavailable`] for a forced variant that cannot run.
    fn compile_with<O: Op>(&self, op: O, options: &O::Options) -> Result<Compiled<O, Self>>
    where
        Self: Kernel<O>,
    {
        op.check()?;
        self.ready()?;
        check_layout::<O, Self>(&op)?;
        let (kernels, facts, choice) = self.kernel_compile(&op, options)?;
        log::info!("{}: {}", O::NAME, choice.why);
        Ok(Compiled { device: self.clone(), op, facts, choice, kernels, id: next_id() })
    }

    /// Compiles, prepares, binds and runs an op once.
    ///
    /// # Errors
    /// The errors of all four.
    fn once<O: Op>(&self, op: O, input: O::Input<'_>, args: &O::Args<&Self::Buffer>) -> Result<()>
    where
        Self: Kernel<O>,
    {
        self.once_with(op, &O::Options::default(), input, args)
    }

    /// Like [`Device::once`], with other choices than the defaults.
    ///
    /// # Errors
    /// The errors of [`Device::compile_with`] and [`Device::once`].
    fn once_with<O: Op>(
        &self,
        op: O,
        options: &O::Options,
        input: O::Input<'_>,
        args: &O::Args<&Self::Buffer>,
    ) -> Result<()>
    where
        Self: Kernel<O>,
    {
        let op = self.compile_with(op, options)?;
        let mut step = op.step(O::Capacity::default())?;
        op.prepare(&mut step, input)?;
        op.run(&step, &op.bind(args, step.used())?)
    }

    /// Every kernel variant of an op, in the order in which they are tried, and what keeps each from running here.
    fn variants<O: Op>(&self, op: &O) -> Vec<Candidate>
    where
        Self: Kernel<O>,
    {
        self.kernel_variants(op)
    }
}

/// A device's implementation of an op, which the author of a backend writes. [`Compiled`] has checked every argument of these functions.
pub trait Kernel<O: Op>: Device {
    /// What is compiled.
    type Kernels: Debug + WasmNotSendSync;
    /// A step's tables on the device.
    type Step: Debug + WasmNotSendSync;
    /// A layer's buffers, which it keeps alive.
    type Binding: Debug + WasmNotSendSync;

    /// Whether its kernels serve records too, as [`KvLayout::Ds656`](crate::KvLayout::Ds656): tokens that are not elements of one dtype.
    const SERVES_RECORDS: bool = false;

    /// See [`Device::variants`]. Usually there is one kernel, which runs everywhere.
    fn kernel_variants(&self, _: &O) -> Vec<Candidate> {
        only_candidate()
    }

    /// Selects and compiles a variant: see [`Device::compile_with`], whose errors it has.
    fn kernel_compile(&self, op: &O, options: &O::Options) -> Result<(Self::Kernels, O::Facts, Choice)>;

    /// See [`Compiled::step`], whose errors it has.
    fn kernel_step(&self, op: &O, kernels: &Self::Kernels, capacity: O::Capacity) -> Result<Self::Step>;

    /// The largest input that the step's memory holds.
    fn kernel_capacity(_: &Self::Step) -> O::Capacity {
        O::Capacity::default()
    }

    /// A number for what recorded commands depend on besides the step's capacity, such as the addresses of its tables. When it changes,
    /// commands that were recorded or captured before must be recorded again.
    fn recording_key(_: &Self::Step) -> u64 {
        0
    }

    /// Checks and uploads a step's input: see [`Compiled::prepare`], whose errors it has.
    fn kernel_prepare(
        &self,
        op: &O,
        kernels: &Self::Kernels,
        step: &mut Self::Step,
        input: O::Input<'_>,
    ) -> Result<O::Extent>;

    /// Binds checked arguments: see [`Compiled::bind`], whose errors it has.
    fn kernel_bind(
        &self,
        op: &O,
        kernels: &Self::Kernels,
        args: &O::Args<&Self::Buffer>,
        room: O::Extent,
    ) -> Result<Self::Binding>;

    /// Adds the commands of one layer. Only the device itself can fail here: wrong use was refused before.
    fn kernel_record(
        &self,
        op: &O,
        kernels: &Self::Kernels,
        recorder: &mut Self::Recorder<'_>,
        step: &Self::Step,
        binding: &Self::Binding,
    ) -> Result<()>;
}

fn check_layout<O: Op, D: Kernel<O>>(op: &O) -> Result<()> {
    match op.kv_layout() {
        Some(layout) if !layout.is_plain() && !D::SERVES_RECORDS => {
            let cure = "use KvLayout::Plain here, or the CPU backend, which serves it";
            Err(Error::LayoutUnsupported { op: O::NAME, layout: layout.name(), cure })
        }
        _ => Ok(()),
    }
}
