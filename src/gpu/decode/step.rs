//! A step's tables, page list and scratch on the device.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::Pipes;
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::kernels::decode::Merging;
use crate::gpu::pipelines::{buffer, groups_of_regions, part, storage};
use crate::gpu::ring::{REGIONS, Ring};
use crate::gpu::scope::alive;
use crate::ops::Step;
use crate::plan::tables::{Capacity, HEADER_WORDS, Header, PageTable, changed_runs, write_tables};
use crate::plan::{Plan, Slabbed};

/// Slices that one step can be recorded in.
pub const MAX_SLICES: usize = 64;

/// How long one slice of a step may keep the device busy.
///
/// The estimate is a rate, measured by the host or taken from [`SliceBudget::DESKTOP`]; an item is never cut, so plan
/// with [`crate::SplitPolicy::FixedTokens`] where sequences are long and the budget is small.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SliceBudget {
    /// Milliseconds that a slice may take.
    pub milliseconds: f64,
    /// Query rows times tokens that the device attends in a millisecond.
    pub work_per_millisecond: f64,
}

impl SliceBudget {
    /// A quarter of a 60 Hz frame on a device that does 5e6 query rows times tokens in a millisecond: at 512/64 about
    /// 11 TFLOP/s. A slow device needs its own, measured rate, or one slice holds the whole step.
    pub const DESKTOP: Self = Self { milliseconds: 4.0, work_per_millisecond: 5e6 };
}

/// A step's tables, page list and scratch. Commands that were recorded keep what they were recorded with: see [`Ring`].
#[derive(Debug)]
pub struct Tables {
    layout: Layout,
    /// One for each region; the slice is bound with a dynamic offset.
    groups: Vec<wgpu::BindGroup>,
    ring: Ring,
    /// Bytes of a region of the tables' and of the page list's buffer.
    region_bytes: [u64; 2],
    /// Whether the host may write the page list itself.
    device_page_list: bool,
    /// Whether `batch_lists` writes the tables too, so that they may differ from what was uploaded.
    device_tables: bool,
    /// Counts calls of `prepare`.
    generation: u64,
    tables: wgpu::Buffer,
    /// A buffer of its own, because the host may write it with `device_page_list`.
    pages: wgpu::Buffer,
    slices_buffer: wgpu::Buffer,
    slice_stride: u32,
    slices: Vec<Range<u32>>,
    budget: Option<SliceBudget>,
    /// Staging for the next upload.
    words: Vec<u32>,
    slice_words: Vec<u32>,
    /// The words that each region holds, so that only changes are uploaded.
    uploaded: Vec<Uploaded>,
    partials: wgpu::Buffer,
    /// Whether these are the tables of one slab, whose [`Tables::partials`] are those of the whole step.
    is_slab: bool,
}

#[derive(Debug, Clone, Default)]
struct Uploaded {
    words: Vec<u32>,
    slices: Vec<u32>,
}

impl Step<MlaDecode, Gpu> {
    /// Cuts the step at the next prepare into slices of at most this long each; `None` records it in one piece.
    pub fn set_slice_budget(&mut self, budget: Option<SliceBudget>) {
        self.raw.own.budget = budget;
    }

    /// Slices that the prepared step has: 1 without a budget.
    pub fn num_slices(&self) -> usize {
        self.raw.each().map(|tables| tables.slices.len().max(1)).sum()
    }

