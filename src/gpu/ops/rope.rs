//! `rope`: rows rotated by their positions.

use crate::gpu::kernels::formats::Format;
use std::ops::Range;

use super::table::Table;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::compose::{Const, Source, compose};
use crate::gpu::pipelines::{Access, Pipe, Pipeline, dispatch, group_with_params};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, OpOptions, Rope, RopeArgs, RopeLayout};
use crate::view::{View, check_tokens};
use crate::{Dtype, Error, Result};

/// More would not fit the numbers of a grid.
const MAX_ITEMS: u64 = 1 << 30;

/// Of an input with a buffer of its own, and in place.
#[derive(Debug)]
pub struct Pipes {
    pub(super) apart: Pipe,
    pub(super) in_place: Pipe,
}

/// A layer's buffers, and the kernel for them.
#[derive(Debug)]
pub struct Layer {
    /// `None` where there is room for no token.
    pub(super) group: Option<wgpu::BindGroup>,
    pub(super) pipeline: Pipeline,
}

/// `RopeParams` of the shaders.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Params {
    x_base_quads: u32,
    x_token_stride_quads: u32,
    x_head_stride_quads: u32,
    max_position: u32,
    y_base_quads: u32,
    y_token_stride_quads: u32,
    y_head_stride_quads: u32,
    max_tokens: u32,
    scale: f32,
    reserved_0: u32,
    reserved_1: u32,
    reserved_2: u32,
}

/// What is bound of a rotation's buffers.
pub(super) struct Windows<'a> {
    positions: Window<'a>,
    cos_sin: Window<'a>,
    y: Window<'a>,
    /// `None` in place.
    x: Option<Window<'a>>,
}

impl Pipes {
    /// For each of both.
    ///
    /// # Errors
    /// Those of `compile`.
    pub(super) fn new(compile: impl Fn(Place) -> Result<Pipe>) -> Result<Self> {
        Ok(Self { apart: compile(Place::Apart)?, in_place: compile(Place::InPlace)? })
    }

    pub(super) fn of(&self, in_place: bool) -> &Pipe {
        if in_place { &self.in_place } else { &self.apart }
    }
}

impl Kernel<Rope> for Gpu {
    type Kernels = Pipes;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &Rope, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        let labels = ["mla.rope.step", "mla.rope.layer"];
        let entries = [Access::Uniform, Access::Read, Access::Read, Access::Write, Access::Read];
        // Every index is in bounds, for every pair of table and binding:
        // - the table always has two words (`Table`, which nothing else writes);
        // - token < max_tokens, by a `min` in the shader, and head < num_heads as HEAD_UNITS counts units: `check_args` refuses views whose
        //   last row ends past the buffer, positions that are fewer, and the windows reach at least up to there. Whether an item
        //   is written is decided from the table's numbers, which may wrap, before the `min`;
        // - 0 <= position < max_position, by `max` and `min` in the shader, and cos_sin has as many rows (`check_args`).
        // There are no loops.
        let compile = |place| Pipe::new(self, labels, &entries, &source(spec, place));
        Ok((Pipes::new(compile)?, (), only(options)?))
    }

    fn kernel_step(&self, _: &Rope, _: &Pipes, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &Rope,
        pipes: &Pipes,
        step: &mut Table,
        tokens: Range<u32>,
    ) -> Result<u32> {
        let (count, end) = check_tokens(&tokens)?;
        self.grid(items(spec, count))?;
        step.upload(self, &pipes.apart.step, count, [tokens.start])?;
        Ok(end)
    }

    fn kernel_bind(
        &self,
        spec: &Rope,
        pipes: &Pipes,
        args: &RopeArgs<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<Layer> {
        checked_items(max_tokens.into(), token_units(spec))?;
        let in_place = args.is_in_place(|a, b| a == b);
        let pipe = pipes.of(in_place);
        let mut group = None;
        if max_tokens > 0 {
            let (params, windows) = Params::new(self, spec, args, max_tokens, in_place, ["x", "y"])?;
            let resources = windows.resources();
            group = Some(group_with_params(self, "mla.rope.layer", &pipe.layer, &params, resources)?);
        }
        Ok(Layer { group, pipeline: pipe.pipeline.clone() })
    }

    fn kernel_record(
        &self,
        spec: &Rope,
        _: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        if let (Some(table), Some(group), tokens @ 1..) = (step.group(), &layer.group, step.count()) {
            dispatch(pass, &layer.pipeline, &[table, group], self.grid(items(spec, tokens))?);
        }
        Ok(())
    }
}

impl<'a> Windows<'a> {
    /// Bindings 1 to 4. In place the shader has no input of its own, and the positions stand in for it.
    pub(super) fn resources(&self) -> [wgpu::BindingResource<'a>; 4] {
        let x = self.x.unwrap_or(self.positions);
        [self.positions, self.cos_sin, self.y, x].map(|window| window.resource())
    }
}

