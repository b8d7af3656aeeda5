//! The decode op: split, then merge.

use std::sync::atomic::{AtomicU64, Ordering};

use super::binding::{self, LayerBinding};
use super::pipelines::{Layouts, Pipelines};
use super::step::Step;
use crate::caps::Caps;
use crate::compose::Source;
use crate::kernel::{self, Merging, Variant};
use crate::plan::{Plan, Tiling, check_plan};
use crate::tables::{Capacity, PageTable};
use crate::{Error, Layer, MlaSpec, Result};

/// Choices of a decode that have a default.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Forces a row of the ladder by name.
    pub variant: Option<String>,
    /// Query tokens of a sequence that the decode is made for, such as 2 with one speculative token; 0 is 1. Sizes the tile,
    /// so that a sequence's tokens read the cache once where all their heads fit one tile. Other lengths stay right.
    pub query_tokens: u32,
    /// Page lists are written on the device ([`PageTable::Device`]): kernels clamp every page id to the pool.
    pub device_page_list: bool,
    /// Replaces how the planner cuts work ([`MlaDecode::tiling`]), such as for a card whose best
    /// [`Tiling::target_items`] was measured: `cargo bench --bench decode -- --items N`. Tiles may be smaller than the
    /// kernel's, not larger: [`MlaDecode::prepare`] refuses such a plan.
    pub tiling: Option<Tiling>,
}

/// Paged, split-KV MLA decode for one [`MlaSpec`].
#[derive(Debug, Clone)]
pub struct MlaDecode {
    pipelines: Pipelines,
    layouts: Layouts,
    spec: MlaSpec,
    variant: Variant,
    tiling: Tiling,
    /// Of the kernel, whatever the planner was told.
    rows_per_tile: u32,
    device_page_list: bool,
    split: wgpu::ComputePipeline,
    /// In the order of [`Merging::ALL`].
    merges: [wgpu::ComputePipeline; 2],
    why: String,
    id: u64,
}

