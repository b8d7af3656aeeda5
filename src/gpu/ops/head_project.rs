//! `head_project`: each token's rows times the matrix of their head.

use std::ops::Range;

use super::e4m3_scale::Scale;
use super::guard::guard_window;
use super::single::uniform;
use crate::base::error::{Error, Result};
use crate::base::view::{View, check_tokens};
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::formats::Weights;
use crate::gpu::kernels::project::{TARGET_GROUPS, Tile, VARIANTS};
use crate::gpu::pipelines::{
    Access, Layout, Pipeline, buffer, check_uniform, group_with_params, groups_of_regions, layout, part,
};
use crate::gpu::ring::{REGIONS, Ring};
use crate::gpu::scope::scoped;
use crate::gpu::{Gpu, limits};
use crate::ops::guard::GuardBounds;
use crate::ops::variants::{candidates, choose};
use crate::ops::{Candidate, Choice, HeadProject, HeadProjectArgs, Kernel, OpOptions};

/// The variant `coop` multiplies on cooperative matrices: f16 and bf16 weights, where the device has matrices and its compiler is not
/// software. f32 rows are then split in two parts that f16 holds, and bf16 rows and weights are scaled by powers of two, so that
/// nothing is lost that an f32 sum keeps. `direct` is for devices in software, and `plain` for all others; both run everywhere.
#[derive(Debug)]
pub struct Pipes {
    /// For few tokens and for many.
    tiles: [(Tile, Pipeline); 2],
    step: Layout,
    layer: Layout,
}

/// Which tokens a step projects.
#[derive(Debug)]
pub struct Tokens {
    buffer: wgpu::Buffer,
    /// One for each region.
    groups: Vec<wgpu::BindGroup>,
    ring: Ring,
    count: u32,
}

uniform! {
    "ProjectParams":
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
        scale: f32,
        limit: f32,
        head_scale_base: u32,
        head_scale_stride: u32,
        guard_row: u32,
        guard_flushed: u32,
        guard_top: u32,
        reserved_0: u32,
        reserved_1: u32,
        reserved_2: u32,
        out_scale: Scale,
    }
}

uniform! {
    "TokenRange":
    struct TokenRange {
        first: u32,
        count: u32,
        reserved_0: u32,
        reserved_1: u32,
    }
}

impl Kernel<HeadProject> for Gpu {
    type Kernels = Pipes;
    type Step = Tokens;
    /// `None` where there is room for no token.
    type Binding = Option<wgpu::BindGroup>;

    fn kernel_variants(&self, spec: &HeadProject) -> Vec<Candidate> {
        candidates(&VARIANTS, self.caps(), spec)
    }

    fn kernel_compile(&self, spec: &HeadProject, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        let (tiles, choice) = choose(&VARIANTS, self.caps(), spec, options.variant.as_deref())?;
        let step = layout(self, "mla.head_project.step", &[Access::Uniform])?;
        let mut entries = vec![Access::Uniform, Access::Read, Access::Read, Access::Write];
        if spec.weight.has_scales() {
            entries.push(Access::Read);
        }
        if spec.guard {
            entries.push(Access::Write);
        }
        let layer = layout(self, "mla.head_project.layer", &entries)?;
        // bounds: head_project
        let compile = |tile: Tile| {
            let (name, most) = ("max_compute_workgroups_per_dimension", self.caps().max_workgroups.into());
            let grid = [tile.column_groups(spec), spec.num_heads];
            limits::check(grid.map(|groups| (name, groups.into(), most)))?;
            let pipeline = self.pipeline(&tile.source(self.caps(), spec), &[&step, &layer])?;
            Ok::<_, Error>((tile, pipeline))
        };
        let tiles = [compile(tiles[0])?, compile(tiles[1])?];
        Ok((Pipes { tiles, step, layer }, (), choice))
    }

    fn kernel_step(&self, _: &HeadProject, pipes: &Pipes, _: u32) -> Result<Tokens> {
        Tokens::new(self, pipes)
    }

    fn kernel_prepare(
        &self,
        _: &HeadProject,
        pipes: &Pipes,
        step: &mut Tokens,
        tokens: Range<u32>,
    ) -> Result<u32> {
        let (count, end) = check_tokens(&tokens)?;
        let range = TokenRange { first: tokens.start, count, ..TokenRange::default() };
        if !step.ring.turn() {
            *step = Tokens::new(self, pipes)?;
        }
        let offset = u64::from(step.ring.current() * self.uniform_stride());
        let write = || self.queue().write_buffer(&step.buffer, offset, bytemuck::bytes_of(&range));
        scoped(self.device(), "a step's upload", write)?;
        step.count = count;
        Ok(end)
    }

