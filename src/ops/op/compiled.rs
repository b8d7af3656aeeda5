//! An op that was compiled on a device, its steps and its bindings.

use super::replay::Replay;
use super::shared_state::{SharedState, UNPREPARED, mismatch};
use super::{Kernel, Op};
#[cfg(doc)]
use crate::base::error::Error;
use crate::base::error::Result;
use crate::ops::variants::Choice;

/// An op, compiled on a device by [`Device::compile`](super::Device::compile). It makes steps and bindings, and records a step with a
/// binding.
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
/// On wgpu what was recorded keeps the tables that it was recorded with: several steps, or one that is prepared again and again, may share
/// a submit. (Only a step of [`DecodeOptions::device_page_list`](crate::DecodeOptions::device_page_list) is rewritten in place, before the
/// next submit.) On CUDA an upload is in the stream's order; a prepare that fits the step's capacity rewrites it in place, so that a
/// captured graph replays with what was prepared last, and one that does not fit replaces its buffers: graphs captured before must be
/// captured again, and refuse to launch.
#[derive(Debug)]
#[must_use]
pub struct Step<O: Op, D: Kernel<O>> {
    pub(crate) raw: D::Step,
    /// `None` until it was prepared, and after a prepare that failed.
    pub(crate) used: Option<O::Extent>,
    /// What graphs that were captured of the step compare at each replay.
    now: SharedState<O>,
    owner: u64,
}

/// One layer's buffers, checked and held. Made by [`Compiled::bind`].
#[derive(Debug)]
pub struct Binding<O: Op, D: Kernel<O>> {
    /// The binding, or for an op that runs once a slab of the cache that of the first slab.
    pub(crate) raw: D::Binding,
    /// The bindings of the other slabs.
    more: Vec<D::Binding>,
    room: O::Extent,
    owner: u64,
}

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

    /// Whether its kernels multiply on tensor cores.
    pub fn tensor_cores(&self) -> bool {
        self.choice.tensor_cores
    }

    /// A step with room for `capacity`, whose type is on the op's page; the default leaves it to the first [`Compiled::prepare`].
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::DeviceLost`].
    pub fn step(&self, capacity: O::Capacity) -> Result<Step<O, D>> {
        Ok(self.step_of(self.device.kernel_step(&self.op, &self.kernels, capacity)?, O::initial_extent()))
    }

    pub(crate) fn step_of(&self, raw: D::Step, used: Option<O::Extent>) -> Step<O, D> {
        let now = SharedState::new(used, D::kernel_capacity(&raw), D::recording_key(&raw));
        Step { raw, used, now, owner: self.step_owner() }
    }

    /// Checks a step's input and uploads it, making new buffers only where it does not fit. After an error the step cannot be recorded
    /// until it was prepared again.
    ///
    /// # Errors
    /// The errors of the op's input, see its page, [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`], and
    /// [`Error::LayoutMismatch`] for a step that another op made.
    pub fn prepare(&self, step: &mut Step<O, D>, input: O::Input<'_>) -> Result<()> {
        self.owns(step.owner, true)?;
        step.used = None;
        let prepared = self.device.kernel_prepare(&self.op, &self.kernels, &mut step.raw, input);
        step.used = prepared.as_ref().ok().copied();
        step.now.set(step.used, D::kernel_capacity(&step.raw), D::recording_key(&step.raw));
        prepared.map(drop)
    }

    /// Checks one layer's buffers and binds them, for steps that reach no further than `room`: for most ops a number of query tokens, see
    /// the op's page.
    ///
    /// # Errors
    /// The errors of [`Op::check_args`], [`Error::Aliased`], [`Error::OtherBackend`], [`Error::Limit`] and [`Error::OutOfMemory`]; on wgpu
    /// [`Error::BufferUsage`] without `STORAGE`, [`Error::ForeignResource`] and [`Error::DeviceLost`]; [`Error::Capacity`] of an
    /// `MlaLayer`.
    pub fn bind(&self, args: &O::Args<&D::Buffer>, room: O::Extent) -> Result<Binding<O, D>> {
        let mut slabs = Vec::new();
        if !self.device.forwards() {
            self.op.check_args(args, room, D::size)?;
            if O::CHECKS_SHARED || !self.device.shares_buffers() {
                self.op.check_aliases(args, room, D::offset)?;
            }
            slabs = self.op.each_slab(args);
        }
        let bind = |args| self.device.kernel_bind(&self.op, &self.kernels, args, room);
        let raw = bind(slabs.first().unwrap_or(args))?;
        let more = slabs.iter().skip(1).map(bind).collect::<Result<_>>()?;
        let room = self.op.room(args, room);
        Ok(Binding { raw, more, room, owner: self.id })
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
    /// The errors of [`Compiled::record_on`] and [`Device::submit`](super::Device::submit).
    pub fn run(&self, step: &Step<O, D>, binding: &Binding<O, D>) -> Result<()> {
        self.check(step, binding)?;
        self.device.submit(|mut recorder| self.add(&mut recorder, step, binding))
    }

    /// Records a pair that passed [`Compiled::check`].
    pub(crate) fn add(
        &self,
        recorder: &mut D::Recorder<'_>,
        step: &Step<O, D>,
        binding: &Binding<O, D>,
    ) -> Result<()> {
        self.device.note(|| step.recorded(binding.room));
        std::iter::once(&binding.raw)
            .chain(&binding.more)
            .try_for_each(|raw| self.device.kernel_record(&self.op, &self.kernels, recorder, &step.raw, raw))
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
