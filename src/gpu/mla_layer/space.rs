//! What lies between the ops of a layer: `T` query tokens, `D` of them up to the last that is decoded, `S` rows of a chunk.

use super::LayerCapacity;
use crate::gpu::Pipelines;
use crate::gpu::scope::scoped;
use crate::layer::View;
use crate::mla_layer::{MlaLayerSpec, Target};
use crate::{Error, Result};

type Array<'a> = View<&'a wgpu::Buffer>;

#[derive(Debug)]
pub(super) struct Space {
    /// `S`.
    pub(super) num_rows: u32,
    /// i32 `[T]`.
    pub(super) positions: wgpu::Buffer,
    /// f32 `[T, H]`: of the output, of what takes turns with it, and of what is merged.
    pub(super) lse: [wgpu::Buffer; 3],
    q_pe: wgpu::Buffer,
    ql_nope: wgpu::Buffer,
    latent_out: wgpu::Buffer,
    rows: wgpu::Buffer,
    k_nope: wgpu::Buffer,
    v: wgpu::Buffer,
    other: wgpu::Buffer,
    partial: wgpu::Buffer,
    sets: wgpu::Buffer,
    set_lse: wgpu::Buffer,
    chunk_bytes: u64,
}

impl Space {
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub(super) fn new(
        pipelines: &Pipelines,
        spec: &MlaLayerSpec,
        capacity: &LayerCapacity,
        num_sets: u32,
    ) -> Result<Self> {
        let caps = pipelines.caps();
        let limit = caps.max_buffer_bytes.min(caps.max_binding_bytes);
        let buffer = |what: &'static str, count: u32, row_bytes: u64| {
            let need = (u64::from(count) * row_bytes).next_multiple_of(4).max(4);
            if need > limit {
                let cure = "make the layer with a smaller LayerCapacity or workspace_bytes";
                return Err(Error::Limit { what, need, limit, cure });
            }
            scoped(pipelines.device(), what, || {
                pipelines.device().create_buffer(&wgpu::BufferDescriptor {
                    label: Some(what),
                    size: need,
                    usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                })
            })
        };
        let (heads, bytes) = (u64::from(spec.shape.num_heads), spec.dtype.bytes() as u64);
        let row = |elems: u32| u64::from(elems) * bytes;
        let LayerCapacity { tokens, decode_tokens, .. } = *capacity;
        let set_rows = decode_tokens.saturating_mul(num_sets);
        // No more than the pool has, if that is less.
        let num_rows = u64::from(spec.workspace_rows()).min(spec.kv.num_slots()) as u32;
        let latent = heads * row(spec.shape.kv_lora_rank);
        let value = heads * row(spec.v_head_dim);
        Ok(Self {
            num_rows,
            positions: buffer("mla.layer.positions", tokens, 4)?,
            lse: [
                buffer("mla.layer.lse", tokens, heads * 4)?,
                buffer("mla.layer.lse_other", tokens, heads * 4)?,
                buffer("mla.layer.lse_partial", tokens, heads * 4)?,
            ],
            q_pe: buffer("mla.layer.q_pe", tokens, heads * row(spec.shape.qk_rope_head_dim))?,
            ql_nope: buffer("mla.layer.ql_nope", decode_tokens, latent)?,
            latent_out: buffer("mla.layer.latent_out", decode_tokens, latent)?,
            rows: buffer("mla.layer.rows", num_rows, row(spec.shape.row_elems()))?,
            k_nope: buffer("mla.layer.k_nope", num_rows, heads * row(spec.qk_nope_head_dim))?,
            v: buffer("mla.layer.v", num_rows, value)?,
            other: buffer("mla.layer.other", tokens, value)?,
            partial: buffer("mla.layer.partial", tokens, value)?,
            sets: buffer("mla.layer.sets", set_rows, value)?,
            set_lse: buffer("mla.layer.set_lse", set_rows, heads * 4)?,
            chunk_bytes: u64::from(num_rows) * spec.workspace_row_bytes(),
        })
    }

    /// Bytes of the keys and values of a chunk.
    pub(super) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// `[T, H, R]`, rotated.
    pub(super) fn q_pe(&self, spec: &MlaLayerSpec) -> Array<'_> {
        View::dense(&self.q_pe, spec.shape.num_heads, spec.shape.qk_rope_head_dim)
    }

    /// `[D, H, L]`.
    pub(super) fn ql_nope(&self, spec: &MlaLayerSpec) -> Array<'_> {
        View::dense(&self.ql_nope, spec.shape.num_heads, spec.shape.kv_lora_rank)
    }

    /// `[D, H, L]`.
    pub(super) fn latent_out(&self, spec: &MlaLayerSpec) -> Array<'_> {
        View::dense(&self.latent_out, spec.shape.num_heads, spec.shape.kv_lora_rank)
    }

    /// `[S, L + R]`.
    pub(super) fn rows(&self, spec: &MlaLayerSpec) -> Array<'_> {
        View::dense(&self.rows, 1, spec.shape.row_elems())
    }

    /// `[S, H, P]`.
    pub(super) fn k_nope(&self, spec: &MlaLayerSpec) -> Array<'_> {
        View::dense(&self.k_nope, spec.shape.num_heads, spec.qk_nope_head_dim)
    }

    /// `[S, H, V]`.
    pub(super) fn v(&self, spec: &MlaLayerSpec) -> Array<'_> {
        View::dense(&self.v, spec.shape.num_heads, spec.v_head_dim)
    }

    /// `[sets, D, H, V]` and its LSE: what decodes attend alone, and parts of the prefixes that they share.
    pub(super) fn sets(&self, spec: &MlaLayerSpec) -> (Array<'_>, Array<'_>) {
        let heads = spec.shape.num_heads;
        (View::dense(&self.sets, heads, spec.v_head_dim), View::dense(&self.set_lse, heads, 1))
    }

    /// `[T, H, V]` and its LSE.
    pub(super) fn target<'a>(
        &'a self,
        spec: &MlaLayerSpec,
        out: Array<'a>,
        target: Target,
    ) -> (Array<'a>, Array<'a>) {
        let heads = spec.shape.num_heads;
        let dense = |buffer| View::dense(buffer, heads, spec.v_head_dim);
        let array = match target {
            Target::Out => out,
            Target::Other => dense(&self.other),
            Target::Partial => dense(&self.partial),
        };
        (array, View::dense(&self.lse[target as usize], heads, 1))
    }
}
