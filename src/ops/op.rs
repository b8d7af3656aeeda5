//! An operation, a device that runs it, and what a host holds of both: one set of types for every op and backend.
//!
//! ```text
//! once       mla = device.compile(spec)?                          checks the spec, selects a kernel variant, compiles
//! per step   mla.prepare(&mut step, input)?                       checks what changes with a step, and uploads it
//! once       binding = mla.bind(&args, room)?                     checks one layer's buffers: sizes, strides, aliases
//! per layer  mla.record_on(&mut recorder, &step, &binding)?       creates nothing
//! ```

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use super::replay::{Now, Replay};
use super::variants::{Candidate, Choice, only_candidate};
use crate::{Error, Result};

pub(crate) mod sealed {
    /// Keeps [`super::Device`] to this crate.
    pub trait Sealed {}
}

/// An operation: a plain struct that says what it is compiled for. All of this is pure, the same for every backend.
pub trait Op: Copy + Debug + 'static {
    /// Its name, as in labels and errors.
    const NAME: &'static str;
    /// Whether a step holds nothing that depends on the spec: ops of one type and device may then record each other's steps.
    const SHARES_STEPS: bool = false;
    /// Choices of a compilation that have a default.
    type Options: Default + Debug;
    /// Plain data that a host has to know of the compiled op, such as how a decode cuts its work.
    type Facts: Clone + Debug;
    /// What changes with a step.
    type Input<'a>;
    /// One layer's arrays, on handles `B`: `&Buffer` where a caller hands them over.
    type Args<B>;
    /// How far a step reaches, or a binding has room for: usually query tokens.
    type Extent: Copy + Default + PartialEq + Debug + Send;
    /// What a step has room for without new memory.
    type Capacity: Copy + Default + PartialEq + Debug + Send;

    /// Whether the op is served.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::DtypeUnsupported`].
    fn check(&self) -> Result<()>;

    /// The same arguments on other handles. The only traversal of an op's buffers.
    ///
    /// # Errors
    /// Those of `f`.
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

    /// Whether a step that reaches so far may be recorded with a binding of so much room.
    ///
    /// # Errors
    /// What is too much.
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
        for (i, &(b, output)) in outputs.iter().enumerate() {
            let written = inputs.iter().chain(&outputs[..i]);
            if let Some(&(a, _)) = written.clone().find(|(_, other)| is_same(other, output)) {
                return Err(Error::Aliased { a, b });
            }
        }
        Ok(())
    }

    /// What a step is prepared for as it is made; `None` where it has to be prepared.
    fn unprepared() -> Option<Self::Extent> {
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
pub trait Device: sealed::Sealed + Clone + Debug {
    /// Memory that this device's kernels read and write.
    type Buffer: Clone + Debug;
    /// What commands are recorded to: a compute pass of wgpu; nothing on CUDA, whose stream is the device's, and on the CPU.
    type Recorder<'r>;

    /// What runs here, for a person.
    fn name(&self) -> String;

    /// A number that clones have in common, and no other device has.
    fn id(&self) -> u64;

    /// Whether what the device was made on can be used together.
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
    /// Those of `record`, and [`Error::DeviceLost`].
    fn submit(&self, record: impl FnOnce(Self::Recorder<'_>) -> Result<()>) -> Result<()>;

    /// While a graph is captured, keeps what each replay has to check; elsewhere `recorded` is not called.
    #[doc(hidden)]
    fn note(&self, _recorded: impl FnOnce() -> Box<dyn Replay>) {}

    /// Bytes of the largest array that a kernel can read or write.
    fn largest_binding(&self) -> u64 {
        u64::MAX
    }

    /// Whether a buffer is of this device, where that can be told.
    ///
    /// # Errors
    /// [`Error::OtherBackend`].
    fn accepts(&self, _: &Self::Buffer) -> Result<()> {
        Ok(())
    }

    /// Bytes of a buffer.
    fn size(buffer: &Self::Buffer) -> u64;

    /// Where `b` begins, in bytes after `a`, if both are of one memory.
    fn offset(a: &Self::Buffer, b: &Self::Buffer) -> Option<i64>;

    /// Compiles an op, on the best variant that runs here.
    ///
    /// # Errors
    /// Those of [`Op::check`], and [`Error::NoVariant`], [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`],
    /// [`Error::ForeignResource`] and [`Error::Internal`].
    fn compile<O: Op>(&self, op: O) -> Result<Compiled<O, Self>>
    where
        Self: Kernel<O>,
    {
        self.compile_with(op, &O::Options::default())
    }

    /// As [`Device::compile`], with other choices than the defaults.
    ///
    /// # Errors
    /// Those of [`Device::compile`], and [`Error::VariantUnavailable`] for a forced variant that cannot run.
    fn compile_with<O: Op>(&self, op: O, options: &O::Options) -> Result<Compiled<O, Self>>
    where
        Self: Kernel<O>,
    {
        op.check()?;
        self.ready()?;
        let (kernels, facts, choice) = self.kernel_compile(&op, options)?;
        log::info!("{}: {}", O::NAME, choice.why);
        Ok(Compiled { device: self.clone(), op, facts, choice, kernels, id: next_id() })
    }

    /// Compiles, prepares, binds and runs an op once.
    ///
    /// # Errors
    /// Those of all four.
    fn once<O: Op>(&self, op: O, input: O::Input<'_>, args: &O::Args<&Self::Buffer>) -> Result<()>
    where
        Self: Kernel<O>,
    {
        self.once_with(op, &O::Options::default(), input, args)
    }

    /// As [`Device::once`], with other choices than the defaults.
    ///
    /// # Errors
    /// Those of [`Device::compile_with`] and [`Device::once`].
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

/// A device that runs an op: what a backend's author writes. [`Compiled`] has checked all that these are given.
pub trait Kernel<O: Op>: Device {
    /// What is compiled.
    type Kernels: Debug;
    /// A step's tables on the device.
    type Step: Debug;
    /// A layer's buffers, held.
    type Binding: Debug;

    /// See [`Device::variants`]. Usually there is one kernel, which runs everywhere.
    fn kernel_variants(&self, _: &O) -> Vec<Candidate> {
        only_candidate()
    }

    /// Selects and compiles a variant: see [`Device::compile_with`], whose errors it has.
    fn kernel_compile(&self, op: &O, options: &O::Options) -> Result<(Self::Kernels, O::Facts, Choice)>;

    /// See [`Compiled::step`], whose errors it has.
    fn kernel_step(&self, op: &O, kernels: &Self::Kernels, capacity: O::Capacity) -> Result<Self::Step>;

    /// What fits a step without new memory.
    fn kernel_capacity(_: &Self::Step) -> O::Capacity {
        O::Capacity::default()
    }

    /// A number for what the kernels of a step depend on beside its capacity: where it changes, those recorded before serve no more.
    fn kernel_form(_: &Self::Step) -> u64 {
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

    /// Adds the commands of one layer. Its errors are the device's: what a host does wrong was found before.
    fn kernel_record(
        &self,
        op: &O,
        kernels: &Self::Kernels,
        recorder: &mut Self::Recorder<'_>,
        step: &Self::Step,
        binding: &Self::Binding,
    ) -> Result<()>;
}

/// An op, compiled on a device by [`Device::compile`]. It makes steps and bindings, and records a step with a binding.
#[derive(Debug)]
pub struct Compiled<O: Op, D: Kernel<O>> {
    pub(crate) device: D,
    pub(crate) op: O,
    pub(crate) facts: O::Facts,
    pub(crate) choice: Choice,
    pub(crate) kernels: D::Kernels,
    pub(crate) id: u64,
}

/// What changes with a step, on the device: prepared once for all layers of a model. Made by [`Compiled::step`].
///
/// On wgpu an upload takes effect before the next submit: give each step that shares a submit a `Step` of its own. On CUDA it is in the
/// stream's order; a prepare that fits the step's capacity rewrites it in place, so that a captured graph replays with what was
/// prepared last, and one that does not fit replaces its buffers: graphs captured before must be captured again, and refuse to launch.
#[derive(Debug)]
#[must_use]
pub struct Step<O: Op, D: Kernel<O>> {
    pub(crate) raw: D::Step,
    /// `None` until it was prepared, and after a prepare that failed.
    pub(crate) used: Option<O::Extent>,
    /// For the graphs that were captured of it.
    now: Now<O>,
    owner: u64,
}

/// One layer's buffers, checked and held. Made by [`Compiled::bind`].
#[derive(Debug)]
pub struct Binding<O: Op, D: Kernel<O>> {
    pub(crate) raw: D::Binding,
    room: O::Extent,
    owner: u64,
}

/// No two things have the same.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(super) const fn mismatch(detail: &'static str) -> Error {
    Error::LayoutMismatch { detail }
}

pub(super) const UNPREPARED: &str =
    "the step was not prepared, or its last prepare failed: call `prepare` first";

impl<O: Op, D: Kernel<O>> Compiled<O, D> {
    /// What it was compiled for.
    pub fn op(&self) -> &O {
        &self.op
    }

    /// Where it runs.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// What a host has to know of it, such as a decode's [`crate::Tiling`].
    pub fn facts(&self) -> &O::Facts {
        &self.facts
    }

    /// The kernel variant that was selected.
    pub fn variant(&self) -> &'static str {
        self.choice.variant
    }

    /// Which variant was selected, and what each better one lacks here.
    pub fn why(&self) -> &str {
        &self.choice.why
    }

    /// Whether the variant rounds softmax weights to 16 bits, as tensor cores take them: results are then up to twice as far from the
    /// exact ones.
    pub fn rounds_weights(&self) -> bool {
        self.choice.rounds_weights
    }

    /// A step with room for `capacity`; the default leaves it to the first [`Compiled::prepare`].
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::DeviceLost`].
    pub fn step(&self, capacity: O::Capacity) -> Result<Step<O, D>> {
        Ok(self.step_of(self.device.kernel_step(&self.op, &self.kernels, capacity)?, O::unprepared()))
    }

    pub(crate) fn step_of(&self, raw: D::Step, used: Option<O::Extent>) -> Step<O, D> {
        let now = Now::new(used, D::kernel_capacity(&raw), D::kernel_form(&raw));
        Step { raw, used, now, owner: self.step_owner() }
    }

    /// Checks a step's input and uploads it, making new buffers only where it does not fit. After an error the step cannot be recorded
    /// until it was prepared again.
    ///
    /// # Errors
    /// Those of the op's input, see its page, [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`], and [`Error::LayoutMismatch`] for a
    /// step that another op made.
    pub fn prepare(&self, step: &mut Step<O, D>, input: O::Input<'_>) -> Result<()> {
        self.owns(step.owner, true)?;
        step.used = None;
        let prepared = self.device.kernel_prepare(&self.op, &self.kernels, &mut step.raw, input);
        step.used = prepared.as_ref().ok().copied();
        step.now.set(step.used, D::kernel_capacity(&step.raw), D::kernel_form(&step.raw));
        prepared.map(drop)
    }

    /// Checks one layer's buffers and binds them, for steps that reach no further than `room`.
    ///
    /// # Errors
    /// Those of [`Op::check_args`], [`Error::Aliased`], [`Error::OtherBackend`], [`Error::Limit`] and [`Error::OutOfMemory`]; on wgpu
    /// [`Error::BufferUsage`] without `STORAGE`, [`Error::ForeignResource`] and [`Error::DeviceLost`]; [`Error::Capacity`] of an `MlaLayer`.
    pub fn bind(&self, args: &O::Args<&D::Buffer>, room: O::Extent) -> Result<Binding<O, D>> {
        self.op.map(args, |_, buffer| self.device.accepts(buffer))?;
        self.op.check_args(args, room, D::size)?;
        self.op.check_aliases(args, room, D::offset)?;
        let raw = self.device.kernel_bind(&self.op, &self.kernels, args, room)?;
        let room = self.op.room(args, room);
        Ok(Binding { raw, room, owner: self.id })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &Step<O, D>, binding: &Binding<O, D>) -> Result<()> {
        self.owns(step.owner, true).and(self.owns(binding.owner, false))?;
        O::fits(step.used.ok_or(mismatch(UNPREPARED))?, binding.room).map_err(mismatch)
    }

    /// Records one layer. Creates nothing, allocates nothing, neither submits nor waits.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], before anything is recorded; [`Error::Cuda`] on CUDA, [`Error::OutOfMemory`] on the CPU.
    pub fn record_on(
        &self,
        recorder: &mut D::Recorder<'_>,
        step: &Step<O, D>,
        binding: &Binding<O, D>,
    ) -> Result<()> {
        self.check(step, binding)?;
        self.add(recorder, step, binding)
    }

    /// Records one layer and submits it.
    ///
    /// # Errors
    /// Those of [`Compiled::record_on`] and [`Device::submit`].
    pub fn run(&self, step: &Step<O, D>, binding: &Binding<O, D>) -> Result<()> {
        self.check(step, binding)?;
        self.device.submit(|mut recorder| self.add(&mut recorder, step, binding))
    }

    /// Records a pair that was checked.
    fn add(&self, recorder: &mut D::Recorder<'_>, step: &Step<O, D>, binding: &Binding<O, D>) -> Result<()> {
        self.device.note(|| step.recorded(binding.room));
        self.device.kernel_record(&self.op, &self.kernels, recorder, &step.raw, &binding.raw)
    }

    fn step_owner(&self) -> u64 {
        if O::SHARES_STEPS { self.device.id() } else { self.id }
    }

    fn owns(&self, owner: u64, is_step: bool) -> Result<()> {
        let own = if is_step { self.step_owner() } else { self.id };
        if owner != own {
            return Err(mismatch(
                "the step or the binding was made by another op, or by this one on another device: make both with the op that records them",
            ));
        }
        Ok(())
    }
}

impl<O: Op, D: Kernel<O>> Step<O, D> {
    /// How far the step reaches: a binding needs as much room. Nothing before it is prepared.
    pub fn used(&self) -> O::Extent {
        self.used.unwrap_or_default()
    }

    /// What a graph keeps of it as it is recorded now, with a binding of so much room.
    pub(crate) fn recorded(&self, room: O::Extent) -> Box<dyn Replay> {
        self.now.recorded(room)
    }

    /// What fits without new memory. Grids of commands that were recorded are of this size.
    pub fn capacity(&self) -> O::Capacity {
        D::kernel_capacity(&self.raw)
    }
}
