//! `merge_attn_states`: two partial attention results into one.

use super::args::{Slot, bind_group, distinct_buffers, layout, window_of};
use super::{GROUP, grid, pipeline};
use crate::compose::Source;
use crate::gpu::scope::scoped;
use crate::gpu::{Pipelines, window::Window};
use crate::layer::View;
use crate::{Dtype, MergeStates, MergeStatesSpec, Result};

/// Rows that an invocation works on, and units of 16 bytes of each at most: for loads in flight, and so that what is done
/// once a row is done for several units.
const ROWS_PER_LANE: u32 = 1;
const UNITS_PER_LANE: u32 = 1;

/// Merges two attention states: see [`MergeStates`].
#[derive(Debug)]
pub struct MergeAttnStates {
    spec: MergeStatesSpec,
    /// 16 bytes at a time, where a head is a multiple of that.
    units: Option<wgpu::ComputePipeline>,
    /// Any size, offset and stride.
    words: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    /// Bound where the caller wants no LSE.
    no_lse: wgpu::Buffer,
    max_groups: u32,
}

/// The buffers of one merge, checked and bound.
#[derive(Debug)]
pub struct MergeBinding {
    /// `None` where there is nothing to merge.
    work: Option<Work>,
}

#[derive(Debug)]
struct Work {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    grid: (u32, u32),
}

/// `Strides` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Strides {
    offset: u32,
    token_stride: u32,
    head_stride: u32,
    pad: u32,
}

/// `MergeParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    prefix: Strides,
    suffix: Strides,
    output: Strides,
    prefix_lse: Strides,
    suffix_lse: Strides,
    output_lse: Strides,
    num_tokens: u32,
    num_heads: u32,
    num_items: u32,
    writes_lse: u32,
    first_word: u32,
    inner_is_token: u32,
    inner_stride: u32,
    outer_stride: u32,
}

type Args<'a> = MergeStates<&'a wgpu::Buffer>;

impl MergeAttnStates {
    /// Compiles the merge of a spec.
    ///
    /// # Errors
    /// Those of [`MergeStatesSpec::check`], [`crate::Error::OutOfMemory`] and [`crate::Error::Internal`].
    pub fn new(pipelines: &Pipelines, spec: MergeStatesSpec) -> Result<Self> {
        spec.check()?;
        let device = pipelines.device();
        use Slot::{Read, Uniform, Write};
        let slots = [Uniform, Read, Read, Write, Read, Read, Write];
        let layout = layout(device, "mla.merge_attn_states", &slots)?;
        // Every index is in bounds, for each binding that `bind` makes:
        // - both bodies address rows (token, head) with token < num_tokens and head < num_heads, the units body by a `min`
        //   and by counting heads up to num_heads, the words body by asking each element for its row. `bind` refuses views
        //   whose last row ends past the buffer (`MergeStates::check`), and `window_of` binds at least up to there;
        // - inside a row the units body adds unit + j * ROW_LANES < HEAD_UNITS, the words body d < HEAD_SIZE;
        // - the words body writes first_word + item, item < num_items: the words from the first row to the last;
        // - `at` cannot wrap: a window has less than 2^32 bytes, and a stride that is used is less than that.
        // No loop depends on data: unrolled ones have a constant bound, the words body's is PER_WORD. num_heads and both
        // strides that the shader divides by are at least 1.
        let compile = |body| pipeline(pipelines, &source(&spec, body), &[&layout]);
        let has_units = spec.head_size.is_multiple_of(unit_elems(spec.dtype));
        let units = if has_units { Some(compile(Body::Units)?) } else { None };
        let words = compile(Body::Words)?;
        let no_lse = scoped(device, "a buffer of 16 bytes", || {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("mla.merge_attn_states.no_lse"),
                size: 16,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        })?;
        let max_groups = device.limits().max_compute_workgroups_per_dimension;
        Ok(Self { spec, units, words, layout, no_lse, max_groups })
    }