impl MlaDecode {
    /// Chooses a row and compiles it.
    ///
    /// # Errors
    /// Those of [`MlaSpec::check`], [`Error::VariantUnavailable`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn new(pipelines: &Pipelines, spec: &MlaSpec, options: &Options) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        spec.check()?;
        let caps = pipelines.caps();
        let (variant, why) = kernel::choose(options.variant.as_deref(), caps, spec)?;
        let layouts = Layouts::new(pipelines.device(), variant.pins_loads())?;
        let tiling =
            variant.tiling(caps, spec, options.query_tokens).ok_or_else(|| fits_no_tile(&variant))?;
        let [split, few, many] = compose(&variant, caps, spec, options)?;
        // Every index of `mla_decode` and `mla_merge`, what bounds it, and who checks that before a shader can see it:
        //
        //   tables      the header's places hold the capacity (`Capacity::check` in `write_tables`; the buffer has
        //               `header.pages` words); shaders get them as a uniform of each slice (`SliceUniform`), with the ends of items
        //               and merges; a new step holds zeros. Only `prepare` writes these, and the kernel of
        //               `ops::BatchTables`, items and queries of a checked plan: no host ever holds the buffers.
        //               What items, merges and slots name: `check_plan` in `prepare`
        //   query rows  first_row + num_rows <= queries * H: `check_plan`
        //   page list   page_begin + pages of kv_end <= its length: `check_plan`; its length <= the capacity, by which the
        //               buffer was made; an item's blocks and `run_token` look for tokens under kv_end only. Each word is a
        //               page: `write_pages`, whose zeros stand behind each sequence. With `device_page_list` the host holds
        //               this buffer (`Step::page_list`) and may write anything to it: nothing there is used but as a page's
        //               id, and `page_row`, through which every one goes, clamps it (`CLAMP_PAGES`) by `num_pages`, at least
        //               1 (`KvSpec::check`), of the uniform, which the host does not hold
        //   kv          page < num_pages, token % page_size < page_size, oct < (L + R) / 8: inside of what `KvView::check`
        //               found in the buffer; `Window` binds all of it, and its bytes fit u32
        //   q, out, lse token < max_queries (`bound_token`, also for a replay), head < H: inside of what `Layer::check` found.
        //               A stride too large for u32 has nothing to stride to: one token, head or page, whose index is 0
        //   partials    slot + num_rows <= num_slots, and slot + H <= num_slots in a merge: `check_plan`; num_slots <= the
        //               capacity, by which the buffer was made
        //   slice       cut from the plan's items; those that an earlier prepare had more are emptied
        //   workgroup   by constants: thread < THREADS, group_row + r < ROWS, token_quad < TOKEN_QUADS, lane < LANES. Every
        //               word is written before it is read
        //   matrices    `mla_decode_coop`: tiles of `keys`, `scores` and `weights` lie inside by constants (key_oct + TILE_OCTS <=
        //               KEY_PITCH, score rows and tokens by the splits; `scores` holds a tile for each subgroup); a subgroup has
        //               SUBGROUP lanes as `runs_on` asks for one size; row_at < PLACES, whose tokens `run_token` keeps under
        //               kv_end; tiles are stored to partials only where num_rows == ROWS; `wide_rows` reads rows under kv_end
        //   loops       over blocks, to kv_end < 2^31, of which each begins again once at most: no maximum moves then; over merge slots, to fewer than 2^30 words; all others are constant
        //   division    by page_size >= 1 (`KvSpec::check`) and num_heads >= 1 (`MlaShape::check`)
        let split = pipelines.get(&split, &layouts.pipeline)?;
        let merges = [pipelines.get(&few, &layouts.pipeline)?, pipelines.get(&many, &layouts.pipeline)?];
        log::info!("mla.decode: {why}");
        Ok(Self {
            pipelines: pipelines.clone(),
            layouts,
            spec: *spec,
            variant,
            tiling: options.tiling.unwrap_or(tiling),
            rows_per_tile: tiling.rows_per_tile,
            device_page_list: options.device_page_list,
            split,
            merges,
            why,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// The shaders that [`MlaDecode::new`] compiles on a device of these capabilities, the split and the two shapes of the merge:
    /// for tools that compile them elsewhere.
    ///
    /// # Errors
    /// Those of [`MlaSpec::check`], [`Error::VariantUnavailable`].
    pub fn sources(caps: &Caps, spec: &MlaSpec, options: &Options) -> Result<[Source; 3]> {
        spec.check()?;
        let (variant, _) = kernel::choose(options.variant.as_deref(), caps, spec)?;
        compose(&variant, caps, spec, options)
    }

    /// What it was made for.
    pub fn spec(&self) -> &MlaSpec {
        &self.spec
    }

    /// The row that was chosen.
    pub fn variant(&self) -> &'static str {
        self.variant.name
    }

    /// Whether that row rounds the softmax weights to f16, as rows on tensor cores do: their results are up to twice as far
    /// from the exact ones as those of the others.
    pub fn rounds_weights(&self) -> bool {
        self.variant.rounds_weights()
    }

    /// Which row was chosen, and what each better one lacks here.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// How the planner is to cut work for it.
    pub fn tiling(&self) -> Tiling {
        self.tiling
    }

    /// A step with room for `capacity`; [`Capacity::default`] leaves it to the first `prepare`.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn step(&self, capacity: Capacity) -> Result<Step> {
        Step::new(&self.pipelines, &self.layouts, &self.spec, self.id, self.device_page_list, capacity)
    }

    /// Checks a plan and its pages and uploads what changed. Allocates only where the step has to grow.
    ///
    /// # Errors
    /// Those of [`crate::write_tables`], [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`] and
    /// [`Error::LayoutMismatch`]; [`Error::Shape`] for a plan that this decode cannot run, such as one of larger tiles. The
    /// step then still holds what it held.
    pub fn prepare(
        &self,
        queue: &wgpu::Queue,
        step: &mut Step,
        plan: &Plan,
        pages: PageTable<'_>,
    ) -> Result<()> {
        if step.owner != self.id {
            return Err(Error::LayoutMismatch { detail: "the step was made by another decode" });
        }
        if matches!(pages, PageTable::Device) && !self.device_page_list {
            let detail = "PageTable::Device needs a decode made with Options::device_page_list";
            return Err(Error::LayoutMismatch { detail });
        }
        check_plan(plan, &self.spec, self.rows_per_tile)?;
        step.prepare(&self.pipelines, &self.layouts, &self.spec, queue, plan, pages)
    }

