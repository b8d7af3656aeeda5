//! One layer's buffers, bound.

use bytemuck::{Pod, Zeroable};

use super::lists::{self, Lists};
use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::gpu::Gpu;
use crate::gpu::buffer::Window;
use crate::gpu::kernels::decode::unit_bytes;
use crate::gpu::pipelines::{Layout, check_uniform, numbered_group};
use crate::gpu::scope::{scoped, uniform};
use crate::ops::MlaDecodeArgs;

/// `Layer` of shaders/lib/layer.wgsl; a test compares both. An oct is eight neighbouring elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct LayerUniform {
    pub(crate) logit_scale: f32,
    pub(crate) out_scale: f32,
    pub(crate) lse_scale: f32,
    pub(crate) num_heads: u32,
    pub(crate) q_nope_at: u32,
    pub(crate) q_nope_token_stride: u32,
    pub(crate) q_nope_head_stride: u32,
    pub(crate) q_pe_at: u32,
    pub(crate) q_pe_token_stride: u32,
    pub(crate) q_pe_head_stride: u32,
    pub(crate) kv_at: u32,
    pub(crate) kv_block_stride: u32,
    pub(crate) out_at: u32,
    pub(crate) out_token_stride: u32,
    pub(crate) out_head_stride: u32,
    pub(crate) lse_at: u32,
    pub(crate) lse_token_stride: u32,
    pub(crate) lse_head_stride: u32,
    pub(crate) max_queries: u32,
    pub(crate) has_lengths: u32,
    pub(crate) indices_at: u32,
    pub(crate) indices_stride: u32,
    pub(crate) lengths_at: u32,
    pub(crate) lengths_stride: u32,
    pub(crate) first_slot: u32,
    pub(crate) num_slots: u32,
    pub(crate) reserved_0: u32,
    pub(crate) reserved_1: u32,
}

/// For batches of at least one query token.
pub(super) fn bind(
    gpu: &Gpu,
    layout: &Layout,
    spec: &MlaDecode,
    (topk, max_queries): (u32, u32),
    layer: &MlaDecodeArgs<&wgpu::Buffer>,
) -> Result<wgpu::BindGroup> {
    // Both are bound whole unless arrays share buffers, and one buffer cannot be bound twice to be written.
    if layer.out.buffer == layer.lse.buffer && !gpu.shared.shared_buffers {
        return Err(Error::Aliased { a: "out", b: "lse" });
    }
    let (latent, rope) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
    let [q_nope, q_pe] = layer.query_parts(spec);
    let (tokens, heads) = (u64::from(max_queries), u64::from(spec.shape.num_heads));
    let (q_bytes, out_bytes) = (spec.query.bytes() as u64, spec.out.bytes() as u64);
    let kv_oct = unit_bytes(spec);
    // Elements from `begin` to `end`, of `size` bytes each, or bytes of the cache; a binding holds at least one of the shader's `unit`s.
    let window = |what, buffer, begin: u64, end: u64, size: u64, unit: u64| {
        let view = begin.saturating_mul(size)..end.saturating_mul(size);
        // Without a rotary part its view is empty and unread: the front of its buffer will do.
        let view = if view.is_empty() { 0..unit * size } else { view };
        let window = Window::new(gpu, what, buffer, view.clone())?;
        let at = window.at(view.start, 1, size * unit);
        Ok::<_, Error>((window, at))
    };
    let q_nope_end = q_nope.end(tokens, heads, latent.into());
    let q_pe_end = q_pe.end(tokens, heads, rope.into());
    let out_end = layer.out.end(tokens, heads, latent.into());
    let lse_end = layer.lse.end(tokens, heads, 1);
    let kv_end = layer.kv.end(&spec.kv, &spec.shape);
    // Each with the units from its front to the view.
    let windows = [
        window("q_nope", q_nope.buffer, q_nope.offset, q_nope_end, q_bytes, 8)?,
        window("q_pe", q_pe.buffer, q_pe.offset, q_pe_end, q_bytes, 8)?,
        window("kv", layer.kv.buffer, layer.kv.base(), kv_end, 1, kv_oct)?,
        window("out", layer.out.buffer, layer.out.offset, out_end, out_bytes, 8)?,
        window("lse", layer.lse.buffer, layer.lse.offset, lse_end, 4, 1)?,
    ];

    let lists =
        layer.indices.as_ref().map(|lists| Lists::new(gpu, lists, (topk, max_queries))).transpose()?;
    let (slots, lengths) = (lists.map(|lists| lists.slots), lists.and_then(|lists| lists.lengths));
    let (first_slot, num_slots) = layer.kv.slots(&spec.kv);
    let (logit_scale, out_scale, lse_scale) = layer.kernel_scales();
    let octs = |elems: u64| (elems / 8) as u32;
    let params = LayerUniform {
        logit_scale,
        out_scale,
        lse_scale,
        num_heads: spec.shape.num_heads,
        q_nope_at: windows[0].1,
        q_nope_token_stride: octs(q_nope.token_stride),
        q_nope_head_stride: octs(q_nope.head_stride),
        q_pe_at: windows[1].1,
        q_pe_token_stride: octs(q_pe.token_stride),
        q_pe_head_stride: octs(q_pe.head_stride),
        kv_at: windows[2].1,
        kv_block_stride: (layer.kv.block_stride / kv_oct) as u32,
        out_at: windows[3].1,
        out_token_stride: octs(layer.out.token_stride),
        out_head_stride: octs(layer.out.head_stride),
        lse_at: windows[4].1,
        lse_token_stride: layer.lse.token_stride as u32,
        lse_head_stride: layer.lse.head_stride as u32,
        max_queries,
        has_lengths: lengths.is_some().into(),
        indices_at: slots.map_or(0, |words| words.at),
        indices_stride: slots.map_or(0, |words| words.stride),
        lengths_at: lengths.map_or(0, |words| words.at),
        lengths_stride: lengths.map_or(0, |words| words.stride),
        first_slot,
        num_slots,
        reserved_0: 0,
        reserved_1: 0,
    };
    check_uniform(gpu, &params)?;
    let params = scoped(gpu.device(), "a layer's scales and strides", || {
        uniform(gpu.device(), "mla.layer", bytemuck::bytes_of(&params))
    })?;
    let sinks = layer.attn_sink.as_ref().map(|sinks| lists::sinks(gpu, sinks)).transpose()?;
    let resources =
        windows.iter().map(|(window, _)| window.resource()).chain([params.as_entire_binding().into()]);
    let resources = (0..)
        .zip(resources)
        .chain(lists.iter().flat_map(Lists::resources))
        .chain(sinks.iter().map(|sinks| (lists::SINKS, sinks.as_entire_binding().into())));
    numbered_group(gpu, "mla.layer", layout, resources)
}