    fn kernel_bind(
        &self,
        spec: &HeadProject,
        pipes: &Pipes,
        args: &HeadProjectArgs<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<Option<wgpu::BindGroup>> {
        // The limit of the tile for many tokens: the other tile is used for fewer only.
        let limit = u64::from(self.caps().max_workgroups) * u64::from(pipes.tiles[1].0.tokens());
        if u64::from(max_tokens) > limit {
            let cure = "project in several steps, and bind a part of the tokens for each, or make the device with a higher max_compute_workgroups_per_dimension";
            return Err(Error::Limit {
                what: "tokens of a projection",
                need: max_tokens.into(),
                limit,
                cure,
            });
        }
        if max_tokens == 0 {
            return Ok(None);
        }
        let (heads, [input, output]) = (spec.num_heads, [spec.input.bytes(), spec.output.bytes()]);
        let x = Window::of(self, "x", &args.x, [max_tokens, heads, spec.k], input)?;
        let y = Window::of(self, "y", &args.y, [max_tokens, heads, spec.n], output)?;
        let weight = &args.weight;
        let w = Window::new(self, "weight", weight.buffer, weight.bytes(spec.weight, spec.matrices()))?;
        let unit = Weights::of(spec.weight).unit;
        let scales = weight.scales.as_ref().map(|scales| {
            let bytes = scales.offset * 4..scales.end(heads) * 4;
            Ok::<_, Error>((scales, Window::new(self, "scales", scales.buffer, bytes)?))
        });
        let scales = scales.transpose()?;
        let strides =
            |view: &View<_>| [stride(max_tokens, view.token_stride, 8), stride(heads, view.head_stride, 8)];
        let ([x_token_stride, x_head_stride], [y_token_stride, y_head_stride]) =
            (strides(&args.x), strides(&args.y));
        let (guard, guard_row) = guard_window(self, args.guard.as_ref(), 1)?;
        let bounds = GuardBounds::of(spec.output, args.out_scale);
        let params = Params {
            x_base: x.at(args.x.offset, input, 8),
            x_token_stride,
            x_head_stride,
            y_base: y.at(args.y.offset, output, 8),
            y_token_stride,
            y_head_stride,
            w_base: w.at(weight.offset, spec.weight.unit_bytes(), unit),
            w_head_stride: stride(heads, weight.head_stride, unit),
            w_row_stride: (weight.row_stride / unit) as u32,
            max_tokens,
            scale: args.scale,
            limit: args.limit(spec.output),
            head_scale_base: scales.as_ref().map_or(0, |(at, window)| window.at(at.offset, 4, 1)),
            head_scale_stride: scales.as_ref().map_or(0, |(at, _)| stride(heads, at.head_stride, 1)),
            guard_row,
            guard_flushed: bounds.flushed,
            guard_top: bounds.top,
            out_scale: Scale::new(args.out_scale),
            ..Params::default()
        };
        let scales = scales.as_ref().map(|(_, window)| window.resource());
        let guard = guard.map(|window| window.resource());
        let resources = [x.resource(), w.resource(), y.resource()].into_iter().chain(scales).chain(guard);
        group_with_params(self, "mla.head_project.layer", &pipes.layer, &params, resources).map(Some)
    }

    fn kernel_record(
        &self,
        spec: &HeadProject,
        pipes: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Tokens,
        binding: &Option<wgpu::BindGroup>,
    ) -> Result<()> {
        if let (Some(layer), count @ 1..) = (binding, step.count) {
            let (tile, pipeline) = pipes.for_tokens(spec, count);
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, &step.groups[step.ring.record() as usize], &[]);
            pass.set_bind_group(1, layer, &[]);
            let (columns, tokens) = (tile.column_groups(spec), count.div_ceil(tile.tokens()));
            pass.dispatch_workgroups(columns, spec.num_heads, tokens);
        }
        Ok(())
    }
}

impl Tokens {
    fn new(gpu: &Gpu, pipes: &Pipes) -> Result<Self> {
        check_uniform(gpu, &TokenRange::default())?;
        let (label, bytes) = ("mla.head_project.step", u64::from(gpu.uniform_stride()) * u64::from(REGIONS));
        let buffer = buffer(gpu, label, bytes, wgpu::BufferUsages::UNIFORM)?;
        let stride = u64::from(gpu.uniform_stride());
        let range = |region: u64| [part(&buffer, region * stride, size_of::<TokenRange>() as u64)];
        let groups = groups_of_regions(gpu, label, &pipes.step, REGIONS, range)?;
        Ok(Self { buffer, groups, ring: Ring::new(REGIONS), count: 0 })
    }
}

impl Pipes {
    /// The tile for many tokens where they fill its device, or one of the other tile's.
    fn for_tokens(&self, spec: &HeadProject, count: u32) -> &(Tile, Pipeline) {
        let [few, many] = &self.tiles;
        let fills = match many.0 {
            Tile::Plain { .. } | Tile::Direct { .. } => count > few.0.tokens(),
            Tile::Coop(_) => {
                let groups = spec.num_heads * many.0.column_groups(spec);
                u64::from(groups) * u64::from(count.div_ceil(many.0.tokens())) >= TARGET_GROUPS.into()
            }
        };
        if fills { many } else { few }
    }
}

#[cfg(test)]
impl super::Shaders for HeadProject {
    fn every_source(samples: &[Self]) -> Vec<crate::gpu::kernels::compose::Source> {
        let caps = crate::gpu::caps::Caps::WEBGPU;
        let tiles = [1, 4].map(|rows| [Tile::Plain { rows }, Tile::Direct { rows }]);
        let of = |spec: &Self| {
            tiles.as_flattened().iter().map(|tile| tile.source(&caps, spec)).collect::<Vec<_>>()
        };
        samples.iter().flat_map(of).collect()
    }

    fn layouts() -> Vec<super::HostLayout> {
        [super::layouts_of::<Params>(), super::layouts_of::<TokenRange>()].concat()
    }
}
