//! `head_project`: each token's rows times the matrix of their head.

use super::args::{Slot, bind_group, distinct_buffers, layout, window_of};
use super::pipeline;
use crate::gpu::Pipelines;
use crate::gpu::scope::scoped;
use crate::gpu::window::Window;
use crate::kernel::project::{ROWS, TARGET_GROUPS, Tile, choose};
use crate::layer::View;
use crate::{Error, Project, ProjectSpec, Result};

/// Tokens times the matrices of their heads, in f32: `absorb`, `v_up` and `k_up`. See [`Project`].
///
/// The row `coop` multiplies on cooperative matrices: f16 and bf16 weights, where the device has matrices and its compiler is not
/// software. f32 rows are then split in two parts that f16 holds, and bf16 rows and weights are scaled by powers of two, so that
/// nothing is lost that an f32 sum keeps. The row `direct` is for devices in software, and the row `plain` for all others; both run
/// everywhere.
#[derive(Debug)]
pub struct HeadProject {
    spec: ProjectSpec,
    variant: &'static str,
    why: String,
    /// For few tokens and for many.
    kernels: [Kernel; 2],
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

#[derive(Debug, Clone)]
struct Kernel {
    tile: Tile,
    pipeline: wgpu::ComputePipeline,
}

/// Which tokens a step projects: the same of `x` and `y`. It serves every layer of the model.
#[derive(Debug, Default)]
pub struct ProjectStep {
    uploaded: Option<(wgpu::Buffer, wgpu::BindGroup)>,
    range: TokenRange,
}

/// One layer's buffers, checked and bound.
#[derive(Debug)]
pub struct ProjectBinding {
    /// `None` where there is room for no token.
    group: Option<wgpu::BindGroup>,
    kernels: [Kernel; 2],
    spec: ProjectSpec,
    max_tokens: u32,
}

/// `ProjectParams` of the shaders.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    x_base: u32,
    x_token_stride: u32,
    x_head_stride: u32,
    y_base: u32,
    y_token_stride: u32,
    y_head_stride: u32,
    w_base: u32,
    w_head_stride: u32,
    w_row_stride: u32,
    max_tokens: u32,
    reserved_0: u32,
    reserved_1: u32,
}

/// `TokenRange` of the shaders.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct TokenRange {
    first: u32,
    count: u32,
    reserved_0: u32,
    reserved_1: u32,
}

impl ProjectStep {
    /// Tokens of the last [`HeadProject::prepare`].
    pub fn num_tokens(&self) -> u32 {
        self.range.count
    }
}

