//! `mla_prefill`: attention over expanded keys and values.

mod coop;
mod plain;

use super::args::{Slot, bind_group, layout, window_of};
use super::pipeline;
use super::table::Table;
use crate::caps::{Caps, DeviceKind};
use crate::compose::Source;
use crate::gpu::Pipelines;
use crate::gpu::scope::scoped;
use crate::gpu::window::Window;
use crate::layer::View;
use crate::prefill::plan::tiles;
use crate::prefill::{LEAST_PART_KEYS, Prefill, PrefillExtent, PrefillSequence, PrefillSpec, PrefillVariant};
use crate::{Error, Result};

/// A kernel for a spec on a device, ready to compile.
struct Kernel {
    source: Source,
    /// Query rows of a tile.
    rows: u32,
    /// Elements that queries, keys and values are read by.
    unit: u32,
    /// Whether it declares them as if it wrote them: see `shaders/lib/prefill_pinned.wgsl`.
    pins_loads: bool,
}

/// One row of the ladder.
struct Row {
    name: &'static str,
    rounds_weights: bool,
    /// The kernel, or a sentence about what it lacks.
    kernel: fn(&Caps, &PrefillSpec) -> std::result::Result<Kernel, String>,
}

/// Query tokens of a sequence for which [`FEW_ROW`] is best.
const FEW: u32 = 64;
const FEW_ROW: &str = "coop_few";

/// Best first; the last runs everywhere.
const ROWS: [Row; 4] = [
    Row { name: "coop", rounds_weights: true, kernel: coop::kernel },
    Row { name: "coop_small", rounds_weights: true, kernel: coop::small_kernel },
    Row { name: "coop_few", rounds_weights: true, kernel: coop::few_kernel },
    Row { name: "shared", rounds_weights: false, kernel: plain::kernel },
];

/// Attention of new tokens over keys and values that are there for each head: MLA's expanded form.
#[derive(Debug)]
pub struct MlaPrefill {
    spec: PrefillSpec,
    variant: &'static str,
    rows: u32,
    unit: u32,
    pipeline: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    /// Bound where there is room for no key: a row of the longest of keys and values, which a kernel may ask for.
    no_keys: wgpu::Buffer,
    max_groups: u32,
    /// Workgroups that fill the device.
    target_groups: u32,
}

/// A step's work list on the device. It grows as needed and serves every layer of the model.
#[derive(Debug, Default)]
pub struct PrefillStep {
    table: Table,
    num_tiles: u32,
    rows: u32,
    extent: PrefillExtent,
}

/// One layer's buffers, checked and bound for up to a number of query tokens and keys.
#[derive(Debug)]
pub struct PrefillBinding {
    /// `None` where there is room for no token.
    group: Option<wgpu::BindGroup>,
    pipeline: wgpu::ComputePipeline,
    num_heads: u32,
    rows: u32,
    max: PrefillExtent,
}

/// `PrefillParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    logit_scale: f32,
    max_tokens: u32,
    max_keys: u32,
    max_rows: u32,
    q_nope: Place,
    q_pe: Place,
    k_nope: Place,
    k_pe: Place,
    v: Place,
    out: Place,
    lse: Place,
}

/// Where an array begins, and its strides.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Place {
    at: u32,
    token_stride: u32,
    head_stride: u32,
}

impl Place {
    /// In units of `unit` elements. The stride of an axis of one is unused, and may be anything.
    fn new(
        view: &View<&wgpu::Buffer>,
        window: &Window<'_>,
        bytes: usize,
        unit: u32,
        [rows, heads]: [u32; 2],
    ) -> Self {
        let unit = u64::from(unit);
        let stride = |stride: u64, len: u32| if len > 1 { (stride / unit) as u32 } else { 0 };
        Self {
            at: ((view.offset - window.skipped(bytes)) / unit) as u32,
            token_stride: stride(view.token_stride, rows),
            head_stride: stride(view.head_stride, heads),
        }
    }
}

impl PrefillStep {
    /// Query tokens, keys and rows that the last [`MlaPrefill::prepare`] reaches: a binding needs as many.
    pub fn extent(&self) -> PrefillExtent {
        self.extent
    }
}

