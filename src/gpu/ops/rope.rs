//! `rope`: rows rotated by their positions.

use super::args::{Slot, bind_group, layout, window_of};
use super::table::Table;
use super::{GROUP, grid, pipeline};
use crate::compose::{Const, Source, compose};
use crate::gpu::{Pipelines, window::Window};
use crate::layer::View;
use crate::{Dtype, Error, Result, Rope, RopeLayout, RopeSpec};

/// More would not fit the numbers of a grid: see [`grid`].
pub(super) const MAX_ITEMS: u64 = 1 << 30;

/// Rotates rows by their tokens' positions: see [`Rope`].
#[derive(Debug)]
pub struct Rotate {
    spec: RopeSpec,
    apart: wgpu::ComputePipeline,
    in_place: wgpu::ComputePipeline,
    step_layout: wgpu::BindGroupLayout,
    layer_layout: wgpu::BindGroupLayout,
    max_groups: u32,
}

/// A step's tokens on the device. It serves every layer of the model, queries and keys alike.
#[derive(Debug, Default)]
pub struct RotateStep {
    table: Table,
    first: u32,
    tokens: u32,
}

/// One layer's buffers, checked and bound for up to a number of tokens.
#[derive(Debug)]
pub struct RotateBinding {
    /// `None` where there is room for no token.
    group: Option<wgpu::BindGroup>,
    pipeline: wgpu::ComputePipeline,
    max_tokens: u32,
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
}

/// What is bound of a rotation's buffers.
pub(super) struct Windows<'a> {
    positions: Window<'a>,
    cos_sin: Window<'a>,
    y: Window<'a>,
    /// `None` in place.
    x: Option<Window<'a>>,
}

impl RotateStep {
    /// Tokens of the last [`Rotate::prepare`].
    pub fn num_tokens(&self) -> u32 {
        self.tokens
    }
}

