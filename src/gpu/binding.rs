//! A layer's buffers, checked and bound once.

use bytemuck::{Pod, Zeroable};

use super::pipelines::{Layouts, Pipelines};
use super::scope::{self, scoped};
use super::window::Window;
use crate::layer::{Layer, kernel_scales};
use crate::{Error, MlaSpec, Result};

/// One layer of a model, ready to be recorded with any step of the decode that bound it.
#[derive(Debug, Clone)]
pub struct LayerBinding {
    /// `None` where there is room for no query token: then nothing is ever dispatched.
    pub(crate) group: Option<wgpu::BindGroup>,
    /// Query tokens that the bound arrays hold.
    pub(crate) max_queries: u32,
    /// Which decode it was made for.
    pub(crate) owner: u64,
}

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
    pub(crate) reserved_0: u32,
}

pub(crate) fn bind(
    pipelines: &Pipelines,
    layouts: &Layouts,
    spec: &MlaSpec,
    owner: u64,
    max_queries: u32,
    layer: &Layer<&wgpu::Buffer>,
) -> Result<LayerBinding> {
    layer.check(spec, max_queries, wgpu::Buffer::size)?;
    let (latent, rope) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
    let (q_nope, q_pe) = layer.query.parts(latent);
    // Without a rotary part its binding is unread; any buffer of the right kind will do.
    let q_pe = if rope == 0 { q_nope } else { q_pe };
    let (tokens, heads) = (u64::from(max_queries), u64::from(spec.shape.num_heads));

    for (a, written) in [("out", layer.out.buffer), ("lse", layer.lse.buffer)] {
        for (b, read) in [("q_nope", q_nope.buffer), ("q_pe", q_pe.buffer), ("kv", layer.kv.buffer)] {
            if written == read {
                return Err(Error::Aliased { a, b });
            }
        }
    }
    if layer.out.buffer == layer.lse.buffer {
        return Err(Error::Aliased { a: "out", b: "lse" });
    }

    if max_queries == 0 {
        return Ok(LayerBinding { group: None, max_queries, owner });
    }

    let limits = pipelines.device().limits();
    let (q_bytes, kv_bytes, out_bytes) = (bytes(spec.query), bytes(spec.kv.dtype), bytes(spec.out));
    // Elements from `begin` to `end`, of `size` bytes each; a binding holds at least one of the shader's `unit`s.
    let window = |what, buffer, begin: u64, end: u64, size: u64, unit: u64| {
        let view = begin.saturating_mul(size)..end.saturating_mul(size);
        // Without a rotary part its view is empty and unread: the front of its buffer will do.
        let view = if view.is_empty() { 0..unit * size } else { view };
        Window::new(&limits, what, buffer, view.clone()).map(|window| (window, view.start - window.offset))
    };
    let q_nope_end = q_nope.end(tokens, heads, latent.into());
    let q_pe_end = q_pe.end(tokens, heads, rope.into());
    let out_end = layer.out.end(tokens, heads, latent.into());
    let lse_end = layer.lse.end(tokens, heads, 1);
    // Each with the bytes from its front to the view.
    let windows = [
        window("q_nope", q_nope.buffer, q_nope.offset, q_nope_end, q_bytes, 8)?,
        window("q_pe", q_pe.buffer, q_pe.offset, q_pe_end, q_bytes, 8)?,
        window("kv", layer.kv.buffer, layer.kv.base(), layer.kv.end(spec), kv_bytes, 8)?,
        window("out", layer.out.buffer, layer.out.offset, out_end, out_bytes, 8)?,
        window("lse", layer.lse.buffer, layer.lse.offset, lse_end, 4, 1)?,
    ];

    let (logit_scale, out_scale, lse_scale) = kernel_scales(layer);
    let octs = |elems: u64| (elems / 8) as u32;
    let uniform = LayerUniform {
        logit_scale,
        out_scale,
        lse_scale,
        num_heads: spec.shape.num_heads,
        q_nope_at: octs(windows[0].1 / q_bytes),
        q_nope_token_stride: octs(q_nope.token_stride),
        q_nope_head_stride: octs(q_nope.head_stride),
        q_pe_at: octs(windows[1].1 / q_bytes),
        q_pe_token_stride: octs(q_pe.token_stride),
        q_pe_head_stride: octs(q_pe.head_stride),
        kv_at: octs(windows[2].1 / kv_bytes),
        kv_block_stride: octs(layer.kv.block_stride),
        out_at: octs(windows[3].1 / out_bytes),
        out_token_stride: octs(layer.out.token_stride),
        out_head_stride: octs(layer.out.head_stride),
        lse_at: (windows[4].1 / 4) as u32,
        lse_token_stride: layer.lse.token_stride as u32,
        lse_head_stride: layer.lse.head_stride as u32,
        max_queries,
        reserved_0: 0,
    };

    let device = pipelines.device();
    let group = scoped(device, "a layer's binding", || {
        let uniform = scope::uniform(device, "mla.layer", bytemuck::bytes_of(&uniform));
        let resources =
            windows.iter().map(|(window, _)| window.resource()).chain([uniform.as_entire_binding()]);
        let entries: Vec<_> = resources
            .zip(0..)
            .map(|(resource, binding)| wgpu::BindGroupEntry { binding, resource })
            .collect();
        device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("mla.layer"),
            layout: &layouts.layer,
            entries: &entries,
        })
    })?;
    Ok(LayerBinding { group: Some(group), max_queries, owner })
}

fn bytes(dtype: crate::Dtype) -> u64 {
    dtype.bytes() as u64
}
