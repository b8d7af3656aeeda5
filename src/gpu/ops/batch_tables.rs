//! `batch_tables`: the slots of new tokens and the tables of a decode, from a batch that only the device knows.

use std::sync::Arc;

use super::single::uniform;
use super::table::Table;
use crate::base::error::{Error, Result};
use crate::cache::KvSpec;
use crate::cache::decode_spec::MlaDecode;
use crate::gpu::Gpu;
use crate::gpu::buffer::Window;
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::{Access, Layout, Pipeline, dispatch, group, group_with_params, layout};
use crate::ops::{
    AppendsSlots, Compiled, Device, DeviceBatch, Kernel, Sequences, Step, check_binding, no_slots, template,
};
use crate::plan::Plan;
use crate::plan::shares::{Pattern, Shares};
use crate::plan::tables::PageTable;

/// Makes tables on the device from `seq_lens`, `query_start_loc` and `block_table` that the host never reads back: batches may be
/// padded to a fixed size, and a step is planned once for the longest that its sequences may become.
///
/// ```text
/// once      tables = BatchTables::new(&gpu, kv), batch = tables.bind(&DeviceBatch { .. })
///           slots = tables.slots(&append, max_tokens)
///           tables.prepare(&mut lists, &mla, &mut step, &plan)     a plan of upper bounds
/// a step    tables.record_slots(pass, &slots, &batch), append.record_on(pass, slots.step(), ..) for each layer
///           tables.record_lists(pass, &lists, &step, &batch), mla.record_on(pass, &step, ..) for each layer
/// ```
#[derive(Debug)]
pub struct BatchTables {
    gpu: Gpu,
    kv: KvSpec,
    /// Which blocks of tokens this rank holds; empty where it holds whole sequences.
    share: Arc<Pattern>,
    /// Its marks, at least a word.
    marks: wgpu::Buffer,
    slots: Pipeline,
    lists: Pipeline,
    slots_layout: Layout,
    batch_layout: Layout,
    plan_layout: Layout,
    step_layout: Layout,
}

/// A batch's arrays, checked and bound.
#[derive(Debug)]
pub struct BatchBinding {
    group: wgpu::BindGroup,
    kv: KvSpec,
    batch: u32,
    share: Arc<Pattern>,
    device: u64,
}

/// Slots that the device writes, and an append of new tokens, [`crate::KvAppend`] or [`crate::RopeAppend`], reads.
#[derive(Debug)]
pub struct DeviceSlots<O: AppendsSlots>
where
    Gpu: Kernel<O>,
{
    step: Step<O, Gpu>,
    group: wgpu::BindGroup,
    max_tokens: u32,
    kv: KvSpec,
    device: u64,
}

/// The template from which the device makes a step's tables for each batch: the plan for upper bounds of the lengths.
#[derive(Debug, Default)]
pub struct DecodeLists {
    plan: Table,
    batch: u32,
    /// The device of the tables that prepared it.
    device: u64,
    /// Which `prepare` of which step it belongs to.
    prepared: Option<(u64, StepTables)>,
}

#[derive(Debug)]
struct StepTables {
    group: wgpu::BindGroup,
    tables: wgpu::Buffer,
    pages: wgpu::Buffer,
}

uniform! {
    "BatchParams":
    struct Params {
        batch: u32,
        max_pages: u32,
        interleave: u32,
        owned: u32,
        blocks: u32,
        reserved_0: u32,
        reserved_1: u32,
        reserved_2: u32,
    }
}

impl<O: AppendsSlots> DeviceSlots<O>
where
    Gpu: Kernel<O, Step = Table>,
{
    /// What [`Compiled::record_on`] takes: of `max_tokens` tokens, those without a slot skipped.
    pub fn step(&self) -> &Step<O, Gpu> {
        &self.step
    }
}

