//! `correct_attn_out`: one rank's attention output, weighted for a sum over the ranks.

use crate::gpu::kernels::formats::Format;
use std::ops::Range;

use super::table::Table;
use super::words::{Words, word_consts, word_files};
use crate::Result;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::{Access, Pipe, dispatch, group_with_params, storage};
use crate::ops::is_wide;
use crate::ops::variants::only;
use crate::ops::{Choice, CorrectAttnOut, CorrectAttnOutArgs, Kernel, OpOptions};
use crate::view::View;

/// The kernel, and what is bound where the caller wants no LSE.
#[derive(Debug)]
pub struct Pipes {
    pipe: Pipe,
    no_lse: wgpu::Buffer,
}

/// One layer's arrays.
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

/// `CorrectParams` of the shader.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    input: SetStrides,
    lses: SetStrides,
    output: SetStrides,
    output_lse: SetStrides,
    max_tokens: u32,
    world: u32,
    rank: u32,
    num_heads: u32,
    writes_lse: u32,
    ln_base: f32,
    per_ln: f32,
    first_word: u32,
    num_words: u32,
    inner_is_token: u32,
    inner_stride: u32,
    outer_stride: u32,
}

impl Kernel<CorrectAttnOut> for Gpu {
    type Kernels = Pipes;
    type Step = Table;
    type Binding = Layer;

    fn kernel_compile(&self, spec: &CorrectAttnOut, options: &OpOptions) -> Result<(Pipes, (), Choice)> {
        use Access::{Read, Uniform, Write};
        let labels = ["mla.correct_attn_out.step", "mla.correct_attn_out.layer"];
        // Every index is in bounds, for every pair of table and binding:
        // - the table holds two words (`prepare`, and nothing else writes it); tokens are below max_tokens by comparison, ranks below
        //   world, heads are the rest of a division by num_heads, or below it by comparison. `check_args` refuses views that end past
        //   their buffers for so many, and `Window::of` binds up to there;
        // - a quad is below HEAD_QUADS, the rest of a division by it; by words an element is below HEAD_SIZE by comparison, and the words
        //   that are written are those from the first row of the output to its last;
        // - `at` cannot wrap: a window has less than 2^32 bytes, and a stride that is used is less than that.
        // Loops count up to world, at most 2^16. num_heads and the strides that the shader divides by are at least 1.
        let pipe = Pipe::new(self, labels, &[Uniform, Read, Read, Write, Write], &source(spec))?;
        Ok((Pipes { pipe, no_lse: storage(self, "mla.correct_attn_out.no_lse", 16)? }, (), only(options)?))
    }

    fn kernel_step(&self, _: &CorrectAttnOut, _: &Pipes, _: u32) -> Result<Table> {
        Ok(Table::default())
    }

    fn kernel_prepare(
        &self,
        spec: &CorrectAttnOut,
        pipes: &Pipes,
        step: &mut Table,
        tokens: Range<u32>,
    ) -> Result<u32> {
        let extent = spec.extent(&tokens)?;
        step.upload(self, &pipes.pipe.step, tokens.len() as u32, [tokens.start])?;
        Ok(extent)
    }