impl Rotate {
    /// Compiles the rotation of a spec.
    ///
    /// # Errors
    /// Those of [`RopeSpec::check`], [`Error::OutOfMemory`] and [`Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: RopeSpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        let step_layout = layout(device, "mla.rope.step", &[Slot::Read])?;
        let slots = [Slot::Uniform, Slot::Read, Slot::Read, Slot::Write, Slot::Read];
        let layer_layout = layout(device, "mla.rope.layer", &slots)?;
        // Every index is in bounds, for each table and binding, whichever pair is recorded:
        // - the table always has two words (`Table`, which nobody else writes);
        // - token < max_tokens, by a `min` in the shader, and head < num_heads as HEAD_UNITS counts units: `bind` refuses views whose
        //   last row ends past the buffer (`Rope::check`), positions that are fewer, and the windows reach at least up to there. What is
        //   written is asked for with the table's numbers, which may wrap: the `min` is after that;
        // - 0 <= position < max_position, by `max` and `min` in the shader, and cos_sin has as many rows (`Rope::check`).
        // There are no loops.
        let compile = |place| pipeline(pipelines, &source(&spec, place), &[&step_layout, &layer_layout]);
        let (apart, in_place) = (compile(Place::Apart)?, compile(Place::InPlace)?);
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, apart, in_place, step_layout, layer_layout, max_groups })
    }

    /// What this rotation is compiled for.
    pub fn spec(&self) -> &RopeSpec {
        &self.spec
    }

    /// Says which tokens a step rotates: `num_tokens` from `first_token` on, in `x`, `y` and `positions` alike.
    ///
    /// The upload takes effect before the next submit: give each step that shares a submit a [`RotateStep`] of its own.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn prepare(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        step: &mut RotateStep,
        first_token: u32,
        num_tokens: u32,
    ) -> Result<()> {
        checked_items(u64::from(first_token) + u64::from(num_tokens), token_units(&self.spec))?;
        step.tokens = 0;
        step.table.upload(device, queue, &self.step_layout, num_tokens, [first_token])?;
        (step.first, step.tokens) = (first_token, num_tokens);
        Ok(())
    }

    /// Checks and binds one layer; `num_tokens` is the most that a step may reach.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::Shape`], [`Error::BufferTooSmall`], [`Error::BufferUsage`] for a buffer without `STORAGE`,
    /// [`Error::Aliased`], [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn bind(&self, device: &wgpu::Device, args: &Rope<&wgpu::Buffer>) -> Result<RotateBinding> {
        args.check(&self.spec, wgpu::Buffer::size)?;
        let in_place = args.is_in_place(&self.spec, |a, b| a == b)?;
        checked_items(args.num_tokens.into(), token_units(&self.spec))?;
        let group = if args.num_tokens == 0 { None } else { Some(self.group(device, args, in_place)?) };
        let pipeline = if in_place { &self.in_place } else { &self.apart };
        Ok(RotateBinding { group, pipeline: pipeline.clone(), max_tokens: args.num_tokens })
    }

    /// Whether a step and a binding can be recorded together.
    ///
    /// # Errors
    /// [`Error::LayoutMismatch`].
    pub fn check(&self, step: &RotateStep, binding: &RotateBinding) -> Result<()> {
        if step.tokens > 0 && u64::from(step.first) + u64::from(step.tokens) > binding.max_tokens.into() {
            let detail = "the step rotates tokens past the binding's num_tokens";
            return Err(Error::LayoutMismatch { detail });
        }
        Ok(())
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail: a pair that [`Rotate::check`] refuses records nothing and logs
    /// an error.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, step: &RotateStep, binding: &RotateBinding) {
        if let Err(error) = self.check(step, binding) {
            log::error!("nothing recorded: {error}");
            return;
        }
        let (Some(table), Some(layer)) = (step.table.group(), &binding.group) else { return };
        if step.tokens == 0 {
            return;
        }
        let (x, y) = grid(u64::from(step.tokens) * token_units(&self.spec), self.max_groups);
        pass.set_pipeline(&binding.pipeline);
        pass.set_bind_group(0, table, &[]);
        pass.set_bind_group(1, layer, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }

    /// [`Rotate::record_in`] in a pass of its own.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, step: &RotateStep, binding: &RotateBinding) {
        self.record_in(&mut super::pass(encoder, "mla.rope"), step, binding);
    }

    fn group(
        &self,
        device: &wgpu::Device,
        args: &Rope<&wgpu::Buffer>,
        in_place: bool,
    ) -> Result<wgpu::BindGroup> {
        let (params, windows) = Params::new(&device.limits(), &self.spec, args, in_place, ["x", "y"])?;
        let params = bytemuck::bytes_of(&params);
        bind_group(device, "mla.rope.layer", &self.layer_layout, params, windows.resources())
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
    /// Rows of at least one token, checked; `names` are those of `x` and `y` for errors.
    pub(super) fn new<'a>(
        limits: &wgpu::Limits,
        spec: &RopeSpec,
        args: &Rope<&'a wgpu::Buffer>,
        in_place: bool,
        [x_name, y_name]: [&'static str; 2],
    ) -> Result<(Self, Windows<'a>)> {
        let Rope { x, y, num_tokens, max_position, .. } = *args;
        let (dims, bytes) = ([num_tokens, spec.num_heads, spec.rope_dim], spec.dtype.bytes());
        let (x_window, y_window) = if in_place {
            // One binding for both.
            let [heads, dim] = [spec.num_heads, spec.rope_dim].map(u64::from);
            let end = |view: &View<&wgpu::Buffer>| view.end(num_tokens.into(), heads, dim) * bytes as u64;
            let range = x.offset.min(y.offset) * bytes as u64..end(&x).max(end(&y));
            (None, Window::new(limits, y_name, y.buffer, range)?)
        } else {
            let x_window = window_of(limits, x_name, &x, dims, bytes)?;
            (Some(x_window), window_of(limits, y_name, &y, dims, bytes)?)
        };
        let table_bytes = u64::from(max_position) * u64::from(spec.rope_dim) * 4;
        let windows = Windows {
            positions: Window::new(limits, "positions", args.positions, 0..u64::from(num_tokens) * 4)?,
            cos_sin: Window::new(limits, "cos_sin", args.cos_sin, 0..table_bytes)?,
            y: y_window,
            x: x_window,
        };
        let base = |view: &View<&wgpu::Buffer>, window: &Window<'_>| {
            ((view.offset - window.skipped(bytes)) / 4) as u32
        };
        // The stride of a dimension of one is unused and may be anything; every other is less than the window.
        let used = |count: u32, stride: u64| if count > 1 { (stride / 4) as u32 } else { 0 };
        let params = Self {
            x_base_quads: base(&x, &x_window.unwrap_or(y_window)),
            x_token_stride_quads: used(num_tokens, x.token_stride),
            x_head_stride_quads: used(spec.num_heads, x.head_stride),
            max_position,
            y_base_quads: base(&y, &y_window),
            y_token_stride_quads: used(num_tokens, y.token_stride),
            y_head_stride_quads: used(spec.num_heads, y.head_stride),
            max_tokens: num_tokens,
        };
        Ok((params, windows))
    }
}

