//! `rope`: rows rotated by their positions.

use super::single::{Kernels, Layer, SingleOp, uniform};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::compose::{Const, Source, compose};
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::guard::guarded;
use crate::gpu::pipelines::Access;
use crate::ops::{Rope, RopeArgs, RopeLayout};

/// The most items of a dispatch, so that the shader numbers its invocations in a `u32`.
const MAX_ITEMS: u64 = 1 << 30;

uniform! {
    "RopeParams":
    pub struct Params {
        x_base_quads: u32,
        x_token_stride_quads: u32,
        x_head_stride_quads: u32,
        max_position: u32,
        y_base_quads: u32,
        y_token_stride_quads: u32,
        y_head_stride_quads: u32,
        max_tokens: u32,
        scale: f32,
        pub(super) guard_flushed: u32,
        pub(super) guard_top: u32,
        reserved: u32,
    }
}

impl SingleOp for Rope {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.rope.step", "mla.rope.layer"];
    const BUFFERS: &'static [Access] = &[Access::Read, Access::Read, Access::Write, Access::Read];

    fn sources(&self) -> Vec<Source> {
        // bounds: rope
        Place::ALL.map(|place| source(self, place)).into()
    }

    fn items(&self, tokens: u32, _: Option<&Params>) -> u64 {
        u64::from(tokens) * token_units(self)
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &RopeArgs<&wgpu::Buffer>,
        max_tokens: u32,
    ) -> Result<Option<Layer<Params>>> {
        checked_items(max_tokens.into(), token_units(self))?;
        if max_tokens == 0 {
            return Ok(None);
        }
        let place = Place::of(args);
        let (params, windows) = Params::new(gpu, (self, self.dtype), args, max_tokens, place, ["x", "y"])?;
        kernels.layer(gpu, params, windows.map(Some), place as usize)
    }
}

impl Params {
    /// Checks the views for `max_tokens`, at least 1, and returns the uniform and the windows of bindings 1 to 4. `x_name` and `y_name`
    /// stand for `x` and `y` in errors; `y` has the dtype `output`.
    pub(super) fn new<'a>(
        gpu: &Gpu,
        (spec, output): (&Rope, Dtype),
        args: &RopeArgs<&'a wgpu::Buffer>,
        max_tokens: u32,
        place: Place,
        [x_name, y_name]: [&'static str; 2],
    ) -> Result<(Self, [Window<'a>; 4])> {
        let RopeArgs { x, y, max_position, scale, .. } = *args;
        let dims = [max_tokens, spec.num_heads, spec.rope_dim];
        let (bytes, y_bytes) = (spec.dtype.bytes(), output.bytes());
        let (x_window, y_window) = match place {
            Place::InPlace => {
                // One binding for both.
                let [tokens, heads, dim] = dims.map(u64::from);
                let end = |view: &View<_>| view.end(tokens, heads, dim) * bytes as u64;
                let range = x.offset.min(y.offset) * bytes as u64..end(&x).max(end(&y));
                (None, Window::new(gpu, y_name, y.buffer, range)?)
            }
            Place::Apart => {
                (Some(Window::of(gpu, x_name, &x, dims, bytes)?), Window::of(gpu, y_name, &y, dims, y_bytes)?)
            }
        };
        let table_bytes = u64::from(max_position) * u64::from(spec.rope_dim) * 4;
        let positions = Window::new(gpu, "positions", args.positions, 0..u64::from(max_tokens) * 4)?;
        let cos_sin = Window::new(gpu, "cos_sin", args.cos_sin, 0..table_bytes)?;
        // In place the shader has no input of its own, and the positions stand in for it.
        let windows = [positions, cos_sin, y_window, x_window.unwrap_or(positions)];
        let params = Self {
            x_base_quads: x_window.unwrap_or(y_window).at(x.offset, bytes, 4),
            x_token_stride_quads: stride(max_tokens, x.token_stride, 4),
            x_head_stride_quads: stride(spec.num_heads, x.head_stride, 4),
            max_position,
            y_base_quads: y_window.at(y.offset, y_bytes, 4),
            y_token_stride_quads: stride(max_tokens, y.token_stride, 4),
            y_head_stride_quads: stride(spec.num_heads, y.head_stride, 4),
            max_tokens,
            scale,
            ..Self::default()
        };
        Ok((params, windows))
    }
}

/// Units of a token: four pairs of a head each.
pub(super) fn token_units(spec: &Rope) -> u64 {
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
    /// All places, in the order of their numbers; a layer's `source` is such a number.
    pub(super) const ALL: [Self; 2] = [Self::Apart, Self::InPlace];

    pub(super) fn of(args: &RopeArgs<&wgpu::Buffer>) -> Self {
        if args.is_in_place(|a, b| a == b) { Self::InPlace } else { Self::Apart }
    }

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
        ("QueryOut", Const::Alias(Format::of(spec.dtype).rotated.0)),
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

/// The WGSL that reads and rounds a dtype, with the names of a part: `query` with `QueryQuad` and `QueryOut`, or `input` with `InQuad`.
pub(super) fn role(part: &str, [alias, out]: [&str; 2], dtype: Dtype) -> String {
    let narrow = format!("narrow_{dtype}(bits)");
    reads(part, alias, dtype) + "\n" + &writes(part, out, &narrow)
}

/// The first half of a [`role`].
pub(super) fn reads(part: &str, alias: &str, dtype: Dtype) -> String {
    format!("fn {part}_bits(quad: {alias}) -> vec4<u32> {{\n    return widen_{dtype}(quad);\n}}\n")
}

/// The other half, with how bits are rounded.
pub(super) fn writes(part: &str, alias: &str, narrow: &str) -> String {
    format!("fn {part}_quad(bits: vec4<u32>) -> {alias} {{\n    return {narrow};\n}}\n")
}

fn source(spec: &Rope, place: Place) -> Source {
    let query = role("query", ["QueryQuad", "QueryOut"], spec.dtype);
    let mut files = vec![
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(spec.dtype).rotated.1,
        query.as_str(),
    ];
    files.extend(libs(place));
    files.push(include_str!("../../../shaders/rope.wgsl"));
    guarded(&files, 0, false, &[], &name(spec, place), |files, name| {
        compose("rope", name, &prelude(spec), files)
    })
}
