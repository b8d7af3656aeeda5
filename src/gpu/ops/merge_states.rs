//! `merge_states`: any number of partial attention results into one.

use crate::gpu::kernels::formats::Format;
use std::ops::Range;

use super::table::Table;
use super::words::{Words, word_consts, word_files};
use crate::Result;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::{GROUP, unrolled, where_all_f32};
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params, storage};
use crate::ops::is_wide;
use crate::ops::variants::only;
use crate::ops::{Choice, Kernel, MergeStates, MergeStatesArgs, MergeStatesExtent, OpOptions};
use crate::view::View;

/// Sets that an invocation has loads in flight for: those of a prefix in 8 parts and what is merged with it.
const TURN: u32 = 9;

/// The kernel, and what is bound where the caller wants no LSE.
#[derive(Debug)]
pub struct Pipes {
    pipe: Pipe,
    no_lse: wgpu::Buffer,
}

/// One layer's sets.
#[derive(Debug)]
pub struct Layer {
    /// `None` where there is room for no token or no head.
    group: Option<wgpu::BindGroup>,
    num_heads: u32,
    /// Words of the output, for the shader by words.
    num_words: u32,
}

/// `SetStrides` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct SetStrides {
    offset: u32,
    set_stride: u32,
    token_stride: u32,
    head_stride: u32,
}

/// `MergeSetsParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    states: SetStrides,
    lse: SetStrides,
    output: SetStrides,
    output_lse: SetStrides,
    max_tokens: u32,
    max_sets: u32,
    num_heads: u32,
    writes_lse: u32,
    ln_base: f32,
    per_ln: f32,
    first_word: u32,
    num_words: u32,
    inner_is_token: u32,
    inner_stride: u32,
    outer_stride: u32,
    output_scale: f32,
}

impl Kernel<MergeStates> for Gpu {
    type Kernels = Pipes;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &MergeStates, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        use Access::{Read, Uniform, Write};
        let labels = ["mla.merge_states.step", "mla.merge_states.layer"];
        // Every index is in bounds, for every pair of table and binding:
        // - the table holds three words (`prepare`, and nothing else writes it); tokens are below max_tokens and sets below max_sets by `min`
        //   in the shader, each at least 1 where there is a group, and what is written is so by comparison too; heads are the rest of a
        //   division by num_heads, which is at least 1 where there is a group. `check_args` refuses views and sets that end past their buffers
        //   for so many, and `Window::of` binds up to there;
        // - a quad is below HEAD_QUADS, the rest of a division by it; by words an element is below HEAD_SIZE and its row in range, by
        //   comparison, and the words that are written are those from the first row of the output to its last;
        // - `at` cannot wrap: a window has less than 2^32 bytes, and a stride that is used is less than that.
        // Loops count up, by TURN or 1, to the number of sets, at most 2^16.
        let pipe = Pipe::new(self, labels, &[Uniform, Read, Read, Write, Write], &source(spec))?;
        Ok((Pipes { pipe, no_lse: storage(self, "mla.merge_states.no_lse", 16)? }, (), only(options)?))
    }

    fn kernel_step(&self, _: &MergeStates, _: &Pipes, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &MergeStates,
        pipes: &Pipes,
        step: &mut Table,
        (tokens, num_sets): (Range<u32>, u32),
    ) -> Result<MergeStatesExtent> {
        let extent = spec.extent(&tokens, num_sets)?;
        step.upload(self, &pipes.pipe.step, tokens.len() as u32, [tokens.start, num_sets])?;
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &MergeStates,
        pipes: &Pipes,
        args: &MergeStatesArgs<&wgpu::Buffer>,
        room: MergeStatesExtent,
    ) -> Result<Layer> {
        let (tokens, heads) = (room.tokens, args.num_heads);
        if tokens == 0 || heads == 0 {
            return Ok(Layer { group: None, num_heads: heads, num_words: 0 });
        }
        let (dim, bytes) = (spec.head_size, spec.dtype.bytes());
        // From the first set to the end of the last.
        let (last, last_lse) = args.last(room.sets);
        let range = |first: u64, last: u64, bytes: usize| {
            first.saturating_mul(bytes as u64)..last.saturating_mul(bytes as u64)
        };
        let (end, lse_end) =
            (last.end(tokens.into(), heads.into(), dim.into()), last_lse.end(tokens.into(), heads.into(), 1));
        let states = Window::new(self, "states", args.states.buffer, range(args.states.offset, end, bytes))?;
        let lse = Window::new(self, "lse", args.lse.buffer, range(args.lse.offset, lse_end, 4))?;
        let output = Window::of(self, "output", &args.output, [tokens, heads, dim], bytes)?;
        let output_lse = match &args.output_lse {
            Some(view) => Window::of(self, "output_lse", view, [tokens, heads, 1], 4)?,
            None => Window::new(self, "output_lse", &pipes.no_lse, 0..16)?,
        };
        let is_wide = is_wide(dim);
        let unit = if is_wide { 4 } else { 1 };
        let words = if is_wide {
            Words::default()
        } else {
            Words::of(&args.output, &output, [tokens, heads, dim], spec.dtype)
        };
        let [ln_base, per_ln] = args.lse_base.ln();
        self.grid(items(spec, tokens, heads, words.num_words))?;
        let strides =
            |view: &View<_>, window: &Window<'_>, set_stride: u64, bytes: usize, unit: u64| SetStrides {
                offset: window.at(view.offset, bytes, unit),
                set_stride: stride(room.sets, set_stride, unit),
                token_stride: stride(tokens, view.token_stride, unit),
                head_stride: stride(heads, view.head_stride, unit),
            };
        let params = Params {
            states: strides(&args.states, &states, args.set_stride, bytes, unit),
            lse: strides(&args.lse, &lse, args.lse_set_stride, 4, 1),
            output: strides(&args.output, &output, 0, bytes, unit),
            output_lse: args.output_lse.map(|view| strides(&view, &output_lse, 0, 4, 1)).unwrap_or_default(),
            max_tokens: tokens,
            max_sets: room.sets,
            num_heads: heads,
            writes_lse: args.output_lse.is_some().into(),
            ln_base,
            per_ln,
            first_word: words.first_word,
            num_words: words.num_words,
            inner_is_token: words.inner_is_token,
            inner_stride: words.inner_stride,
            outer_stride: words.outer_stride,
            output_scale: args.output_scale,
        };
        let windows = [states, lse, output, output_lse];
        let (label, resources) = ("mla.merge_states.layer", windows.iter().map(Window::resource));
        let group = group_with_params(self, label, &pipes.pipe.layer, &params, resources)?;
        Ok(Layer { group: Some(group), num_heads: heads, num_words: words.num_words })
    }

    fn kernel_record(
        &self,
        spec: &MergeStates,
        pipes: &Pipes,
        pass: &mut wgpu::ComputePass<'_>,
        step: &Table,
        layer: &Layer,
    ) -> Result<()> {
        if let (Some(table), Some(group), tokens @ 1..) = (step.group(), &layer.group, step.count()) {
            let grid = self.grid(items(spec, tokens, layer.num_heads, layer.num_words))?;
            dispatch(pass, &pipes.pipe.pipeline, &[table, group], grid);
        }
        Ok(())
    }
}