    /// What this merge is compiled for.
    pub fn spec(&self) -> &MergeStatesSpec {
        &self.spec
    }

    /// Checks and binds the arrays of a merge.
    ///
    /// Both inputs may be one buffer; an output may not be an input or the other output. Heads, offsets and
    /// strides that are multiples of 16 bytes are the fast way.
    ///
    /// # Errors
    /// [`crate::Error::BufferTooSmall`], [`crate::Error::Shape`] where output rows overlap,
    /// [`crate::Error::BufferUsage`] for a buffer without `STORAGE`, [`crate::Error::Aliased`],
    /// [`crate::Error::Limit`], [`crate::Error::OutOfMemory`].
    pub fn bind(&self, device: &wgpu::Device, args: &Args<'_>) -> Result<MergeBinding> {
        args.check(&self.spec, wgpu::Buffer::size)?;
        if args.num_tokens == 0 || args.num_heads == 0 {
            return Ok(MergeBinding { work: None });
        }
        check_aliases(args)?;
        let limits = device.limits();
        let (dims, bytes) = ([args.num_tokens, args.num_heads, self.spec.head_size], self.spec.dtype.bytes());
        let dims_lse = [args.num_tokens, args.num_heads, 1];
        let prefix = window_of(&limits, "prefix_output", &args.prefix_output, dims, bytes)?;
        let suffix = window_of(&limits, "suffix_output", &args.suffix_output, dims, bytes)?;
        let output = window_of(&limits, "output", &args.output, dims, bytes)?;
        let prefix_lse = window_of(&limits, "prefix_lse", &args.prefix_lse, dims_lse, 4)?;
        let suffix_lse = window_of(&limits, "suffix_lse", &args.suffix_lse, dims_lse, 4)?;
        let output_lse = match &args.output_lse {
            Some(view) => window_of(&limits, "output_lse", view, dims_lse, 4)?,
            None => Window::new(&limits, "output_lse", &self.no_lse, 0..16)?,
        };

        let unit_elems = unit_elems(self.spec.dtype);
        // The unit in which the shader counts offsets and strides.
        let (body, pipeline, unit) = match &self.units {
            Some(units) if in_units(args, unit_elems.into()) => (Body::Units, units, u64::from(unit_elems)),
            _ => (Body::Words, &self.words, 1),
        };
        let strides_lse = |view: &View<&_>, window: &Window<'_>| strides(args, view, window, 4, 1);
        let mut params = Params {
            prefix: strides(args, &args.prefix_output, &prefix, bytes, unit),
            suffix: strides(args, &args.suffix_output, &suffix, bytes, unit),
            output: strides(args, &args.output, &output, bytes, unit),
            prefix_lse: strides_lse(&args.prefix_lse, &prefix_lse),
            suffix_lse: strides_lse(&args.suffix_lse, &suffix_lse),
            output_lse: args.output_lse.map(|view| strides_lse(&view, &output_lse)).unwrap_or_default(),
            num_tokens: args.num_tokens,
            num_heads: args.num_heads,
            writes_lse: args.output_lse.is_some().into(),
            ..Params::default()
        };
        let lanes = match body {
            Body::Units => {
                // Output rows do not overlap and are in a window of at most 4 GiB, so this fits.
                params.num_items = args.num_tokens * args.num_heads;
                let row_lanes = self.spec.head_size / unit_elems / units_per_lane(&self.spec);
                u64::from(params.num_items.div_ceil(ROWS_PER_LANE)) * u64::from(row_lanes)
            }
            Body::Words => {
                self.span_of_words(args, &output, &mut params);
                params.num_items.into()
            }
        };
        let resources = [prefix, suffix, output, prefix_lse, suffix_lse, output_lse];
        let resources = resources.iter().map(Window::resource);
        let bytes = bytemuck::bytes_of(&params);
        let group = bind_group(device, "mla.merge_attn_states", &self.layout, bytes, resources)?;
        let grid = grid(lanes, self.max_groups);
        Ok(MergeBinding { work: Some(Work { pipeline: pipeline.clone(), group, grid }) })
    }