impl HeadProject {
    /// Compiles a projection on the best row that runs here.
    ///
    /// # Errors
    /// Those of [`ProjectSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: ProjectSpec) -> Result<Self> {
        Self::with_variant(pipelines, spec, None)
    }

    /// As [`HeadProject::new`], on the row of that name: `coop`, `direct` or `plain`.
    ///
    /// # Errors
    /// Those of [`HeadProject::new`], and [`Error::VariantUnavailable`].
    pub fn with_variant(pipelines: &Pipelines, spec: ProjectSpec, variant: Option<&str>) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        let (variant, tiles, why) = choose(variant, pipelines.caps(), &spec)?;
        log::debug!("head_project: {why}");
        let step_layout = layout(device, "mla.head_project.step", &[Slot::Uniform])?;
        let slots = [Slot::Uniform, Slot::Read, Slot::Read, Slot::Write];
        let layer_layout = layout(device, "mla.head_project.layer", &slots)?;
        // Every index is in bounds, for each step and binding, whichever pair is recorded:
        // - tokens: `first` and `count` are cut to max_tokens in the shader, since `prepare` may have been called again since
        //   `record`; rows past the last token read that one's, or nothing, and write nothing. `bind` refuses rows that end past the buffer for
        //   max_tokens tokens (`Project::check`), and `window_of` binds up to there;
        // - head < num_heads: the grid's second dimension;
        // - `plain` asks k < K and n < 8 * N_OCTS of what it stages and writes, and `direct` part < PARTS, which are all columns; in `coop` K is CHUNKS * CHUNK and N a multiple of
        //   COLUMNS, whose groups are the grid's first dimension (`Coop::of`). `Project::check` found the end of the last matrix
        //   inside the buffer;
        // - no sum of offset and strides wraps: a window has less than 2^32 bytes, and a stride that is used is less than that;
        // - workgroup arrays: a thread of `coop` stages octs of row thread / ROW_LANES < TOKENS at i * ROW_LANES + thread % ROW_LANES
        //   < CHUNK_OCTS <= X_PITCH, and W's items are below CHUNK * COLUMN_OCTS; matrices lie in [TOKENS, CHUNK] and
        //   [CHUNK, COLUMNS], as their splits divide them, and sums in a share's [TOKENS, SUM_QUADS].
        // Loops end: their bounds are constants, and what they count up by is at least 1. What a second attempt hangs on is the same for
        // all invocations of a workgroup, which have read all subgroups' tops.
        let compile = |tile: Tile| -> Result<Kernel> {
            let source = tile.source(pipelines.caps(), &spec);
            Ok(Kernel { tile, pipeline: pipeline(pipelines, &source, &[&step_layout, &layer_layout])? })
        };
        let kernels = [compile(tiles[0])?, compile(tiles[1])?];
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, variant, why, kernels, step_layout, layer_layout, max_groups })
    }

    /// The rows that run here for a spec, best first, and whether each is the one that [`HeadProject::new`] takes.
    pub fn rows(pipelines: &Pipelines, spec: &ProjectSpec) -> Vec<(&'static str, bool)> {
        let best = choose(None, pipelines.caps(), spec).map(|(name, ..)| name).ok();
        let runs = |name: &&str| choose(Some(name), pipelines.caps(), spec).is_ok();
        ROWS.into_iter().filter(runs).map(|name| (name, Some(name) == best)).collect()
    }

    /// What this projection is compiled for.
    pub fn spec(&self) -> &ProjectSpec {
        &self.spec
    }

    /// The name of the row.
    pub fn variant(&self) -> &'static str {
        self.variant
    }

    /// Why that row was chosen.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Uploads which tokens a step projects: `count` of them from `first` on, of `x` and of `y`.
    ///
    /// The upload takes effect before the next submit: give each step that shares a submit a [`ProjectStep`] of its own.
    ///
    /// # Errors
    /// [`Error::Limit`] for more tokens than a dispatch can have, [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut ProjectStep,
        first: u32,
        count: u32,
    ) -> Result<()> {
        // The tile for many tokens has most; the other one is taken below it only.
        let limit = u64::from(self.max_groups) * u64::from(self.kernels[1].tile.tokens());
        if u64::from(count) > limit || first.checked_add(count).is_none() {
            let need = u64::from(first) + u64::from(count);
            let cure = "project fewer tokens a step";
            return Err(Error::Limit { what: "tokens of a projection", need, limit, cure });
        }
        step.range.count = 0;
        let (buffer, group) = match step.uploaded.take() {
            Some(uploaded) => uploaded,
            None => self.range_buffer(device)?,
        };
        let range = TokenRange { first, count, ..TokenRange::default() };
        scoped(device, "a step's upload", || queue.write_buffer(&buffer, 0, bytemuck::bytes_of(&range)))?;
        step.uploaded = Some((buffer, group));
        step.range = range;
        Ok(())
    }

    /// Checks and binds one layer for steps whose tokens are among the first `args.num_tokens`.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer without `STORAGE`,
    /// [`Error::Aliased`] where `y` is an input too, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn bind(&self, device: &wgpu::Device, args: &Project<&wgpu::Buffer>) -> Result<ProjectBinding> {
        args.check(&self.spec, wgpu::Buffer::size)?;
        let group = if args.num_tokens == 0 { None } else { Some(self.group(device, args)?) };
        Ok(ProjectBinding {
            group,
            kernels: self.kernels.clone(),
            spec: self.spec,
            max_tokens: args.num_tokens,
        })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &ProjectStep, binding: &ProjectBinding) -> Result<()> {
        if step.range.first + step.range.count > binding.max_tokens {
            let detail = "the step's tokens end past the binding's num_tokens";
            return Err(Error::LayoutMismatch { detail });
        }
        if binding.spec != self.spec {
            return Err(Error::LayoutMismatch { detail: "the binding is of a projection of another spec" });
        }
        Ok(())
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`HeadProject::check`] refuses records nothing and
    /// logs an error.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, step: &ProjectStep, binding: &ProjectBinding) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some((_, range)), Some(layer)) = (&step.uploaded, &binding.group) else { return };
        let count = step.range.count;
        if count == 0 {
            return;
        }
        let kernel = self.kernel_for(&binding.kernels, count);
        let (columns, tokens) = (kernel.tile.column_groups(&self.spec), count.div_ceil(kernel.tile.tokens()));
        pass.set_pipeline(&kernel.pipeline);
        pass.set_bind_group(0, range, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(columns, self.spec.num_heads, tokens);
    }

    /// [`HeadProject::record_in`] in a pass of its own.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &ProjectStep, binding: &ProjectBinding) {
        self.record_in(&mut super::pass(encoder, "mla.head_project"), step, binding);
    }

    /// The tile for many tokens where they fill its device, or one of the other tile's.
    fn kernel_for<'a>(&self, [few, many]: &'a [Kernel; 2], count: u32) -> &'a Kernel {
        let fills = match many.tile {
            Tile::Plain { .. } | Tile::Direct { .. } => count > few.tile.tokens(),
            Tile::Coop(_) => {
                let groups = self.spec.num_heads * many.tile.column_groups(&self.spec);
                u64::from(groups) * u64::from(count.div_ceil(many.tile.tokens())) >= TARGET_GROUPS.into()
            }
        };
        if fills { many } else { few }
    }

    fn range_buffer(&self, device: &wgpu::Device) -> Result<(wgpu::Buffer, wgpu::BindGroup)> {
        scoped(device, "a step's tokens", || {
            let buffer = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("mla.head_project.step"),
                size: size_of::<TokenRange>() as u64,
                usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("mla.head_project.step"),
                layout: &self.step_layout,
                entries: &[wgpu::BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() }],
            });
            (buffer, group)
        })
    }

    fn group(&self, device: &wgpu::Device, args: &Project<&wgpu::Buffer>) -> Result<wgpu::BindGroup> {
        let (spec, limits) = (&self.spec, device.limits());
        let [input, weight, output] = [spec.input, spec.weight, spec.output].map(crate::Dtype::bytes);
        let dims = |dim| [args.num_tokens, spec.num_heads, dim];
        let x = window_of(&limits, "x", &args.x, dims(spec.k), input)?;
        let y = window_of(&limits, "y", &args.y, dims(spec.n), output)?;
        let (start, end) = (args.weight.offset * weight as u64, args.weight.end(spec) * weight as u64);
        let w = Window::new(&limits, "weight", args.weight.buffer, start..end)?;
        distinct_buffers(("y", args.y.buffer), &[("x", args.x.buffer), ("weight", args.weight.buffer)])?;

        let base = |offset: u64, window: &Window<'_>, bytes| ((offset - window.skipped(bytes)) / 8) as u32;
        // The stride of a dimension of one is unused and may be anything.
        let used = |count: u32, stride: u64| if count > 1 { (stride / 8) as u32 } else { 0 };
        let strides = |view: &View<&_>| {
            [used(args.num_tokens, view.token_stride), used(spec.num_heads, view.head_stride)]
        };
        let ([x_token_stride, x_head_stride], [y_token_stride, y_head_stride]) =
            (strides(&args.x), strides(&args.y));
        let params = Params {
            x_base: base(args.x.offset, &x, input),
            x_token_stride,
            x_head_stride,
            y_base: base(args.y.offset, &y, output),
            y_token_stride,
            y_head_stride,
            w_base: base(args.weight.offset, &w, weight),
            w_head_stride: used(spec.num_heads, args.weight.head_stride),
            w_row_stride: (args.weight.row_stride / 8) as u32,
            max_tokens: args.num_tokens,
            reserved_0: 0,
            reserved_1: 0,
        };
        let resources = [x.resource(), w.resource(), y.resource()];
        bind_group(
            device,
            "mla.head_project.layer",
            &self.layer_layout,
            bytemuck::bytes_of(&params),
            resources,
        )
    }
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<crate::compose::Source> {
    use crate::Dtype;
    let floats = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let mut all = Vec::new();
    for input in floats {
        for weight in floats {
            for output in floats {
                for order in [crate::WeightOrder::Kn, crate::WeightOrder::Nk] {
                    let spec = ProjectSpec { input, weight, output, num_heads: 3, k: 40, n: 72, order };
                    let caps = crate::Caps::WEBGPU;
                    all.extend([1, 4].map(|rows| Tile::Plain { rows }.source(&caps, &spec)));
                    all.extend([1, 4].map(|rows| Tile::Direct { rows }.source(&caps, &spec)));
                }
            }
        }
    }
    all
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let fields = vec![
        ("x_base", offset_of!(Params, x_base)),
        ("x_token_stride", offset_of!(Params, x_token_stride)),
        ("x_head_stride", offset_of!(Params, x_head_stride)),
        ("y_base", offset_of!(Params, y_base)),
        ("y_token_stride", offset_of!(Params, y_token_stride)),
        ("y_head_stride", offset_of!(Params, y_head_stride)),
        ("w_base", offset_of!(Params, w_base)),
        ("w_head_stride", offset_of!(Params, w_head_stride)),
        ("w_row_stride", offset_of!(Params, w_row_stride)),
        ("max_tokens", offset_of!(Params, max_tokens)),
        ("reserved_0", offset_of!(Params, reserved_0)),
        ("reserved_1", offset_of!(Params, reserved_1)),
    ];
    ("ProjectParams", fields, size_of::<Params>())
}