impl MlaPrefill {
    /// Compiles the best row that the device can run.
    ///
    /// # Errors
    /// Those of [`PrefillSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: PrefillSpec) -> Result<Self> {
        Self::with_variant(pipelines, spec, None)
    }

    /// As [`MlaPrefill::new`], made for sequences of at most so many query tokens: up to 64, such as those of decodes that share a
    /// prefix, have a row of their own. Others stay right.
    ///
    /// # Errors
    /// Those of [`MlaPrefill::new`].
    pub fn for_queries(pipelines: &Pipelines, spec: PrefillSpec, query_tokens: u32) -> Result<Self> {
        let few = query_tokens <= FEW && choose(pipelines.caps(), &spec, Some(FEW_ROW)).is_ok();
        let runs = pipelines.caps().kind != DeviceKind::Software;
        Self::with_variant(pipelines, spec, (few && runs).then_some(FEW_ROW))
    }

    /// Parts into which to split the keys of sequences that have `query_tokens` query tokens in all, so that they fill the device: see
    /// [`PrefillSequence::split_keys`].
    pub fn key_parts(&self, query_tokens: u32, keys: u32) -> u32 {
        let tiles = u64::from(query_tokens.div_ceil(self.rows).max(1)) * u64::from(self.spec.num_heads);
        let parts = (u64::from(self.target_groups) / tiles).min(keys.div_ceil(LEAST_PART_KEYS).into());
        parts.max(1) as u32
    }

    /// As [`MlaPrefill::new`]; `variant` forces one of [`MlaPrefill::ladder`].
    ///
    /// # Errors
    /// Those of [`MlaPrefill::new`], and [`Error::VariantUnavailable`].
    pub fn with_variant(pipelines: &Pipelines, spec: PrefillSpec, variant: Option<&str>) -> Result<Self> {
        spec.check()?;
        let (row, kernel) = choose(pipelines.caps(), &spec, variant)?;
        let device = pipelines.device();
        let step_layout = layout(device, "mla.prefill.step", &[Slot::Read])?;
        let read = if kernel.pins_loads { Slot::Write } else { Slot::Read };
        let slots = [Slot::Uniform, read, read, read, read, read, Slot::Write, Slot::Write];
        let layer_layout = layout(device, "mla.prefill.layer", &slots)?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table holds its count and as many tiles (`Table`, which nobody else writes, at least 64 words); `tile_of` reads inside of it
        //   whatever the number; a workgroup whose number is not below tiles times heads then leaves, and the others have read the tile
        //   that their number divided by NUM_HEADS says, for the head that is left;
        // - query tokens, keys and rows of the output go through `token_of`, `key_of` and `output_row`, which are below `max_tokens`,
        //   `max_keys` and `max_rows` whatever the table says, also for a tile without keys; where there is room for none, `no_keys` is
        //   bound, one row with strides of 0. `bind` refuses views that end past their buffers for so many (`Prefill::check`), and `window_of` binds up to there;
        // - columns are below P, R and V by comparison with them, or by the loops' bounds, which are constants;
        // - places in workgroup memory are sums of constants, thread numbers and loop counters below what the array was sized for
        //   (`plain.rs`, `coop.rs`).
        // Loops count up to constants, or in blocks to a tile's `num_keys`, which is below 2^30.
        let pipeline = pipeline(pipelines, &kernel.source, &[&step_layout, &layer_layout])?;
        let longest = spec.qk_nope_head_dim.max(spec.qk_rope_head_dim).max(spec.v_head_dim);
        let no_keys = scoped(device, "a row of keys", || {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("mla.prefill.no_keys"),
                size: u64::from(longest) * spec.dtype.bytes() as u64,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        })?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        let (variant, rows, unit) = (row.name, kernel.rows, kernel.unit);
        let target_groups = match pipelines.caps().kind {
            DeviceKind::Software => 8,
            DeviceKind::Integrated => 32,
            // A workgroup for each multiprocessor of an H200: more run one after the other, since one's memory fills it.
            _ => 132,
        };
        Ok(Self {
            spec,
            variant,
            rows,
            unit,
            pipeline,
            step_layout,
            layer_layout,
            no_keys,
            max_groups,
            target_groups,
        })
    }

    /// Every row there is, best first, and what keeps it from running on this device for a spec, if anything does.
    pub fn ladder(pipelines: &Pipelines, spec: &PrefillSpec) -> Vec<(PrefillVariant, Option<String>)> {
        let variant = |row: &Row| PrefillVariant { name: row.name, rounds_weights: row.rounds_weights };
        ROWS.iter().map(|row| (variant(row), (row.kernel)(pipelines.caps(), spec).err())).collect()
    }

    /// What this is compiled for.
    pub fn spec(&self) -> &PrefillSpec {
        &self.spec
    }

    /// The name of the row that was chosen.
    pub fn variant(&self) -> &'static str {
        self.variant
    }

    /// Checks a step's sequences, cuts them into tiles and uploads those.
    ///
    /// The upload takes effect before the next submit: give each step that shares a submit a [`PrefillStep`] of its own.
    ///
    /// # Errors
    /// [`Error::Shape`] where two sequences share a row of the output, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut PrefillStep,
        sequences: &[PrefillSequence],
    ) -> Result<()> {
        let extent = PrefillExtent::of(sequences)?;
        let tiles = tiles(sequences, self.rows);
        let need = tiles.len() as u64 * u64::from(self.spec.num_heads);
        let limit = (u64::from(self.max_groups) * u64::from(self.max_groups)).min(1 << 31);
        if need > limit {
            let cure = "attend fewer query tokens a step";
            return Err(Error::Limit { what: "workgroups of a prefill", need, limit, cure });
        }
        step.num_tiles = 0;
        step.rows = self.rows;
        step.extent = extent;
        let num_tiles = tiles.len() as u32;
        if num_tiles > 0 {
            let words = tiles.iter().flat_map(crate::prefill::plan::PrefillTile::words);
            step.table.upload(device, queue, &self.step_layout, num_tiles, words)?;
        }
        step.num_tiles = num_tiles;
        Ok(())
    }

    /// Checks and binds one layer for steps that reach up to `max`: see [`PrefillStep::extent`].
    ///
    /// # Errors
    /// [`Error::Scale`], [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for
    /// a buffer without `STORAGE`, [`Error::Aliased`] where an output is an input too, or both are one, [`Error::Limit`],
    /// [`Error::OutOfMemory`].
    pub fn bind(
        &self,
        device: &wgpu::Device,
        args: &Prefill<&wgpu::Buffer>,
        max: PrefillExtent,
    ) -> Result<PrefillBinding> {
        args.check(&self.spec, max, wgpu::Buffer::size)?;
        args.check_aliases(&self.spec, |a, b| a == b)?;
        let group =
            if max.tokens == 0 || max.rows == 0 { None } else { Some(self.group(device, args, max)?) };
        let (pipeline, num_heads, rows) = (self.pipeline.clone(), self.spec.num_heads, self.rows);
        Ok(PrefillBinding { group, pipeline, num_heads, rows, max })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &PrefillStep, binding: &PrefillBinding) -> Result<()> {
        step.extent.check_within(&binding.max)?;
        if step.num_tiles > 0 && step.rows != binding.rows {
            return Err(Error::LayoutMismatch {
                detail: "the step was prepared for a kernel with other tiles",
            });
        }
        Ok(())
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`MlaPrefill::check`] refuses records
    /// nothing and logs an error.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, step: &PrefillStep, binding: &PrefillBinding) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(table), Some(layer)) = (step.table.group(), &binding.group) else { return };
        let groups = step.num_tiles * binding.num_heads;
        if groups == 0 {
            return;
        }
        let x = groups.min(self.max_groups);
        pass.set_pipeline(&binding.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(x, groups.div_ceil(x), 1);
    }

    /// [`MlaPrefill::record_in`] in a pass of its own.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &PrefillStep, binding: &PrefillBinding) {
        self.record_in(&mut super::pass(encoder, "mla.prefill"), step, binding);
    }

    fn group(
        &self,
        device: &wgpu::Device,
        args: &Prefill<&wgpu::Buffer>,
        max: PrefillExtent,
    ) -> Result<wgpu::BindGroup> {
        let (spec, limits, heads) = (&self.spec, device.limits(), self.spec.num_heads);
        let mut windows = Vec::with_capacity(7);
        let mut places = [Place::default(); 5];
        for (i, (what, view, dim)) in args.read_views(spec).into_iter().enumerate() {
            let rows = if i < 2 { max.tokens } else { max.keys };
            let bytes = spec.dtype.bytes();
            if rows == 0 {
                windows.push(Window::new(&limits, what, &self.no_keys, 0..self.no_keys.size())?);
                continue;
            }
            let window = window_of(&limits, what, &view, [rows, heads, dim], bytes)?;
            places[i] = Place::new(&view, &window, bytes, self.unit, [rows, heads]);
            windows.push(window);
        }
        let rows = [max.rows, heads];
        let out = window_of(&limits, "out", &args.out, [max.rows, heads, spec.v_head_dim], spec.out.bytes())?;
        let lse = window_of(&limits, "lse", &args.lse, [max.rows, heads, 1], 4)?;
        let [q_nope, q_pe, k_nope, k_pe, v] = places;
        let params = Params {
            logit_scale: (f64::from(args.softmax_scale) * std::f64::consts::LOG2_E) as f32,
            max_tokens: max.tokens,
            max_keys: max.keys.max(1),
            max_rows: max.rows,
            q_nope,
            q_pe,
            k_nope,
            k_pe,
            v,
            out: Place::new(&args.out, &out, spec.out.bytes(), 4, rows),
            lse: Place::new(&args.lse, &lse, 4, 1, rows),
        };
        windows.extend([out, lse]);
        let resources = windows.iter().map(Window::resource);
        bind_group(device, "mla.prefill.layer", &self.layer_layout, bytemuck::bytes_of(&params), resources)
    }
}