/// Units of a token: four pairs of a head each.
pub(super) fn token_units(spec: &RopeSpec) -> u64 {
    u64::from(spec.num_heads) * u64::from(spec.rope_dim / 8)
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
pub(super) fn name(spec: &RopeSpec, place: Place) -> String {
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
pub(super) fn prelude(spec: &RopeSpec) -> Vec<(&'static str, Const)> {
    let is_interleaved = spec.layout == RopeLayout::Interleaved;
    vec![
        ("GROUP", Const::U32(GROUP)),
        ("UNITS", Const::U32(spec.rope_dim / 8)),
        ("HEAD_UNITS", Const::U32(token_units(spec) as u32)),
        ("INTERLEAVED", Const::U32(is_interleaved.into())),
        ("QueryQuad", Const::Alias(quad(spec.dtype).0)),
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

/// Four elements of a dtype: the type, and the file that reads and rounds it. The specs refuse e4m3, and tests compile all others.
pub(super) fn quad(dtype: Dtype) -> (&'static str, &'static str) {
    match dtype {
        Dtype::F32 => ("QuadF32", include_str!("../../../shaders/lib/round_quad_f32.wgsl")),
        Dtype::F16 => ("QuadF16", include_str!("../../../shaders/lib/round_quad_f16.wgsl")),
        Dtype::Bf16 => ("QuadBf16", include_str!("../../../shaders/lib/round_quad_bf16.wgsl")),
        Dtype::E4m3 => ("", ""),
    }
}

/// What a dtype is read and rounded by under the name of a part: `query` with `QueryQuad`, or `input` with `InQuad`.
pub(super) fn role(part: &str, alias: &str, dtype: Dtype) -> String {
    format!(
        "fn {part}_bits(quad: {alias}) -> vec4<u32> {{\n    return widen_{dtype}(quad);\n}}\n\n\
         fn {part}_quad(bits: vec4<u32>) -> {alias} {{\n    return narrow_{dtype}(bits);\n}}\n"
    )
}

fn source(spec: &RopeSpec, place: Place) -> Source {
    let query = role("query", "QueryQuad", spec.dtype);
    let mut files = vec![include_str!("../../../shaders/lib/round.wgsl"), quad(spec.dtype).1, query.as_str()];
    files.extend(libs(place));
    files.push(include_str!("../../../shaders/rope.wgsl"));
    compose("rope", &name(spec, place), &prelude(spec), &files)
}

/// The layouts and dtypes of every rotation.
#[cfg(test)]
pub(super) fn every_spec() -> Vec<RopeSpec> {
    let layouts = [RopeLayout::Interleaved, RopeLayout::HalfSplit];
    let spec = |layout| {
        let of = move |dtype| RopeSpec { dtype, num_heads: 16, rope_dim: 64, layout };
        [Dtype::F32, Dtype::F16, Dtype::Bf16].map(of)
    };
    layouts.into_iter().flat_map(spec).collect()
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    every_spec().iter().flat_map(|spec| Place::ALL.map(|place| source(spec, place))).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let fields = vec![
        ("x_base_quads", offset_of!(Params, x_base_quads)),
        ("x_token_stride_quads", offset_of!(Params, x_token_stride_quads)),
        ("x_head_stride_quads", offset_of!(Params, x_head_stride_quads)),
        ("max_position", offset_of!(Params, max_position)),
        ("y_base_quads", offset_of!(Params, y_base_quads)),
        ("y_token_stride_quads", offset_of!(Params, y_token_stride_quads)),
        ("y_head_stride_quads", offset_of!(Params, y_head_stride_quads)),
        ("max_tokens", offset_of!(Params, max_tokens)),
    ];
    ("RopeParams", fields, size_of::<Params>())
}
