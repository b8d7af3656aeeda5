//! `merge_state`: two partial attention results into one.

use super::single::uniform;
use super::words::{Words, word_consts, word_files};
use crate::base::dtype::Dtype;
use crate::base::error::Result;
use crate::base::view::View;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::{Access, Layout, Pipeline, dispatch, group_with_params, layout, storage};
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, MergeState, MergeStateArgs, OpOptions};

/// Rows that an invocation works on, and at most so many 16-byte units of each: more loads are in flight, and the weights of a row
/// are computed once for several units.
const ROWS_PER_LANE: u32 = 1;
const UNITS_PER_LANE: u32 = 1;

/// The same merge by 16-byte units and by words.
#[derive(Debug)]
pub struct Pipes {
    /// `None` where a head is not a multiple of 16 bytes. Offsets and strides must be multiples too.
    units: Option<Pipeline>,
    /// Any size, offset and stride.
    words: Pipeline,
    layout: Layout,
    /// Bound where the caller wants no LSE.
    no_lse: wgpu::Buffer,
}

/// One merge's dispatch.
#[derive(Debug)]
pub struct Work {
    pipeline: Pipeline,
    group: wgpu::BindGroup,
    grid: [u32; 2],
}

uniform! {
    "Strides":
    struct Strides {
        offset: u32,
        token_stride: u32,
        head_stride: u32,
        pad: u32,
    }
}

uniform! {
    "MergeParams":
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
        output_scale: f32,
        reserved_0: u32,
        reserved_1: u32,
        reserved_2: u32,
    }
}

type Args<'a> = MergeStateArgs<&'a wgpu::Buffer>;

impl Kernel<MergeState> for Gpu {
    type Kernels = Pipes;
    type Step = ();
    /// `None` where there is nothing to merge.
    type Binding = Option<Work>;

    fn kernel_compile(&self, spec: &MergeState, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        use Access::{Read, Uniform, Write};
        let layout = layout(self, "mla.merge_state", &[Uniform, Read, Read, Write, Read, Read, Write])?;
        // bounds: merge_state
        let compile = |body| self.pipeline(&source(spec, body), &[&layout]);
        let has_units = spec.head_size.is_multiple_of(unit_elems(spec.dtype));
        let units = if has_units { Some(compile(Body::Units)?) } else { None };
        let (words, no_lse) = (compile(Body::Words)?, storage(self, "mla.merge_state.no_lse", 16)?);
        Ok((Pipes { units, words, layout, no_lse }, (), only(options)?))
    }

    fn kernel_step(&self, _: &MergeState, _: &Pipes, (): ()) -> Result<()> {
        Ok(())
    }

    fn kernel_prepare(&self, _: &MergeState, _: &Pipes, (): &mut (), (): ()) -> Result<()> {
        Ok(())
    }

    fn kernel_bind(&self, spec: &MergeState, pipes: &Pipes, args: &Args<'_>, (): ()) -> Result<Option<Work>> {
        if args.is_empty() {
            return Ok(None);
        }
        let (dims, bytes) = ([args.num_tokens, args.num_heads, spec.head_size], spec.dtype.bytes());
        let dims_lse = [args.num_tokens, args.num_heads, 1];
        let prefix = Window::of(self, "prefix_output", &args.prefix_output, dims, bytes)?;
        let suffix = Window::of(self, "suffix_output", &args.suffix_output, dims, bytes)?;
        let output = Window::of(self, "output", &args.output, dims, bytes)?;
        let prefix_lse = Window::of(self, "prefix_lse", &args.prefix_lse, dims_lse, 4)?;
        let suffix_lse = Window::of(self, "suffix_lse", &args.suffix_lse, dims_lse, 4)?;
        let output_lse = match &args.output_lse {
            Some(view) => Window::of(self, "output_lse", view, dims_lse, 4)?,
            None => Window::new(self, "output_lse", &pipes.no_lse, 0..16)?,
        };

        let unit_elems = unit_elems(spec.dtype);
        // The unit in which the shader counts offsets and strides.
        let (body, pipeline, unit) = match &pipes.units {
            Some(units) if in_units(args, unit_elems.into()) => (Body::Units, units, u64::from(unit_elems)),
            _ => (Body::Words, &pipes.words, 1),
        };
        let strides_lse = |view: &View<_>, window: &Window<'_>| strides(args, view, window, 4, 1);
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
            output_scale: args.output_scale,
            ..Params::default()
        };
        let lanes = match body {
            Body::Units => {
                // Output rows do not overlap and are in a window of at most 4 GiB, so this fits.
                params.num_items = args.num_tokens * args.num_heads;
                let row_lanes = spec.head_size / unit_elems / units_per_lane(spec);
                u64::from(params.num_items.div_ceil(ROWS_PER_LANE)) * u64::from(row_lanes)
            }
            Body::Words => {
                let words = Words::of(&args.output, &output, dims, spec.dtype);
                params.first_word = words.first_word;
                params.num_items = words.num_words;
                params.inner_is_token = words.inner_is_token;
                params.inner_stride = words.inner_stride;
                params.outer_stride = words.outer_stride;
                params.num_items.into()
            }
        };
        let grid = self.grid(lanes)?;
        let windows = [prefix, suffix, output, prefix_lse, suffix_lse, output_lse];
        let (label, resources) = ("mla.merge_state", windows.iter().map(Window::resource));
        let group = group_with_params(self, label, &pipes.layout, &params, resources)?;
        Ok(Some(Work { pipeline: pipeline.clone(), group, grid }))
    }

    fn kernel_record(
        &self,
        _: &MergeState,
        _: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        (): &(),
        work: &Option<Work>,
    ) -> Result<()> {
        if let Some(work) = work {
            dispatch(pass, &work.pipeline, &[&work.group], work.grid);
        }
        Ok(())
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
fn units_per_lane(spec: &MergeState) -> u32 {
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
    Strides {
        offset: window.at(view.offset, bytes, unit),
        token_stride: stride(args.num_tokens, view.token_stride, unit),
        head_stride: stride(args.num_heads, view.head_stride, unit),
        pad: 0,
    }
}

fn source(spec: &MergeState, body: Body) -> Source {
    let mut consts = vec![("GROUP", GROUP)];
    let (variant, files) = match body {
        Body::Units => {
            consts.push(("HEAD_UNITS", spec.head_size / unit_elems(spec.dtype)));
            consts.push(("ROWS_PER_LANE", ROWS_PER_LANE));
            consts.push(("UNITS_PER_LANE", units_per_lane(spec)));
            let file = include_str!("../../../shaders/merge_state_units.wgsl");
            ("units", vec![Format::of(spec.dtype).merge, file])
        }
        Body::Words => {
            consts.extend(word_consts(spec.dtype, spec.head_size));
            let file = include_str!("../../../shaders/merge_state.wgsl");
            let files = word_files(spec.dtype);
            ("words", files.into_iter().chain([file]).collect())
        }
    };
    let mut all = vec![
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        include_str!("../../../shaders/lib/merge_weights.wgsl"),
    ];
    all.extend(files);
    unrolled("merge_state", &format!("{variant}.{}", spec.dtype), &consts, &[], &all)
}

#[cfg(test)]
impl super::Shaders for MergeState {
    fn every_source(samples: &[Self]) -> Vec<Source> {
        let both = |spec: &Self| [source(spec, Body::Units), source(spec, Body::Words)];
        // Rows of whole units, which the shader by words serves too.
        samples.iter().filter(|spec| spec.head_size.is_multiple_of(8)).flat_map(both).collect()
    }

    fn layouts() -> Vec<super::HostLayout> {
        super::layouts_of::<Params>()
    }
}