/// The forced row, or the first that runs and pays.
fn choose(caps: &Caps, spec: &PrefillSpec, forced: Option<&str>) -> Result<(&'static Row, Kernel)> {
    let mut lacking = String::new();
    for row in ROWS.iter().filter(|row| forced.is_none_or(|name| name == row.name)) {
        let kernel = match (row.kernel)(caps, spec) {
            Ok(_) if forced.is_none() && row.rounds_weights && caps.kind == DeviceKind::Software => {
                Err("a software device only imitates matrices".into())
            }
            other => other,
        };
        match kernel {
            Ok(kernel) => {
                log::debug!("prefill: row {}{lacking}", row.name);
                return Ok((row, kernel));
            }
            Err(why) => lacking += &format!("; not {}: {why}", row.name),
        }
    }
    let name = forced.unwrap_or("any").to_owned();
    let known = || format!("there is no such row; the rows are {}", ROWS.map(|row| row.name).join(", "));
    let why = lacking.strip_prefix("; ").map_or_else(known, str::to_owned);
    Err(Error::VariantUnavailable { name, why })
}

/// The specs that tests compile.
#[cfg(test)]
fn specs() -> Vec<PrefillSpec> {
    use crate::Dtype;
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let dims = [[128, 64, 128], [192, 64, 256], [64, 32, 64], [16, 32, 16], [24, 0, 72]];
    let spec = |[p, r, v]: [u32; 3], dtype, out| PrefillSpec {
        num_heads: 16,
        qk_nope_head_dim: p,
        qk_rope_head_dim: r,
        v_head_dim: v,
        dtype,
        out,
    };
    let pairs = dtypes.iter().flat_map(|&dtype| dtypes.iter().map(move |&out| (dtype, out)));
    let pairs: Vec<_> = pairs.collect();
    dims.iter().flat_map(|&dims| pairs.iter().map(move |&(dtype, out)| spec(dims, dtype, out))).collect()
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    specs().iter().filter_map(|spec| plain::kernel(&Caps::WEBGPU, spec).ok()).map(|k| k.source).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let mut fields = vec![
        ("logit_scale", offset_of!(Params, logit_scale)),
        ("max_tokens", offset_of!(Params, max_tokens)),
        ("max_keys", offset_of!(Params, max_keys)),
        ("max_rows", offset_of!(Params, max_rows)),
    ];
    let places = [
        (offset_of!(Params, q_nope), ["q_nope_at", "q_nope_token_stride", "q_nope_head_stride"]),
        (offset_of!(Params, q_pe), ["q_pe_at", "q_pe_token_stride", "q_pe_head_stride"]),
        (offset_of!(Params, k_nope), ["k_nope_at", "k_nope_token_stride", "k_nope_head_stride"]),
        (offset_of!(Params, k_pe), ["k_pe_at", "k_pe_token_stride", "k_pe_head_stride"]),
        (offset_of!(Params, v), ["v_at", "v_token_stride", "v_head_stride"]),
        (offset_of!(Params, out), ["out_at", "out_token_stride", "out_head_stride"]),
        (offset_of!(Params, lse), ["lse_at", "lse_token_stride", "lse_head_stride"]),
    ];
    for (at, [a, b, c]) in places {
        fields.push((a, at + offset_of!(Place, at)));
        fields.push((b, at + offset_of!(Place, token_stride)));
        fields.push((c, at + offset_of!(Place, head_stride)));
    }
    ("PrefillParams", fields, size_of::<Params>())
}
