//! `batch_tables`: the slots of new tokens and the tables of a decode, from a batch that only the device knows.

use super::args::{Slot, bind_group, layout};
use super::table::Table;
use super::{AppendStep, GROUP, KvAppend, grid, pipeline};
use crate::compose::Source;
use crate::gpu::scope::scoped;
use crate::gpu::window::Window;
use crate::gpu::{MlaDecode, Pipelines, Step};
use crate::ops::{DeviceBatch, Sequences, template};
use crate::plan::Plan;
use crate::tables::PageTable;
use crate::{Error, KvSpec, Result};

/// Makes tables on the device from `seq_lens`, `query_start_loc` and `block_table` that the host never reads back: batches may be
/// padded to a fixed size, and a step is planned once for the longest that its sequences may become.
///
/// ```text
/// once      tables = BatchTables::new(&pipelines, kv), batch = tables.bind(device, &DeviceBatch { .. })
///           slots = tables.slots(device, queue, &append, max_tokens)
///           tables.prepare(device, queue, &mut lists, &mla, &mut step, &plan)     a plan of upper bounds
/// a step    tables.record_slots_in(pass, &slots, &batch), append.record_in(pass, slots.step(), ..) for each layer
///           tables.record_lists_in(pass, &lists, &step, &batch), mla.record_in(pass, &step, ..) for each layer
/// ```
#[derive(Debug)]
pub struct BatchTables {
    kv: KvSpec,
    slots: wgpu::ComputePipeline,
    lists: wgpu::ComputePipeline,
    slots_layout: wgpu::BindGroupLayout,
    batch_layout: wgpu::BindGroupLayout,
    plan_layout: wgpu::BindGroupLayout,
    step_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

/// A batch's arrays, checked and bound.
#[derive(Debug)]
pub struct BatchBinding {
    group: wgpu::BindGroup,
    kv: KvSpec,
    batch: u32,
}

/// Slots that the device writes and `kv_append` reads.
#[derive(Debug)]
pub struct DeviceSlots {
    step: AppendStep,
    /// `None` without a token.
    group: Option<wgpu::BindGroup>,
    kv: KvSpec,
}

/// What a decode's step is made of anew for each batch: the plan of its upper bounds.
#[derive(Debug, Default)]
pub struct DecodeLists {
    plan: Table,
    batch: u32,
    /// Which `prepare` of which step it belongs to.
    prepared: Option<(u64, StepTables)>,
}

#[derive(Debug)]
struct StepTables {
    group: wgpu::BindGroup,
    tables: wgpu::Buffer,
    pages: wgpu::Buffer,
}

/// `BatchParams` of the shaders.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    batch: u32,
    max_pages: u32,
    reserved: [u32; 2],
}

impl DeviceSlots {
    /// What [`KvAppend::record_in`] takes: of `max_tokens` tokens, those without a slot skipped.
    pub fn step(&self) -> &AppendStep {
        &self.step
    }
}