    /// The device's copy of the flat page list, for a host that writes it on the device: a buffer of nothing else, which a
    /// prepare beyond the capacity replaces. Any other prepare writes the step in place, before all that is submitted next: submit what
    /// was recorded with it first. The buffer holds [`Capacity::pages`] words or up to three more. Sequence `i` begins at word
    /// [`Plan::page_begin`]`[i]`.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`] for a step of a decode made without [`crate::DecodeOptions::device_page_list`]: its kernels trust
    /// the page list, which only a prepare writes.
    pub fn page_list(&self) -> Result<&wgpu::Buffer> {
        if !self.raw.own.device_page_list {
            let detail = "Step::page_list needs a decode made with DecodeOptions::device_page_list";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(&self.raw.own.pages)
    }
}

/// The slab that slice `index` of a step belongs to, its tables, and the slice's index there.
pub(super) fn slice(step: &Slabbed<Tables>, index: usize) -> Option<(usize, &Tables, usize)> {
    let mut rest = index;
    for (slab, tables) in step.each().enumerate() {
        let slices = tables.slices.len().max(1);
        if rest < slices {
            return Some((slab, tables, rest));
        }
        rest -= slices;
    }
    None
}

/// Uploads the tables of a plan that passed [`crate::plan::check_plan`].
pub(super) fn prepare(
    step: &mut Slabbed<Tables>,
    gpu: &Gpu,
    pipes: &Pipes,
    spec: &MlaDecode,
    plan: (&Plan, PageTable<'_>),
) -> Result<()> {
    let budget = step.own.budget;
    let write = |tables: &mut Tables, spec: &MlaDecode, plan: &Plan, pages: PageTable<'_>| {
        tables.budget = budget;
        tables.prepare_one(gpu, pipes, spec, plan, pages)
    };
    let new = |own: &Tables, spec: &MlaDecode, capacity| {
        Tables::with_partials(gpu, pipes, Layout::of(gpu.caps(), spec, capacity)?, Some(&own.partials))
    };
    step.prepare(spec, plan, write, |own, slab| slab.partials == own.partials, new)
}

impl Tables {
    pub(super) fn new(gpu: &Gpu, pipes: &Pipes, spec: &MlaDecode, capacity: Capacity) -> Result<Self> {
        Self::with_partials(gpu, pipes, Layout::of(gpu.caps(), spec, capacity)?, None)
    }

    fn with_partials(
        gpu: &Gpu,
        pipes: &Pipes,
        layout: Layout,
        partials: Option<&wgpu::Buffer>,
    ) -> Result<Self> {
        let is_slab = partials.is_some();
        let slice_stride = gpu.uniform_stride();
        let region_bytes =
            [layout.tables, layout.pages].map(|bytes| bytes.next_multiple_of(gpu.storage_alignment()));
        let most = gpu.caps().max_buffer_bytes / region_bytes[0].max(region_bytes[1]);
        // A page list that the host writes has one region; so do the largest lists, as two would exceed a buffer.
        let regions = if pipes.device_page_list { 1 } else { most.clamp(1, REGIONS.into()) as u32 };
        let of = |bytes: u64, region: u64| if regions == 1 { bytes } else { region * u64::from(regions) };
        let tables = storage(gpu, "mla.tables", of(layout.tables, region_bytes[0]))?;
        let pages = storage(gpu, "mla.pages", of(layout.pages, region_bytes[1]))?;
        let partials = match partials {
            Some(shared) => shared.clone(),
            None => storage(gpu, "mla.partials", layout.partials)?,
        };
        let slices_bytes = u64::from(slice_stride) * (MAX_SLICES as u64 + 1) * u64::from(regions);
        let slices = buffer(gpu, "mla.slices", slices_bytes, wgpu::BufferUsages::UNIFORM)?;
        let resources = |region: u64| {
            let mut resources = vec![
                part(&tables, region * region_bytes[0], layout.tables),
                partials.as_entire_binding(),
                part(&slices, 0, size_of::<SliceUniform>() as u64),
            ];
            // A sparse decode has no page list.
            if pipes.inputs.topk == 0 {
                resources.push(part(&pages, region * region_bytes[1], layout.pages));
            }
            resources
        };
        let groups = groups_of_regions(gpu, "mla.step", &pipes.step, regions, resources)?;
        Ok(Self {
            layout,
            groups,
            ring: Ring::new(regions),
            region_bytes,
            device_page_list: pipes.device_page_list,
            device_tables: false,
            generation: 0,
            tables,
            pages,
            slices_buffer: slices,
            slice_stride,
            slices: Vec::new(),
            budget: None,
            words: Vec::new(),
            slice_words: Vec::new(),
            uploaded: vec![Uploaded::default(); regions as usize],
            partials,
            is_slab,
        })
    }

    pub(super) fn capacity(&self) -> Capacity {
        self.layout.capacity
    }

    /// Says that `batch_lists` may write the tables from now on. Returns the [`Tables::generation`].
    pub(in crate::gpu) fn written_by_device(&mut self) -> u64 {
        self.device_tables = true;
        self.generation
    }

    /// The number of the last `prepare`.
    pub(in crate::gpu) fn generation(&self) -> u64 {
        self.generation
    }