    /// Adds one dispatch to the pass. Creates nothing and cannot fail.
    pub fn record_in(&self, pass: &mut wgpu::ComputePass<'_>, binding: &MergeBinding) {
        if let Some(work) = &binding.work {
            pass.set_pipeline(&work.pipeline);
            pass.set_bind_group(0, &work.group, &[]);
            pass.dispatch_workgroups(work.grid.0, work.grid.1, 1);
        }
    }

    /// [`MergeAttnStates::record_in`] in a pass of its own.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, binding: &MergeBinding) {
        self.record_in(&mut super::pass(encoder, "mla.merge_attn_states"), binding);
    }

    /// The words that the output touches, and how an element in them is traced back to its row.
    fn span_of_words(&self, args: &Args<'_>, output: &Window<'_>, params: &mut Params) {
        let (tokens, heads) = (u64::from(args.num_tokens), u64::from(args.num_heads));
        let (dim, view) = (u64::from(self.spec.head_size), &args.output);
        let (t, h) = (view.token_stride, view.head_stride);
        let start = u64::from(params.output.offset);
        let end = view.end(tokens, heads, dim) - output.skipped(self.spec.dtype.bytes());
        // A dimension of one row has no stride of its own: it gets one that keeps the division an inverse.
        let (inner_is_token, inner, outer) = match (tokens, heads) {
            (1, 1) => (false, dim, end - start),
            (1, _) => (false, h, end - start),
            (_, 1) => (false, dim, t),
            _ if t >= h.saturating_mul(heads - 1).saturating_add(dim) => (false, h, t),
            _ => (true, t, h),
        };
        let per_word = per_word(self.spec.dtype).into();
        params.first_word = (start / per_word) as u32;
        params.num_items = end.div_ceil(per_word) as u32 - params.first_word;
        params.inner_is_token = inner_is_token.into();
        params.inner_stride = inner as u32;
        params.outer_stride = outer as u32;
    }
}

/// The two shaders.
#[derive(Debug, Clone, Copy)]
enum Body {
    Units,
    Words,
}

/// Elements in 16 bytes.
fn unit_elems(dtype: Dtype) -> u32 {
    16 / dtype.bytes() as u32
}

/// The largest power of two up to [`UNITS_PER_LANE`] that divides the units of a head.
fn units_per_lane(spec: &MergeStatesSpec) -> u32 {
    let head_units = spec.head_size / unit_elems(spec.dtype);
    UNITS_PER_LANE.min(1 << head_units.trailing_zeros().min(31))
}

/// Whether each row of each output array starts at a multiple of `unit` elements.
fn in_units(args: &Args<'_>, unit: u64) -> bool {
    [args.prefix_output, args.suffix_output, args.output].iter().all(|view| {
        let token = if args.num_tokens > 1 { view.token_stride } else { 0 };
        let head = if args.num_heads > 1 { view.head_stride } else { 0 };
        [view.offset, token, head].iter().all(|elems| elems.is_multiple_of(unit))
    })
}

/// A view as the shader counts it: in units of `unit` elements of `bytes` bytes, from the front of its window.
fn strides(
    args: &Args<'_>,
    view: &View<&wgpu::Buffer>,
    window: &Window<'_>,
    bytes: usize,
    unit: u64,
) -> Strides {
    // The stride of a dimension of one is unused and may be anything; every other is less than the window.
    let used = |count: u32, stride: u64| if count > 1 { (stride / unit) as u32 } else { 0 };
    Strides {
        offset: ((view.offset - window.skipped(bytes)) / unit) as u32,
        token_stride: used(args.num_tokens, view.token_stride),
        head_stride: used(args.num_heads, view.head_stride),
        pad: 0,
    }
}