    fn kernel_bind(
        &self,
        spec: &CorrectAttnOut,
        pipes: &Pipes,
        args: &CorrectAttnOutArgs<&wgpu::Buffer>,
        tokens: u32,
    ) -> Result<Layer> {
        let heads = args.num_heads;
        if tokens == 0 || heads == 0 {
            return Ok(Layer { group: None, num_heads: heads, num_words: 0 });
        }
        let (dims, bytes) = ([tokens, heads, spec.head_size], spec.dtype.bytes());
        let input = Window::of(self, "out", &args.out, dims, bytes)?;
        // From the first rank to the end of the last.
        let end = args.last_lses().end(tokens.into(), heads.into(), 1);
        let lse_bytes = args.lses.offset.saturating_mul(4)..end.saturating_mul(4);
        let lses = Window::new(self, "lses", args.lses.buffer, lse_bytes)?;
        let output = Window::of(self, "output", &args.output, dims, bytes)?;
        let output_lse = match &args.output_lse {
            Some(view) => Window::of(self, "output_lse", view, [tokens, heads, 1], 4)?,
            None => Window::new(self, "output_lse", &pipes.no_lse, 0..16)?,
        };
        let is_wide = is_wide(spec.head_size);
        let unit = if is_wide { 4 } else { 1 };
        let words =
            if is_wide { Words::default() } else { Words::of(&args.output, &output, dims, spec.dtype) };
        let strides = |view: &View<_>, window: &Window<'_>, bytes: usize, unit: u64| SetStrides {
            offset: window.at(view.offset, bytes, unit),
            set_stride: 0,
            token_stride: stride(tokens, view.token_stride, unit),
            head_stride: stride(heads, view.head_stride, unit),
        };
        let of_ranks = stride(args.world, args.lse_rank_stride, 1);
        let [ln_base, per_ln] = args.lse_base.ln();
        self.grid(items(spec, tokens, heads, words.num_words))?;
        let params = Params {
            input: strides(&args.out, &input, bytes, unit),
            lses: SetStrides { set_stride: of_ranks, ..strides(&args.lses, &lses, 4, 1) },
            output: strides(&args.output, &output, bytes, unit),
            output_lse: args.output_lse.map(|view| strides(&view, &output_lse, 4, 1)).unwrap_or_default(),
            max_tokens: tokens,
            world: args.world,
            rank: args.rank,
            num_heads: heads,
            writes_lse: args.output_lse.is_some().into(),
            ln_base,
            per_ln,
            first_word: words.first_word,
            num_words: words.num_words,
            inner_is_token: words.inner_is_token,
            inner_stride: words.inner_stride,
            outer_stride: words.outer_stride,
        };
        let windows = [input, lses, output, output_lse];
        let (label, resources) = ("mla.correct_attn_out.layer", windows.iter().map(Window::resource));
        let group = group_with_params(self, label, &pipes.pipe.layer, &params, resources)?;
        Ok(Layer { group: Some(group), num_heads: heads, num_words: words.num_words })
    }

    fn kernel_record(
        &self,
        spec: &CorrectAttnOut,
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
fn items(spec: &CorrectAttnOut, tokens: u32, heads: u32, num_words: u32) -> u64 {
    let quads = u64::from(tokens) * u64::from(heads) * u64::from(spec.head_size / 4);
    if is_wide(spec.head_size) { quads } else { num_words.into() }
}

fn source(spec: &CorrectAttnOut) -> Source {
    let mut files = vec![
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        include_str!("../../../shaders/lib/sets.wgsl"),
        include_str!("../../../shaders/lib/correct.wgsl"),
    ];
    let mut consts = vec![("GROUP", GROUP)];
    let variant = if is_wide(spec.head_size) {
        consts.push(("HEAD_QUADS", spec.head_size / 4));
        let file = include_str!("../../../shaders/correct_attn_out.wgsl");
        files.extend([Format::of(spec.dtype).quad, Format::of(spec.dtype).out, file]);
        spec.dtype.name().to_owned()
    } else {
        consts.extend(word_consts(spec.dtype, spec.head_size));
        files.extend(word_files(spec.dtype));
        files.push(include_str!("../../../shaders/correct_attn_out_words.wgsl"));
        format!("words.{}", spec.dtype)
    };
    unrolled("correct_attn_out", &variant, &consts, &[], &files)
}

#[cfg(test)]
pub(super) fn every_source() -> Vec<Source> {
    use crate::Dtype;
    let both = |dtype| [96, 37].map(|head_size| source(&CorrectAttnOut { dtype, head_size }));
    [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().flat_map(both).collect()
}

#[cfg(test)]
pub(super) fn host_layout() -> super::HostLayout {
    super::layout_of!("CorrectParams", Params: input, lses, output, output_lse, max_tokens, world, rank, num_heads, writes_lse, ln_base, per_ln, first_word, num_words, inner_is_token, inner_stride, outer_stride)
}