    /// The tables without the page list, and the page list.
    pub(in crate::gpu) fn buffers(&self) -> (&wgpu::Buffer, &wgpu::Buffer) {
        (&self.tables, &self.pages)
    }

    fn prepare_one(
        &mut self,
        gpu: &Gpu,
        pipes: &Pipes,
        spec: &MlaDecode,
        plan: &Plan,
        pages: PageTable<'_>,
    ) -> Result<()> {
        let capacity = self.layout.capacity.grown_to(Capacity::of(plan));
        let grows = capacity != self.layout.capacity;
        let layout = if grows { Layout::of(gpu.caps(), spec, capacity)? } else { self.layout };
        // Checked in full before anything on the device changes.
        let header = write_tables(&mut self.words, &capacity, plan, pages, &spec.kv)?;
        // A step whose page list the host writes is rewritten in place.
        if !grows && (self.device_page_list || self.ring.turn()) {
            alive(gpu.device())?;
        } else {
            let shared = self.is_slab.then_some(&self.partials);
            let grown = Self::with_partials(gpu, pipes, layout, shared)?;
            let words = std::mem::take(&mut self.words);
            *self = Self { words, budget: self.budget, generation: self.generation, ..grown };
        }
        self.generation += 1;
        let region = self.ring.current();
        let [tables_at, pages_at] = self.region_bytes.map(|bytes| bytes * u64::from(region));
        if self.device_tables {
            self.uploaded[region as usize].words.clear();
        }
        self.cut_slices(plan, &header);

        // Words of the tables' buffer, and with those of the page list's.
        let own = header.pages as usize;
        let used = match pages {
            // The device writes the page list itself.
            PageTable::Device => own,
            _ => own + plan.page_list_len() as usize,
        };
        let (words, Uploaded { words: uploaded, slices }) =
            (&self.words[..used], &mut self.uploaded[region as usize]);
        let (old, new) = (uploaded.split_at(own.min(uploaded.len())), words.split_at(own));
        for (buffer, at, old, new) in
            [(&self.tables, tables_at, old.0, new.0), (&self.pages, pages_at, old.1, new.1)]
        {
            changed_runs(old, new, |run| {
                let at = at + run.start as u64 * 4;
                gpu.queue().write_buffer(buffer, at, bytemuck::cast_slice(&new[run]));
            });
        }
        // Words past `used` are left as they are, so that they need not be sent again when the batch grows back.
        // The host does not know what the device wrote into a page list.
        if uploaded.len() < used || matches!(pages, PageTable::Device) {
            uploaded.resize(used, 0);
        }
        uploaded[..used].copy_from_slice(words);
        debug_assert!(used >= HEADER_WORDS as usize);

        if self.slice_words != *slices {
            let at = u64::from(region * slices_region(self.slice_stride));
            gpu.queue().write_buffer(&self.slices_buffer, at, bytemuck::cast_slice(&self.slice_words));
            slices.clone_from(&self.slice_words);
        }
        Ok(())
    }

    /// Slice 0 of the buffer is the whole step; the others follow.
    fn cut_slices(&mut self, plan: &Plan, header: &Header) {
        self.slices.clear();
        if let Some(budget) = self.budget {
            let most = (budget.milliseconds * budget.work_per_millisecond).max(1.0) as u64;
            // At most MAX_SLICES.
            let most = most.max(plan.work().div_ceil(MAX_SLICES as u64 / 2));
            let (mut begin, mut work) = (0, 0);
            for (item, at) in plan.items.iter().zip(0..) {
                if work > 0 && work + item.work() > most && self.slices.len() < MAX_SLICES - 1 {
                    self.slices.push(begin..at);
                    (begin, work) = (at, 0);
                }
                work += item.work();
            }
            self.slices.push(begin..plan.items.len() as u32);
        }
        let stride = self.slice_stride as usize / 4;
        self.slice_words.clear();
        // Commands may have been recorded with more slices of an earlier prepare: those are emptied.
        let old = self.uploaded[self.ring.current() as usize].slices.len();
        self.slice_words.resize((stride * (self.slices.len() + 1)).max(old), 0);
        let whole = 0..header.num_items;
        for (slice, words) in
            std::iter::once(&whole).chain(&self.slices).zip(self.slice_words.chunks_mut(stride))
        {
            let uniform = SliceUniform::new(slice, header);
            words[..size_of::<SliceUniform>() / 4].copy_from_slice(bytemuck::cast_slice(&[uniform]));
        }
    }