impl BatchTables {
    /// Compiles for a cache; its dtype does not matter.
    ///
    /// # Errors
    /// Those of [`KvSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, kv: KvSpec) -> Result<Self> {
        kv.check()?;
        let device = pipelines.device();
        let slots_layout = layout(device, "mla.batch_slots.step", &[Slot::Write])?;
        let batch = [Slot::Uniform, Slot::Read, Slot::Read, Slot::Read];
        let batch_layout = layout(device, "mla.batch", &batch)?;
        let plan_layout = layout(device, "mla.batch_lists.plan", &[Slot::Read])?;
        let step_layout = layout(device, "mla.batch_lists.step", &[Slot::Write, Slot::Write])?;
        // Every index is in bounds, whatever the batch's arrays hold, and whichever step, plan and binding are recorded:
        // - the batch: sequence < params.batch and block < max_pages are asked in the shaders, and `bind` found that many words in
        //   each buffer (`DeviceBatch::check`);
        // - `batch_slots`: word 0 of the table is its number of tokens, which `AppendStep::for_device` wrote and the shader leaves;
        //   token < that. What it writes is a slot of the pool or none;
        // - `batch_lists`: the template is ours alone (`Table`), its sections follow from the counts in front; `prepare` made the
        //   places in `tables` and the counts from a plan that fits the step's capacity (`MlaDecode::prepare` checked it just before).
        //   A template serves the buffers of one step, and so one capacity, whenever it is written again. What it writes to `tables` are whole items and query tokens of
        //   that plan with ranges and bounds no longer than there: in bounds for `mla_decode` beside the rest of any plan of the
        //   same capacity, as `check_plan` and `write_tables` bound each item and query token by itself. An item's `page_begin` and
        //   pages are below the plan's list, its slots below the plan's slots, and so below the capacity's;
        // - page list: index < num_words, the plan's, which the capacity holds.
        // Loops halve a range of at most `batch` until it is 1.
        let slots = pipeline(pipelines, &source("batch_slots", &kv), &[&slots_layout, &batch_layout])?;
        let groups = [&plan_layout, &batch_layout, &step_layout];
        let lists = pipeline(pipelines, &source("batch_lists", &kv), &groups)?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { kv, slots, lists, slots_layout, batch_layout, plan_layout, step_layout, max_groups })
    }

    /// Checks and binds a batch's arrays. They are read when the commands run.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer without `STORAGE`, [`Error::Limit`],
    /// [`Error::OutOfMemory`].
    pub fn bind(&self, device: &wgpu::Device, batch: &DeviceBatch<&wgpu::Buffer>) -> Result<BatchBinding> {
        batch.check(wgpu::Buffer::size)?;
        let limits = device.limits();
        let mut windows = Vec::new();
        for ((what, buffer), words) in batch.arrays().into_iter().zip(batch.words()) {
            windows.push(Window::new(&limits, what, buffer, 0..words * 4)?);
        }
        let params = Params { batch: batch.batch, max_pages: batch.max_pages, reserved: [0; 2] };
        let params = bytemuck::bytes_of(&params);
        let resources = windows.iter().map(Window::resource);
        let group = bind_group(device, "mla.batch", &self.batch_layout, params, resources)?;
        Ok(BatchBinding { group, kv: self.kv, batch: batch.batch })
    }

    /// Slots for up to `max_tokens` new tokens, for an append of the same cache. All are skipped until
    /// [`BatchTables::record_slots_in`] has run.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] for an append of another pool, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn slots(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        append: &KvAppend,
        max_tokens: u32,
    ) -> Result<DeviceSlots> {
        if !self.serves(&append.spec().kv) {
            return Err(Error::LayoutMismatch { detail: "the append is of another pool of pages" });
        }
        let step = AppendStep::for_device(append, device, queue, max_tokens)?;
        let group = match step.table_buffer() {
            Some(table) => Some(self.group(device, &self.slots_layout, &[table])?),
            None => None,
        };
        Ok(DeviceSlots { step, group, kv: self.kv })
    }

    /// Prepares a decode's step with a plan for the longest that each sequence may be, [`PageTable::Device`], and keeps what
    /// [`BatchTables::record_lists_in`] needs of the plan.
    ///
    /// The plan has the batch's sequences, those of padding included, with `seq_lens` that no batch passes, and
    /// [`crate::Visibility::Full`] (or one query token a sequence): the device finds what each query token sees, causal and
    /// bottom-right. A sequence's query tokens begin where the plan has them; those that the batch has not, by `query_start_loc`, see
    /// nothing: out is 0 and LSE -inf. Sequences longer than planned are cut off.
    ///
    /// The upload takes effect before the next submit. A `prepare` that does not fit the step's capacity replaces buffers: commands
    /// are then recorded again.
    ///
    /// # Errors
    /// Those of [`MlaDecode::prepare`]; [`Error::LayoutMismatch`] for a decode of another pool or one without
    /// [`crate::gpu::Options::device_page_list`]; [`Error::Shape`] for a plan with shared prefixes or with other bounds.
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        lists: &mut DecodeLists,
        mla: &MlaDecode,
        step: &mut Step,
        plan: &Plan,
    ) -> Result<()> {
        if !self.serves(&mla.spec().kv) {
            return Err(Error::LayoutMismatch { detail: "the decode is of another pool of pages" });
        }
        let sequences = Sequences::of(plan, mla.spec().shape.num_heads)?;
        mla.prepare(queue, step, plan, PageTable::Device)?;
        let generation = step.written_by_device();
        let (tables, pages) = step.table_buffers();
        let same = |old: &(u64, StepTables)| old.1.tables == *tables && old.1.pages == *pages;
        let bound = match lists.prepared.take().filter(same) {
            Some((_, bound)) => bound,
            None => {
                // Commands recorded for other buffers keep the template that was made for their capacity.
                lists.plan = Table::default();
                let group = self.group(device, &self.step_layout, &[tables, pages])?;
                StepTables { group, tables: tables.clone(), pages: pages.clone() }
            }
        };
        let words = template(plan, &sequences, &step.capacity(), &self.kv);
        lists.plan.upload(device, queue, &self.plan_layout, plan.items.len() as u32, words)?;
        lists.batch = plan.seq_lens.len() as u32;
        lists.prepared = Some((generation, bound));
        Ok(())
    }

    /// Whether these can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, lists: &DecodeLists, step: &Step, batch: &BatchBinding) -> Result<()> {
        let (tables, pages) = step.table_buffers();
        let is_of = |(generation, bound): &(u64, StepTables)| {
            *generation == step.generation() && bound.tables == *tables && bound.pages == *pages
        };
        if !lists.prepared.as_ref().is_some_and(is_of) {
            let detail =
                "the step was prepared by another call than the last BatchTables::prepare of these lists";
            return Err(Error::LayoutMismatch { detail });
        }
        if lists.batch != batch.batch || !self.serves(&batch.kv) {
            let detail = "the plan has another number of sequences than the batch, or another pool";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Adds one dispatch that writes the slots of the batch's new tokens. Creates nothing and cannot fail: a pair that does not
    /// belong together records nothing and logs an error.
    pub fn record_slots_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        slots: &DeviceSlots,
        batch: &BatchBinding,
    ) {
        if !self.serves(&slots.kv) || !self.serves(&batch.kv) {
            log::error!("nothing recorded: slots and batch are of different pools");
            return;
        }
        let Some(group) = &slots.group else { return };
        let (x, y) = grid(slots.step.num_tokens().into(), self.max_groups);
        pass.set_pipeline(&self.slots);
        pass.set_bind_group(0, group, &[]);
        pass.set_bind_group(1, &batch.group, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// Adds one dispatch that cuts the step's tables down to the batch, and writes its page list. Creates nothing and cannot fail: what
    /// [`BatchTables::check`] refuses records nothing and logs an error.
    pub fn record_lists_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        lists: &DecodeLists,
        step: &Step,
        batch: &BatchBinding,
    ) {
        if let Err(error) = self.check(lists, step, batch) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(plan), Some((_, bound))) = (lists.plan.group(), &lists.prepared) else { return };
        // The capacity, as a decode's grids: a replay has the plan that was prepared last.
        let capacity = step.capacity();
        let items = capacity.items.max(capacity.queries).max(capacity.pages);
        let (x, y) = grid(items.into(), self.max_groups);
        pass.set_pipeline(&self.lists);
        pass.set_bind_group(0, plan, &[]);
        pass.set_bind_group(1, &batch.group, &[]);
        pass.set_bind_group(2, &bound.group, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// Pages of other elements are the same to it.
    fn serves(&self, kv: &KvSpec) -> bool {
        (kv.page_size, kv.num_pages) == (self.kv.page_size, self.kv.num_pages)
    }

    /// Whole buffers of ours.
    fn group<'a>(
        &self,
        device: &wgpu::Device,
        layout: &wgpu::BindGroupLayout,
        buffers: &[&'a wgpu::Buffer],
    ) -> Result<wgpu::BindGroup> {
        let entry = |(buffer, binding): (&&'a wgpu::Buffer, u32)| wgpu::BindGroupEntry {
            binding,
            resource: buffer.as_entire_binding(),
        };
        let entries: Vec<_> = buffers.iter().zip(0..).map(entry).collect();
        scoped(device, "a batch's tables", || {
            let label = Some("mla.batch_tables");
            device.create_bind_group(&wgpu::BindGroupDescriptor { label, layout, entries: &entries })
        })
    }
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
    super::unrolled(entry, &format!("page_{}", kv.page_size), &consts, &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    let kv = KvSpec { dtype: crate::Dtype::F16, page_size: 48, num_pages: 7 };
    ["batch_slots", "batch_lists"].map(|entry| source(entry, &kv)).into()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let reserved = offset_of!(Params, reserved);
    let fields = vec![
        ("batch", offset_of!(Params, batch)),
        ("max_pages", offset_of!(Params, max_pages)),
        ("reserved_0", reserved),
        ("reserved_1", reserved + 4),
    ];
    ("BatchParams", fields, size_of::<Params>())
}