    /// Checks and binds a layer for batches of at most `max_queries` query tokens.
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`],
    /// [`Error::Aliased`], [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn bind(&self, max_queries: u32, layer: &Layer<&wgpu::Buffer>) -> Result<LayerBinding> {
        binding::bind(&self.pipelines, &self.layouts, &self.spec, self.id, max_queries, layer)
    }

    /// Records one layer's decode in a pass of its own. Creates nothing and cannot fail.
    ///
    /// A step and a binding that do not belong together (see [`MlaDecode::check`]) record nothing and log an error.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &Step, binding: &LayerBinding) {
        self.record_in(&mut begin_pass(encoder), step, binding);
    }

    /// As [`MlaDecode::record`], in the host's pass.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, step: &Step, binding: &LayerBinding) {
        if self.set_layer(pass, step, binding) {
            self.dispatch_split(pass, step, None);
            self.dispatch_merge(pass, step);
        }
    }

    /// Records slice `index` of [`Step::num_slices`], the merge with the last. The slices of one step and layer are
    /// submitted in order, in as many frames as the host likes, before the step is prepared again.
    pub fn record_slice(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &Step,
        binding: &LayerBinding,
        index: usize,
    ) {
        self.record_slice_in(&mut begin_pass(encoder), step, binding, index);
    }

    /// As [`MlaDecode::record_slice`], in the host's pass: with timestamps around it, a host learns what its
    /// [`super::SliceBudget`] should be.
    pub fn record_slice_in(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Step,
        binding: &LayerBinding,
        index: usize,
    ) {
        if index < step.num_slices() && self.set_layer(pass, step, binding) {
            self.dispatch_split(pass, step, Some(index));
            if index + 1 == step.num_slices() {
                self.dispatch_merge(pass, step);
            }
        }
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &Step, binding: &LayerBinding) -> Result<()> {
        if step.owner != self.id || binding.owner != self.id {
            return Err(Error::LayoutMismatch { detail: "one of them was made by another decode" });
        }
        if step.num_queries > binding.max_queries {
            return Err(Error::LayoutMismatch { detail: "the step has more query tokens than the binding" });
        }
        Ok(())
    }

    /// Whether there is something to dispatch.
    fn set_layer(&self, pass: &mut wgpu::ComputePass<'_>, step: &Step, binding: &LayerBinding) -> bool {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return false;
        }
        let Some(group) = &binding.group else { return false };
        pass.set_bind_group(0, group, &[]);
        true
    }

    fn dispatch_split(&self, pass: &mut wgpu::ComputePass<'_>, step: &Step, slice: Option<usize>) {
        let (offset, items) = step.slice(slice);
        pass.set_bind_group(1, &step.group, &[offset]);
        if items > 0 {
            pass.set_pipeline(&self.split);
            self.dispatch(pass, items);
        }
    }

    /// After the split, whose groups it shares.
    fn dispatch_merge(&self, pass: &mut wgpu::ComputePass<'_>, step: &Step) {
        let rows = step.capacity.merges * self.spec.shape.num_heads;
        if rows > 0 {
            let merging = Merging::of(rows.into());
            pass.set_pipeline(&self.merges[merging as usize]);
            self.dispatch(pass, rows * merging.parts(&self.spec.shape));
        }
    }

    fn dispatch(&self, pass: &mut wgpu::ComputePass<'_>, groups: u32) {
        let width = self.pipelines.caps().max_workgroups;
        pass.dispatch_workgroups(groups.min(width), groups.div_ceil(width), 1);
    }
}

fn compose(variant: &Variant, caps: &Caps, spec: &MlaSpec, options: &Options) -> Result<[Source; 3]> {
    let split = kernel::decode(variant, caps, spec, options.query_tokens, options.device_page_list);
    let [few, many] = Merging::ALL.map(|merging| merging.source(spec, variant.pins_loads()));
    Ok([split.ok_or_else(|| fits_no_tile(variant))?, few, many])
}

fn fits_no_tile(variant: &Variant) -> Error {
    Error::VariantUnavailable { name: variant.name.into(), why: "it fits no tile here".into() }
}

fn begin_pass(encoder: &mut wgpu::CommandEncoder) -> wgpu::ComputePass<'_> {
    encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
        label: Some("mla.decode"),
        timestamp_writes: None,
    })
}