    /// Binds the step, or one slice of it. Returns the work items.
    pub(super) fn bind(&self, pass: &mut wgpu::ComputePass<'_>, slice: Option<usize>) -> u32 {
        let (slice, items) = match slice.and_then(|index| Some((index, self.slices.get(index)?))) {
            Some((index, slice)) => ((index as u32 + 1) * self.slice_stride, slice.len() as u32),
            None => (0, self.layout.capacity.items),
        };
        let region = self.ring.record();
        let slice = slice + region * slices_region(self.slice_stride);
        pass.set_bind_group(1, &self.groups[region as usize], &[slice]);
        items
    }
}

/// Bytes of a region of the slices' buffer.
const fn slices_region(slice_stride: u32) -> u32 {
    slice_stride * (MAX_SLICES as u32 + 1)
}

/// What the shaders need from a slice and the tables' header. It is a uniform, since loads that depend on each other delay the start of a
/// launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct SliceUniform {
    pub(crate) first_item: u32,
    pub(crate) end_item: u32,
    pub(crate) num_merges: u32,
    pub(crate) page_size: u32,
    pub(crate) num_pages: u32,
    pub(crate) items_at: u32,
    pub(crate) queries_at: u32,
    pub(crate) merges_at: u32,
    pub(crate) merge_partials_at: u32,
    pub(crate) reserved_0: u32,
    pub(crate) reserved_1: u32,
    pub(crate) reserved_2: u32,
}

impl SliceUniform {
    fn new(slice: &Range<u32>, header: &Header) -> Self {
        Self {
            first_item: slice.start,
            end_item: slice.end,
            num_merges: header.num_merges,
            page_size: header.page_size,
            num_pages: header.num_pages,
            items_at: header.items,
            queries_at: header.queries,
            merges_at: header.merges,
            merge_partials_at: header.merge_partials,
            reserved_0: 0,
            reserved_1: 0,
            reserved_2: 0,
        }
    }
}

/// Where a step of a capacity keeps what it holds: bytes of its buffers, within the device's limits.
#[derive(Debug, Clone, Copy)]
struct Layout {
    capacity: Capacity,
    tables: u64,
    pages: u64,
    partials: u64,
}

impl Layout {
    /// # Errors
    /// [`Error::Limit`].
    fn of(caps: &Caps, spec: &MlaDecode, capacity: Capacity) -> Result<Self> {
        capacity.check_words()?;
        let header = capacity.header(&spec.kv);
        let words = |count: u32| u64::from(count) * 4;
        let tables = words(header.pages);
        // A binding is never empty.
        let pages = words(header.end - header.pages).max(16);
        let partials =
            (u64::from(capacity.partials) * (u64::from(spec.shape.kv_lora_rank) / 4 + 1) * 16).max(16);
        let limit = caps.max_binding_bytes.min(caps.max_buffer_bytes);
        for (what, need, limit) in [
            ("a step's tables", tables, limit),
            ("a step's page list", pages, limit),
            ("a step's partial results", partials, limit),
        ] {
            if need > limit {
                let cure = "use a smaller batch, fewer or longer splits, or `wanted`'s limits";
                return Err(Error::Limit { what, need, limit, cure });
            }
        }
        let (rows, parts) = merge_rows(spec, &capacity);
        let groups = u64::from(capacity.items).max(rows * u64::from(parts));
        let limit = u64::from(caps.max_workgroups).pow(2);
        if groups > limit {
            let cure = "use a smaller batch, fewer or longer splits, or a device with a higher max_compute_workgroups_per_dimension";
            return Err(Error::Limit { what: "workgroups of a step", need: groups, limit, cure });
        }
        Ok(Self { capacity, tables, pages, partials })
    }
}

/// Rows that a step may have to merge, and the merge's workgroups for each.
fn merge_rows(spec: &MlaDecode, capacity: &Capacity) -> (u64, u32) {
    let rows = u64::from(capacity.merges) * u64::from(spec.shape.num_heads);
    (rows, Merging::of(rows).parts(&spec.shape))
}