impl BatchTables {
    /// Compiles for a cache; its dtype does not matter.
    ///
    /// # Errors
    /// The errors of [`KvSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(gpu: &Gpu, kv: KvSpec) -> Result<Self> {
        Self::of_share(gpu, kv, Pattern::default())
    }

    /// Like [`BatchTables::new`], for a rank that holds its share of the tokens. A batch's `seq_lens` are those of the whole sequences,
    /// its `block_table` and the plan's bounds the rank's own: lengths, bounds and slots are made for its own tokens, and
    /// tokens of other ranks are skipped.
    ///
    /// # Errors
    /// The errors of [`BatchTables::new`], and [`Error::Shape`] for a rank that there is not.
    pub fn sharded(gpu: &Gpu, kv: KvSpec, shares: &Shares, rank: u32) -> Result<Self> {
        Self::of_share(gpu, kv, shares.pattern(rank)?)
    }

    fn of_share(gpu: &Gpu, kv: KvSpec, share: Pattern) -> Result<Self> {
        kv.check()?;
        let share = Arc::new(share);
        let marks = gpu.buffer(share.marks.len().max(1) as u64 * 4)?;
        gpu.upload(&marks, 0, bytemuck::cast_slice(&share.marks))?;
        let slots_layout = layout(gpu, "mla.batch_slots.step", &[Access::Write])?;
        let batch = [Access::Uniform, Access::Read, Access::Read, Access::Read, Access::Read];
        let batch_layout = layout(gpu, "mla.batch", &batch)?;
        let plan_layout = layout(gpu, "mla.batch_lists.plan", &[Access::Read])?;
        let step_layout = layout(gpu, "mla.batch_lists.step", &[Access::Write, Access::Write])?;
        // bounds: batch_tables
        let slots = gpu.pipeline(&source("batch_slots", &kv), &[&slots_layout, &batch_layout])?;
        let groups = [&plan_layout, &batch_layout, &step_layout];
        let lists = gpu.pipeline(&source("batch_lists", &kv), &groups)?;
        Ok(Self {
            gpu: gpu.clone(),
            kv,
            share,
            marks,
            slots,
            lists,
            slots_layout,
            batch_layout,
            plan_layout,
            step_layout,
        })
    }

    /// Checks and binds a batch's arrays. They are read when the commands run.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer without `STORAGE`, [`Error::Limit`],
    /// [`Error::OutOfMemory`].
    pub fn bind(&self, batch: &DeviceBatch<&wgpu::Buffer>) -> Result<BatchBinding> {
        batch.check(wgpu::Buffer::size)?;
        let mut windows = Vec::new();
        for ((what, buffer), words) in batch.arrays().into_iter().zip(batch.words()) {
            windows.push(Window::new(&self.gpu, what, buffer, 0..words * 4)?);
        }
        windows.push(Window::new(&self.gpu, "marks of the shares", &self.marks, 0..self.marks.size())?);
        let params = Params {
            batch: batch.batch,
            max_pages: batch.max_pages,
            interleave: self.share.interleave,
            owned: self.share.owned,
            blocks: self.share.marks.len() as u32,
            ..Params::default()
        };
        let resources = windows.iter().map(Window::resource);
        let group = group_with_params(&self.gpu, "mla.batch", &self.batch_layout, &params, resources)?;
        let (share, device) = (self.share.clone(), self.gpu.id());
        Ok(BatchBinding { group, kv: self.kv, batch: batch.batch, share, device })
    }

    /// Slots for up to `max_tokens` new tokens, for an append of the same cache. All are skipped until
    /// [`BatchTables::record_slots`] has run.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] for an append of another pool, [`Error::Limit`] for more than 2^26 tokens, [`Error::OutOfMemory`].
    pub fn slots<O: AppendsSlots>(&self, append: &Compiled<O, Gpu>, max_tokens: u32) -> Result<DeviceSlots<O>>
    where
        Gpu: Kernel<O, Step = Table>,
    {
        if !self.serves(append.op().cache()) || append.device().id() != self.gpu.id() {
            return Err(Error::LayoutMismatch { detail: "the append is of another pool of pages or device" });
        }
        self.gpu.grid(max_tokens.into())?;
        // All without a slot, until the device has written them.
        let none = no_slots(max_tokens)?;
        let mut step = append.step(0)?;
        append.prepare(&mut step, O::of_slots(&none))?;
        let detail = "an append's step has a table once it was prepared";
        let table = step.raw.buffer().ok_or(Error::LayoutMismatch { detail })?;
        let group = group(&self.gpu, "mla.batch_tables", &self.slots_layout, [table.as_entire_binding()])?;
        Ok(DeviceSlots { step, group, max_tokens, kv: self.kv, device: self.gpu.id() })
    }

    /// Prepares a decode's step with a plan for the longest that each sequence may be, [`PageTable::Device`], and keeps what
    /// [`BatchTables::record_lists`] needs of the plan.
    ///
    /// The plan has the batch's sequences, those of padding included, with `seq_lens` that no batch passes, and
    /// [`crate::Mask::Full`] (or one query token a sequence): the device finds what each query token sees, causal and
    /// bottom-right. A sequence's query tokens begin where the plan has them; those that the batch has not, by `query_start_loc`, see
    /// nothing: out is 0 and LSE -inf. Sequences longer than planned are cut off.
    ///
    /// The upload takes effect before the next submit. A `prepare` that does not fit the step's capacity replaces buffers: commands
    /// are then recorded again.
    ///
    /// # Errors
    /// The errors of [`Compiled::prepare`]; [`Error::LayoutMismatch`] for a decode of another pool or one without
    /// [`crate::DecodeOptions::device_page_list`]; [`Error::Shape`] for a plan with shared prefixes or with other bounds.
    pub fn prepare(
        &self,
        lists: &mut DecodeLists,
        mla: &Compiled<MlaDecode, Gpu>,
        step: &mut Step<MlaDecode, Gpu>,
        plan: &Plan,
    ) -> Result<()> {
        if !self.serves(&mla.op().kv) || mla.device().id() != self.gpu.id() {
            return Err(Error::LayoutMismatch { detail: "the decode is of another pool of pages or device" });
        }
        let sequences = Sequences::of(plan, mla.op().shape.num_heads)?;
        self.gpu.grid(items(&step.capacity().grown_to(crate::plan::tables::Capacity::of(plan))))?;
        mla.prepare(step, (plan, PageTable::Device))?;
        let generation = step.raw.own.written_by_device();
        let (tables, pages) = step.raw.own.buffers();
        let same = |old: &(u64, StepTables)| old.1.tables == *tables && old.1.pages == *pages;
        let bound = match lists.prepared.take().filter(same) {
            Some((_, bound)) => bound,
            None => {
                // Commands recorded for other buffers keep the template that was made for their capacity.
                lists.plan = Table::default();
                let resources = [tables.as_entire_binding(), pages.as_entire_binding()];
                let group = group(&self.gpu, "mla.batch_tables", &self.step_layout, resources)?;
                StepTables { group, tables: tables.clone(), pages: pages.clone() }
            }
        };
        let words = template(plan, &sequences, &step.capacity(), &self.kv);
        lists.plan.upload(&self.gpu, &self.plan_layout, plan.items.len() as u32, words)?;
        lists.batch = plan.seq_lens.len() as u32;
        lists.device = self.gpu.id();
        lists.prepared = Some((generation, bound));
        Ok(())
    }

    /// Whether these can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], and [`Error::ForeignResource`] for what another [`Gpu`] made.
    pub fn check(
        &self,
        lists: &DecodeLists,
        step: &Step<MlaDecode, Gpu>,
        batch: &BatchBinding,
    ) -> Result<()> {
        let (tables, pages) = step.raw.own.buffers();
        let is_of = |(generation, bound): &(u64, StepTables)| {
            *generation == step.raw.own.generation() && bound.tables == *tables && bound.pages == *pages
        };
        if !lists.prepared.as_ref().is_some_and(is_of) {
            let detail =
                "the step was prepared by another call than the last BatchTables::prepare of these lists";
            return Err(Error::LayoutMismatch { detail });
        }
        self.is_here("the lists of BatchTables", lists.device)?;
        self.check_batch(batch)?;
        if lists.batch != batch.batch {
            let detail = "the plan has another number of sequences than the batch";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Adds one dispatch that writes the slots of the batch's new tokens. Creates nothing.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`], and [`Error::ForeignResource`] for what another [`Gpu`] made, before anything is recorded.
    pub fn record_slots<O: AppendsSlots>(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        slots: &DeviceSlots<O>,
        batch: &BatchBinding,
    ) -> Result<()>
    where
        Gpu: Kernel<O>,
    {
        self.is_here("the slots of BatchTables", slots.device)?;
        self.check_batch(batch)?;
        if !self.serves(&slots.kv) {
            return Err(Error::LayoutMismatch { detail: "slots and batch are of different pools" });
        }
        if slots.max_tokens > 0 {
            let grid = self.gpu.grid(slots.max_tokens.into())?;
            dispatch(pass, &self.slots, &[&slots.group, &batch.group], grid);
        }
        Ok(())
    }

    /// Adds one dispatch that cuts the step's tables down to the batch, and writes its page list. Creates nothing.
    ///
    /// # Errors
    /// The errors of [`BatchTables::check`], before anything is recorded.
    pub fn record_lists(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        lists: &DecodeLists,
        step: &Step<MlaDecode, Gpu>,
        batch: &BatchBinding,
    ) -> Result<()> {
        self.check(lists, step, batch)?;
        if let (Some(plan), Some((_, bound))) = (lists.plan.group(), &lists.prepared) {
            // The capacity, as a decode's grids: a replay has the plan that was prepared last.
            let grid = self.gpu.grid(items(&step.capacity()))?;
            dispatch(pass, &self.lists, &[plan, &batch.group, &bound.group], grid);
        }
        Ok(())
    }

    /// Whether a batch was bound by tables of this device, pool and share.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] and [`Error::ForeignResource`].
    fn check_batch(&self, batch: &BatchBinding) -> Result<()> {
        self.is_here("a batch that was bound by BatchTables", batch.device)?;
        check_binding(self.serves(&batch.kv), &self.share, &batch.share)
    }

    /// Checks that both are of one device. Otherwise wgpu would refuse the commands later, by a call to the host's error handler.
    ///
    /// # Errors
    /// [`Error::ForeignResource`].
    fn is_here(&self, what: &'static str, device: u64) -> Result<()> {
        if device != self.gpu.id() {
            let detail = "another device made it: make it with the BatchTables that record it".to_owned();
            return Err(Error::ForeignResource { what, detail });
        }
        Ok(())
    }

    /// The dtype of the pages does not matter.
    fn serves(&self, kv: &KvSpec) -> bool {
        (kv.page_size, kv.num_pages) == (self.kv.page_size, self.kv.num_pages)
    }
}

/// The items of `batch_lists`: as many as the longest of the lists that it writes.
fn items(capacity: &crate::plan::tables::Capacity) -> u64 {
    capacity.items.max(capacity.queries).max(capacity.pages).into()
}

fn source(entry: &'static str, kv: &KvSpec) -> Source {
    let consts = [("GROUP", GROUP), ("PAGE_SIZE", kv.page_size), ("NUM_PAGES", kv.num_pages)];
    let body = match entry {
        "batch_slots" => include_str!("../../../shaders/batch_slots.wgsl"),
        _ => include_str!("../../../shaders/batch_lists.wgsl"),
    };
    let files = [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/device_batch.wgsl"),
        body,
    ];
    unrolled(entry, &format!("page_{}", kv.page_size), &consts, &[], &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    let kv = KvSpec { layout: crate::base::dtype::Dtype::F16.into(), page_size: 48, num_pages: 7 };
    ["batch_slots", "batch_lists"].map(|entry| source(entry, &kv)).into()
}

#[cfg(test)]
pub(super) fn layouts() -> Vec<super::HostLayout> {
    super::layouts_of::<Params>()
}
