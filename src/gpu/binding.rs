//! A layer's buffers, checked and bound once.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::pipelines::{Layouts, Pipelines};
use super::scope::{self, scoped};
use crate::layer::{Layer, kernel_scales};
use crate::{Error, MlaSpec, Result};

/// One layer of a model, ready to be recorded with any step of the decode that bound it.
#[derive(Debug, Clone)]
pub struct LayerBinding {
    pub(crate) group: wgpu::BindGroup,
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
    pub(crate) reserved_0: u32,
    pub(crate) reserved_1: u32,
}

pub(crate) fn bind(
    pipelines: &Pipelines,
    layouts: &Layouts,
    spec: &MlaSpec,
    owner: u64,
    max_queries: u32,
    layer: &Layer<'_, wgpu::Buffer>,
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

    let limits = pipelines.device().limits();
    let (q_bytes, kv_bytes, out_bytes) = (bytes(spec.query), bytes(spec.kv.dtype), bytes(spec.out));
    let window = |what, buffer, begin: u64, end: u64, size: u64| {
        // An LSE is read by the element, all else by the oct.
        let unit = if what == "lse" { 4 } else { 8 * size };
        Window::new(&limits, what, buffer, begin.saturating_mul(size)..end.saturating_mul(size), unit)
    };
    let windows = [
        window("q_nope", q_nope.buffer, q_nope.offset, q_nope.end(tokens, heads, latent.into()), q_bytes)?,
        window("q_pe", q_pe.buffer, q_pe.offset, q_pe.end(tokens, heads, rope.into()), q_bytes)?,
        window("kv", layer.kv.buffer, layer.kv.base(), layer.kv.end(spec), kv_bytes)?,
        window(
            "out",
            layer.out.buffer,
            layer.out.offset,
            layer.out.end(tokens, heads, latent.into()),
            out_bytes,
        )?,
        window("lse", layer.lse.buffer, layer.lse.offset, layer.lse.end(tokens, heads, 1), 4)?,
    ];

    let (logit_scale, out_scale, lse_scale) = kernel_scales(layer);
    let octs = |elems: u64| (elems / 8) as u32;
    let uniform = LayerUniform {
        logit_scale,
        out_scale,
        lse_scale,
        num_heads: spec.shape.num_heads,
        q_nope_at: octs(windows[0].begin / q_bytes),
        q_nope_token_stride: octs(q_nope.token_stride),
        q_nope_head_stride: octs(q_nope.head_stride),
        q_pe_at: octs(windows[1].begin / q_bytes),
        q_pe_token_stride: octs(q_pe.token_stride),
        q_pe_head_stride: octs(q_pe.head_stride),
        kv_at: octs(windows[2].begin / kv_bytes),
        kv_block_stride: octs(layer.kv.block_stride),
        out_at: octs(windows[3].begin / out_bytes),
        out_token_stride: octs(layer.out.token_stride),
        out_head_stride: octs(layer.out.head_stride),
        lse_at: (windows[4].begin / 4) as u32,
        lse_token_stride: layer.lse.token_stride as u32,
        lse_head_stride: layer.lse.head_stride as u32,
        reserved_0: 0,
        reserved_1: 0,
    };

    let device = pipelines.device();
    let group = scoped(device, "a layer's binding", || {
        let uniform = scope::uniform(device, "mla.layer", bytemuck::bytes_of(&uniform));
        let resources = windows.iter().map(Window::resource).chain([uniform.as_entire_binding()]);
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
    Ok(LayerBinding { group, max_queries, owner })
}

fn bytes(dtype: crate::Dtype) -> u64 {
    dtype.bytes() as u64
}

/// The part of a buffer that is bound: all of it where the device allows, else an aligned range around the view.
pub(crate) struct Window<'a> {
    buffer: &'a wgpu::Buffer,
    offset: u64,
    size: u64,
    /// Bytes from the window's front to the view.
    pub(crate) begin: u64,
}

impl<'a> Window<'a> {
    /// `unit` is an element of the shader's array, of which a binding holds at least one.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::BufferUsage`] and [`Error::BufferTooSmall`].
    pub(crate) fn new(
        limits: &wgpu::Limits,
        what: &'static str,
        buffer: &'a wgpu::Buffer,
        view: Range<u64>,
        unit: u64,
    ) -> Result<Self> {
        if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::BufferUsage { what, usage: "STORAGE" });
        }
        // A binding ends on a whole word.
        let whole = buffer.size() & !3;
        // An empty view is not read, wherever it is: the front of its buffer will do.
        let Range { start: begin, end } = if view.is_empty() { 0..unit } else { view };
        if end > whole {
            return Err(Error::BufferTooSmall { what, end, size: whole });
        }
        let limit = limits.max_storage_buffer_binding_size;
        if whole <= limit {
            return Ok(Self { buffer, offset: 0, size: whole, begin });
        }
        let offset = begin - begin % u64::from(limits.min_storage_buffer_offset_alignment.max(1));
        let size = (end.next_multiple_of(4) - offset).max(256).min(whole - offset);
        if size > limit {
            let cure = "bind fewer pages or tokens at once, or make the device with `wanted`'s limits";
            return Err(Error::Limit { what: "max_storage_buffer_binding_size", need: size, limit, cure });
        }
        Ok(Self { buffer, offset, size, begin: begin - offset })
    }

    pub(crate) fn resource(&self) -> wgpu::BindingResource<'a> {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: self.buffer,
            offset: self.offset,
            size: std::num::NonZero::new(self.size),
        })
    }
}