/// Quads of so many rows, or the words from the first of the output to its last. Output rows do not overlap and are in a window of at most
/// 4 GiB, of quads of 8 bytes or more: a `u32` holds them.
fn items(spec: &MergeStates, tokens: u32, heads: u32, num_words: u32) -> u64 {
    let quads = u64::from(tokens) * u64::from(heads) * u64::from(spec.head_size / 4);
    if is_wide(spec.head_size) { quads } else { num_words.into() }
}

fn source(spec: &MergeStates) -> Source {
    let mut files = vec![
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        include_str!("../../../shaders/lib/sets.wgsl"),
    ];
    let mut consts = vec![("GROUP", GROUP)];
    let variant = if is_wide(spec.head_size) {
        consts.extend([("HEAD_QUADS", spec.head_size / 4), ("TURN", TURN)]);
        files.extend([Format::of(spec.dtype).quad, Format::of(spec.dtype).out]);
        spec.dtype.name().to_owned()
    } else {
        consts.extend(word_consts(spec.dtype, spec.head_size));
        files.extend(word_files(spec.dtype));
        format!("words.{}", spec.dtype)
    };
    let text = match is_wide(spec.head_size) {
        true => include_str!("../../../shaders/merge_states.wgsl"),
        false => include_str!("../../../shaders/merge_states_words.wgsl"),
    };
    let text = where_all_f32(text, spec.dtype == crate::Dtype::F32);
    files.push(&text);
    unrolled("merge_states", &variant, &consts, &[], &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::Dtype;
    let both = |dtype| [96, 37].map(|head_size| source(&MergeStates { dtype, head_size }));
    [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().flat_map(both).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("MergeSetsParams", Params: states, lse, output, output_lse, max_tokens, max_sets, num_heads, writes_lse, ln_base, per_ln, first_word, num_words, inner_is_token, inner_stride, outer_stride, output_scale)
}