fn check_aliases(args: &Args<'_>) -> Result<()> {
    let inputs = [
        ("prefix_output", args.prefix_output.buffer),
        ("suffix_output", args.suffix_output.buffer),
        ("prefix_lse", args.prefix_lse.buffer),
        ("suffix_lse", args.suffix_lse.buffer),
    ];
    distinct_buffers(("output", args.output.buffer), &inputs)?;
    if let Some(lse) = args.output_lse {
        distinct_buffers(("output_lse", lse.buffer), &inputs)?;
        distinct_buffers(("output", args.output.buffer), &[("output_lse", lse.buffer)])?;
    }
    Ok(())
}

fn per_word(dtype: Dtype) -> u32 {
    4 / dtype.bytes() as u32
}

fn source(spec: &MergeStatesSpec, body: Body) -> Source {
    let mut consts = vec![("GROUP", GROUP)];
    let (variant, files) = match body {
        Body::Units => {
            consts.push(("HEAD_UNITS", spec.head_size / unit_elems(spec.dtype)));
            consts.push(("ROWS_PER_LANE", ROWS_PER_LANE));
            consts.push(("UNITS_PER_LANE", units_per_lane(spec)));
            let file = include_str!("../../../shaders/merge_attn_states_units.wgsl");
            ("units", vec![merge_unit(spec.dtype), file])
        }
        Body::Words => {
            let mask = if spec.dtype == Dtype::F32 { u32::MAX } else { 0xFFFF };
            consts.push(("HEAD_SIZE", spec.head_size));
            consts.push(("PER_WORD", per_word(spec.dtype)));
            consts.push(("CODE_MASK", mask));
            let file = include_str!("../../../shaders/merge_attn_states.wgsl");
            ("words", vec![super::lib_in(spec.dtype), super::lib_out(spec.dtype), file])
        }
    };
    let mut all = vec![
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        include_str!("../../../shaders/lib/merge_weights.wgsl"),
    ];
    all.extend(files);
    super::unrolled("merge_attn_states", &format!("{variant}.{}", spec.dtype), &consts, &all)
}

/// How 16 bytes of both sides are weighted and added. The spec refuses e4m3.
fn merge_unit(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => include_str!("../../../shaders/lib/merge_f32.wgsl"),
        Dtype::F16 => include_str!("../../../shaders/lib/merge_f16.wgsl"),
        Dtype::Bf16 => include_str!("../../../shaders/lib/merge_bf16.wgsl"),
        Dtype::E4m3 => "",
    }
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let both = |dtype| {
        let spec = MergeStatesSpec { dtype, head_size: 96 };
        [source(&spec, Body::Units), source(&spec, Body::Words)]
    };
    dtypes.into_iter().flat_map(both).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> (&'static str, Vec<(&'static str, usize)>, usize) {
    use std::mem::offset_of;
    let fields = vec![
        ("prefix", offset_of!(Params, prefix)),
        ("suffix", offset_of!(Params, suffix)),
        ("output", offset_of!(Params, output)),
        ("prefix_lse", offset_of!(Params, prefix_lse)),
        ("suffix_lse", offset_of!(Params, suffix_lse)),
        ("output_lse", offset_of!(Params, output_lse)),
        ("num_tokens", offset_of!(Params, num_tokens)),
        ("num_heads", offset_of!(Params, num_heads)),
        ("num_items", offset_of!(Params, num_items)),
        ("writes_lse", offset_of!(Params, writes_lse)),
        ("first_word", offset_of!(Params, first_word)),
        ("inner_is_token", offset_of!(Params, inner_is_token)),
        ("inner_stride", offset_of!(Params, inner_stride)),
        ("outer_stride", offset_of!(Params, outer_stride)),
    ];
    ("MergeParams", fields, size_of::<Params>())
}
