//! The optional inputs of a layer, bound: lists of slots with their lengths, and attention sinks.

use super::super::kernels::decode::has_lengths_apart;
use super::super::scope::{scoped, uniform};
use crate::base::error::{Error, Result};
use crate::gpu::Gpu;
use crate::gpu::buffer::{Bound, Window};
use crate::ops::Indices;

/// The numbers of their bindings, after those of every layer.
pub(super) const INDICES: u32 = 6;
pub(super) const TOPK_LENGTH: u32 = 7;
pub(super) const SINKS: u32 = 8;

/// A window on an array of words: where it begins in the window, and its stride.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words<'a> {
    window: Window<'a>,
    pub(super) at: u32,
    pub(super) stride: u32,
}

/// Lists of slots, and how many of each list's entries count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lists<'a> {
    pub(super) slots: Words<'a>,
    pub(super) lengths: Option<Words<'a>>,
    has_binding_for_lengths: bool,
}

impl<'a> Lists<'a> {
    /// # Errors
    /// [`Error::Limit`] for lengths in a buffer of their own on a device that binds eight, and those of [`Window::new`].
    pub(super) fn new(
        gpu: &Gpu,
        indices: &Indices<&'a wgpu::Buffer>,
        (topk, max_queries): (u32, u32),
    ) -> Result<Self> {
        let Indices { slots, topk_length } = indices;
        let tokens = max_queries.into();
        let bytes = |begin: u64, end: u64| begin.saturating_mul(4)..end.saturating_mul(4);
        let range = bytes(slots.offset, slots.end(tokens, topk.into(), 1));
        let lengths = topk_length.map(|view| (view, bytes(view.offset, view.end(tokens, 1, 1))));
        let apart = has_lengths_apart(gpu.caps());
        let words = |window: Window<'a>, begin: u64, stride: u64| Words {
            window,
            at: window.at(begin, 1, 4),
            stride: stride as u32,
        };
        match lengths {
            Some((view, own)) if !apart => {
                if view.buffer != slots.buffer {
                    let (need, limit) = (9, gpu.caps().max_storage_buffers.into());
                    let cure = "put topk_length into the buffer of the lists, fill lists up with -1 in its place, or make the device with `wanted`'s max_storage_buffers_per_shader_stage";
                    let what = "storage buffers of a sparse decode with a topk_length of its own";
                    return Err(Error::Limit { what, need, limit, cure });
                }
                let both = range.start.min(own.start)..range.end.max(own.end);
                let window = Window::new(gpu, "indices", slots.buffer, both)?;
                Ok(Self {
                    slots: words(window, range.start, slots.token_stride),
                    lengths: Some(words(window, own.start, view.token_stride)),
                    has_binding_for_lengths: false,
                })
            }
            lengths => {
                let window = Window::new(gpu, "indices", slots.buffer, range.clone())?;
                let of_lengths =
                    |(view, own): (crate::base::view::View<&'a wgpu::Buffer>, std::ops::Range<u64>)| {
                        let window = Window::new(gpu, "topk_length", view.buffer, own.clone())?;
                        Ok::<_, Error>(words(window, own.start, view.token_stride))
                    };
                Ok(Self {
                    slots: words(window, range.start, slots.token_stride),
                    lengths: lengths.map(of_lengths).transpose()?,
                    has_binding_for_lengths: apart,
                })
            }
        }
    }

    /// The bindings. Lists stand in for lengths where there are none.
    pub(super) fn resources(&self) -> impl Iterator<Item = (u32, Bound<'a>)> {
        let lengths = self.lengths.unwrap_or(self.slots).window;
        let lengths = self.has_binding_for_lengths.then(|| (TOPK_LENGTH, lengths.resource()));
        std::iter::once((INDICES, self.slots.window.resource())).chain(lengths)
    }
}

/// `sinks` of shaders/lib/sinks.wgsl.
///
/// # Errors
/// The errors of [`scoped`].
pub(super) fn sinks(gpu: &Gpu, sinks: &[f32]) -> Result<wgpu::Buffer> {
    // In base 2, and without infinities.
    let mut all = [0f32; 128];
    for (to, sink) in all.iter_mut().zip(sinks) {
        *to = (sink * std::f32::consts::LOG2_E).clamp(-1e38, 1e38);
    }
    scoped(gpu.device(), "a layer's attention sinks", || {
        uniform(gpu.device(), "mla.sinks", bytemuck::bytes_of(&all))
    })
}
