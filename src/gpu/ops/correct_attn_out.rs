//! `correct_attn_out`: one rank's attention output, weighted for a sum over the ranks.

use super::merge_states::{SetStrides, items};
use super::single::{Kernels, Layer, SingleOp, uniform};
use super::words::{Words, word_consts, word_files};
use crate::base::error::Result;
use crate::base::view::View;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled};
use crate::gpu::pipelines::Access;
use crate::ops::{CorrectAttnOut, CorrectAttnOutArgs, is_wide};

uniform! {
    "CorrectParams":
    pub struct Params {
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
}

impl SingleOp for CorrectAttnOut {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.correct_attn_out.step", "mla.correct_attn_out.layer"];
    const BUFFERS: &'static [Access] = &[Access::Read, Access::Read, Access::Write, Access::Write];
    const LAST_IS_OPTIONAL: bool = true;

    fn sources(&self) -> Vec<Source> {
        // bounds: correct_attn_out
        vec![source(self)]
    }

    fn items(&self, tokens: u32, layer: Option<&Params>) -> u64 {
        layer.map_or(0, |layer| items(self.head_size, tokens, layer.num_heads, layer.num_words))
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &CorrectAttnOutArgs<&wgpu::Buffer>,
        tokens: u32,
    ) -> Result<Option<Layer<Params>>> {
        let heads = args.num_heads;
        if tokens == 0 || heads == 0 {
            return Ok(None);
        }
        let (dims, bytes) = ([tokens, heads, self.head_size], self.dtype.bytes());
        let input = Window::of(gpu, "out", &args.out, dims, bytes)?;
        // From the first rank to the end of the last.
        let end = args.last_lses().end(tokens.into(), heads.into(), 1);
        let lse_bytes = args.lses.offset.saturating_mul(4)..end.saturating_mul(4);
        let lses = Window::new(gpu, "lses", args.lses.buffer, lse_bytes)?;
        let output = Window::of(gpu, "output", &args.output, dims, bytes)?;
        let output_lse = args.output_lse.map(|view| {
            let window = Window::of(gpu, "output_lse", &view, [tokens, heads, 1], 4)?;
            Ok((window, SetStrides::of(&view, &window, [tokens, heads], 4, 1)))
        });
        let output_lse = output_lse.transpose()?;
        let is_wide = is_wide(self.head_size);
        let unit = if is_wide { 4 } else { 1 };
        let words =
            if is_wide { Words::default() } else { Words::of(&args.output, &output, dims, self.dtype) };
        let strides = |view: &View<_>, window: &Window<'_>, bytes: usize, unit: u64| {
            SetStrides::of(view, window, [tokens, heads], bytes, unit)
        };
        let of_ranks = stride(args.world, args.lse_rank_stride, 1);
        let [ln_base, per_ln] = args.lse_base.ln();
        let params = Params {
            input: strides(&args.out, &input, bytes, unit),
            lses: strides(&args.lses, &lses, 4, 1).of_sets(of_ranks),
            output: strides(&args.output, &output, bytes, unit),
            output_lse: output_lse.map(|(_, strides)| strides).unwrap_or_default(),
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
        gpu.grid(self.items(tokens, Some(&params)))?;
        kernels.layer(
            gpu,
            params,
            [Some(input), Some(lses), Some(output), output_lse.map(|(window, _)| window)],
            0,
        )
    }
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