impl Params {
    /// Rows of at least one token, checked; the names are those of `x` and `y` for errors.
    pub(super) fn new<'a>(
        gpu: &Gpu,
        spec: &Rope,
        args: &RopeArgs<&'a wgpu::Buffer>,
        max_tokens: u32,
        in_place: bool,
        [x_name, y_name]: [&'static str; 2],
    ) -> Result<(Self, Windows<'a>)> {
        let RopeArgs { x, y, max_position, scale, .. } = *args;
        let (dims, bytes) = ([max_tokens, spec.num_heads, spec.rope_dim], spec.dtype.bytes());
        let (x_window, y_window) = if in_place {
            // One binding for both.
            let [tokens, heads, dim] = dims.map(u64::from);
            let end = |view: &View<_>| view.end(tokens, heads, dim) * bytes as u64;
            let range = x.offset.min(y.offset) * bytes as u64..end(&x).max(end(&y));
            (None, Window::new(gpu, y_name, y.buffer, range)?)
        } else {
            (Some(Window::of(gpu, x_name, &x, dims, bytes)?), Window::of(gpu, y_name, &y, dims, bytes)?)
        };
        let table_bytes = u64::from(max_position) * u64::from(spec.rope_dim) * 4;
        let windows = Windows {
            positions: Window::new(gpu, "positions", args.positions, 0..u64::from(max_tokens) * 4)?,
            cos_sin: Window::new(gpu, "cos_sin", args.cos_sin, 0..table_bytes)?,
            y: y_window,
            x: x_window,
        };
        let params = Self {
            x_base_quads: x_window.unwrap_or(y_window).at(x.offset, bytes, 4),
            x_token_stride_quads: stride(max_tokens, x.token_stride, 4),
            x_head_stride_quads: stride(spec.num_heads, x.head_stride, 4),
            max_position,
            y_base_quads: y_window.at(y.offset, bytes, 4),
            y_token_stride_quads: stride(max_tokens, y.token_stride, 4),
            y_head_stride_quads: stride(spec.num_heads, y.head_stride, 4),
            max_tokens,
            scale,
            reserved_0: 0,
            reserved_1: 0,
            reserved_2: 0,
        };
        Ok((params, windows))
    }
}

/// Units of a token: four pairs of a head each.
pub(super) fn token_units(spec: &Rope) -> u64 {
    u64::from(spec.num_heads) * u64::from(spec.rope_dim / 8)
}

fn items(spec: &Rope, tokens: u32) -> u64 {
    u64::from(tokens) * token_units(spec)
}

/// # Errors
/// [`Error::Limit`] where a grid does not reach all items of so many tokens.
pub(super) fn checked_items(tokens: u64, items_per_token: u64) -> Result<()> {
    let limit = MAX_ITEMS / items_per_token.max(1);
    if tokens > limit {
        let cure = "rotate in several steps, and bind a part of the tokens for each";
        return Err(Error::Limit { what: "tokens of a rotation", need: tokens, limit, cure });
    }
    Ok(())
}

/// Whether a rotation's input has a buffer of its own.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    Apart,
    InPlace,
}

impl Place {
    #[cfg(test)]
    pub(super) const ALL: [Self; 2] = [Self::Apart, Self::InPlace];

    fn lib(self) -> &'static str {
        match self {
            Self::Apart => include_str!("../../../shaders/lib/rope_apart.wgsl"),
            Self::InPlace => include_str!("../../../shaders/lib/rope_in_place.wgsl"),
        }
    }
}

/// A part of a variant's name.
pub(super) fn name(spec: &Rope, place: Place) -> String {
    let layout = match spec.layout {
        RopeLayout::Interleaved => "interleaved",
        RopeLayout::HalfSplit => "half_split",
    };
    let place = match place {
        Place::Apart => "apart",
        Place::InPlace => "in_place",
    };
    format!("{layout}.{place}.{}", spec.dtype)
}

/// The lines of a prelude that every rotation has.
pub(super) fn prelude(spec: &Rope) -> Vec<(&'static str, Const)> {
    let is_interleaved = spec.layout == RopeLayout::Interleaved;
    vec![
        ("GROUP", Const::U32(GROUP)),
        ("UNITS", Const::U32(spec.rope_dim / 8)),
        ("HEAD_UNITS", Const::U32(token_units(spec) as u32)),
        ("INTERLEAVED", Const::U32(is_interleaved.into())),
        ("QueryQuad", Const::Alias(Format::of(spec.dtype).rotated.0)),
    ]
}

/// The files of every rotation, without `round` and the `quad_*`s.
pub(super) fn libs(place: Place) -> [&'static str; 4] {
    [
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/rotate.wgsl"),
        include_str!("../../../shaders/lib/rotate_rows.wgsl"),
        place.lib(),
    ]
}

/// What a dtype is read and rounded by under the name of a part: `query` with `QueryQuad`, or `input` with `InQuad`.
pub(super) fn role(part: &str, alias: &str, dtype: Dtype) -> String {
    format!(
        "fn {part}_bits(quad: {alias}) -> vec4<u32> {{\n    return widen_{dtype}(quad);\n}}\n\n\
         fn {part}_quad(bits: vec4<u32>) -> {alias} {{\n    return narrow_{dtype}(bits);\n}}\n"
    )
}

fn source(spec: &Rope, place: Place) -> Source {
    let query = role("query", "QueryQuad", spec.dtype);
    let mut files = vec![
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.dtype).rotated.1,
        query.as_str(),
    ];
    files.extend(libs(place));
    files.push(include_str!("../../../shaders/rope.wgsl"));
    compose("rope", &name(spec, place), &prelude(spec), &files)
}

/// The layouts and dtypes of every rotation.
#[cfg(test)]
pub(super) fn every_spec() -> Vec<Rope> {
    let layouts = [RopeLayout::Interleaved, RopeLayout::HalfSplit];
    let spec = |layout| {
        let of = move |dtype| Rope { dtype, num_heads: 16, rope_dim: 64, layout };
        [Dtype::F32, Dtype::F16, Dtype::Bf16].map(of)
    };
    layouts.into_iter().flat_map(spec).collect()
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    every_spec().iter().flat_map(|spec| Place::ALL.map(|place| source(spec, place))).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("RopeParams", Params: x_base_quads, x_token_stride_quads, x_head_stride_quads, max_position, y_base_quads, y_token_stride_quads, y_head_stride_quads, max_tokens, scale, reserved_0, reserved_1, reserved_2)
}
