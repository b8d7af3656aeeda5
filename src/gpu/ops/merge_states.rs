//! `merge_states`: any number of partial attention results into one.

use super::single::{Kernels, Layer, SingleOp, uniform};
use super::words::{Words, word_consts, word_files};
use crate::base::error::Result;
use crate::base::view::View;
use crate::gpu::Gpu;
use crate::gpu::buffer::{Window, stride};
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled, where_all_f32};
use crate::gpu::pipelines::Access;
use crate::ops::{MergeStates, MergeStatesArgs, MergeStatesExtent, is_wide};

/// Sets that an invocation has loads in flight for: those of a prefix in 8 parts and what is merged with it.
const TURN: u32 = 9;

uniform! {
    "SetStrides":
    pub(super) struct SetStrides {
        offset: u32,
        set_stride: u32,
        token_stride: u32,
        head_stride: u32,
    }
}

impl SetStrides {
    /// A view of `[tokens, heads, ..]` in units of `unit` elements of `bytes` bytes, and no stride of sets.
    pub(super) fn of(
        view: &View<&wgpu::Buffer>,
        window: &Window<'_>,
        [tokens, heads]: [u32; 2],
        bytes: usize,
        unit: u64,
    ) -> Self {
        Self {
            offset: window.at(view.offset, bytes, unit),
            set_stride: 0,
            token_stride: stride(tokens, view.token_stride, unit),
            head_stride: stride(heads, view.head_stride, unit),
        }
    }

    /// The same strides for an array of several sets, `set_stride` units apart.
    pub(super) fn of_sets(self, set_stride: u32) -> Self {
        Self { set_stride, ..self }
    }
}

uniform! {
    "MergeSetsParams":
    pub struct Params {
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
}

impl SingleOp for MergeStates {
    type Params = Params;
    const LABELS: [&'static str; 2] = ["mla.merge_states.step", "mla.merge_states.layer"];
    const BUFFERS: &'static [Access] = &[Access::Read, Access::Read, Access::Write, Access::Write];
    const LAST_IS_OPTIONAL: bool = true;

    fn sources(&self) -> Vec<Source> {
        // bounds: merge_states
        vec![source(self)]
    }

    fn items(&self, tokens: u32, layer: Option<&Params>) -> u64 {
        layer.map_or(0, |layer| items(self.head_size, tokens, layer.num_heads, layer.num_words))
    }

    fn bind(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        args: &MergeStatesArgs<&wgpu::Buffer>,
        room: MergeStatesExtent,
    ) -> Result<Option<Layer<Params>>> {
        let (tokens, heads) = (room.tokens, args.num_heads);
        if tokens == 0 || heads == 0 {
            return Ok(None);
        }
        let (dim, bytes) = (self.head_size, self.dtype.bytes());
        // From the first set to the end of the last.
        let (last, last_lse) = args.last(room.sets);
        let range = |first: u64, last: u64, bytes: usize| {
            first.saturating_mul(bytes as u64)..last.saturating_mul(bytes as u64)
        };
        let (end, lse_end) =
            (last.end(tokens.into(), heads.into(), dim.into()), last_lse.end(tokens.into(), heads.into(), 1));
        let states = Window::new(gpu, "states", args.states.buffer, range(args.states.offset, end, bytes))?;
        let lse = Window::new(gpu, "lse", args.lse.buffer, range(args.lse.offset, lse_end, 4))?;
        let output = Window::of(gpu, "output", &args.output, [tokens, heads, dim], bytes)?;
        let output_lse = args.output_lse.map(|view| {
            let window = Window::of(gpu, "output_lse", &view, [tokens, heads, 1], 4)?;
            Ok((window, SetStrides::of(&view, &window, [tokens, heads], 4, 1)))
        });
        let output_lse = output_lse.transpose()?;
        let is_wide = is_wide(dim);
        let unit = if is_wide { 4 } else { 1 };
        let words = if is_wide {
            Words::default()
        } else {
            Words::of(&args.output, &output, [tokens, heads, dim], self.dtype)
        };
        let [ln_base, per_ln] = args.lse_base.ln();
        let strides = |view: &View<_>, window: &Window<'_>, bytes: usize, unit: u64| {
            SetStrides::of(view, window, [tokens, heads], bytes, unit)
        };
        let sets = |set_stride: u64, unit: u64| stride(room.sets, set_stride, unit);
        let params = Params {
            states: strides(&args.states, &states, bytes, unit).of_sets(sets(args.set_stride, unit)),
            lse: strides(&args.lse, &lse, 4, 1).of_sets(sets(args.lse_set_stride, 1)),
            output: strides(&args.output, &output, bytes, unit),
            output_lse: output_lse.map(|(_, strides)| strides).unwrap_or_default(),
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
        gpu.grid(self.items(tokens, Some(&params)))?;
        kernels.layer(
            gpu,
            params,
            [Some(states), Some(lse), Some(output), output_lse.map(|(window, _)| window)],
            0,
        )
    }
}

/// Quads of so many rows, or the words from the first of the output to its last. Output rows do not overlap and are in a window of at most
/// 4 GiB, of quads of 8 bytes or more: a `u32` holds them.
pub(super) fn items(head_size: u32, tokens: u32, heads: u32, words: u32) -> u64 {
    let quads = u64::from(tokens) * u64::from(heads) * u64::from(head_size / 4);
    if is_wide(head_size) { quads } else { words.into() }
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
    let text = where_all_f32(text, spec.dtype == crate::base::dtype::Dtype::F32);
    files.push(&text);
    unrolled("merge_states", &variant, &consts, &[], &files)
}
