//! Arrays between the ops of a layer: `T` query tokens, `D` of them up to the last that is decoded, `S` rows of a chunk.

use super::{LayerCapacity, MlaLayer, Target};
use crate::base::error::{Error, Result};
use crate::base::view::View;
use crate::ops::Device;

/// The arrays, as buffers of a device.
#[derive(Debug)]
pub struct Workspace<B> {
    /// `S`.
    pub(super) num_rows: u32,
    /// i32 `[T]`: unread, as steps have positions of their own.
    pub(super) positions: B,
    /// f32 `[T, H]`, of each [`Target`].
    lse: [B; 3],
    q_pe: B,
    /// Rotated queries in codes, where absorbed ones are; else of a few bytes.
    q_pe_codes: B,
    ql_nope: B,
    latent_out: B,
    rows: B,
    k_nope: B,
    v: B,
    other: B,
    partial: B,
    sets: B,
    set_lse: B,
    spec: MlaLayer,
}

impl<B> Workspace<B> {
    /// `num_sets`: sets of the decodes' partial results, one of their own tokens and one for each part of a shared prefix; 0 without
    /// prefixes.
    ///
    /// # Errors
    /// [`Error::Limit`] and [`Error::OutOfMemory`].
    pub(super) fn new(
        device: &impl Device<Buffer = B>,
        spec: &MlaLayer,
        capacity: &LayerCapacity,
        num_sets: u32,
    ) -> Result<Self> {
        let buffer = |what: &'static str, count: u32, row_bytes: u64| {
            let (need, limit) = (u64::from(count) * row_bytes, device.largest_binding());
            if need > limit {
                let cure = "make the layer with a smaller LayerCapacity or workspace_bytes";
                return Err(Error::Limit { what, need, limit, cure });
            }
            device.buffer(need)
        };
        let (heads, bytes) = (u64::from(spec.shape.num_heads), spec.dtype.bytes() as u64);
        let row = |elems: u32| u64::from(elems) * bytes;
        let LayerCapacity { tokens, decode_tokens, .. } = *capacity;
        let set_rows = decode_tokens.saturating_mul(num_sets);
        let num_rows = spec.workspace_rows();
        let latent = heads * row(spec.shape.kv_lora_rank);
        let of_query = |elems: u32| heads * u64::from(elems) * spec.query.bytes() as u64;
        let coded = if spec.query == spec.dtype { 0 } else { decode_tokens };
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
            q_pe_codes: buffer("mla.layer.q_pe_codes", coded, of_query(spec.shape.qk_rope_head_dim))?,
            ql_nope: buffer("mla.layer.ql_nope", decode_tokens, of_query(spec.shape.kv_lora_rank))?,
            latent_out: buffer("mla.layer.latent_out", decode_tokens, latent)?,
            rows: buffer("mla.layer.rows", num_rows, row(spec.shape.row_elems()))?,
            k_nope: buffer("mla.layer.k_nope", num_rows, heads * row(spec.qk_nope_head_dim))?,
            v: buffer("mla.layer.v", num_rows, value)?,
            other: buffer("mla.layer.other", tokens, value)?,
            partial: buffer("mla.layer.partial", tokens, value)?,
            sets: buffer("mla.layer.sets", set_rows, value)?,
            set_lse: buffer("mla.layer.set_lse", set_rows, heads * 4)?,
            spec: *spec,
        })
    }

    /// Bytes of the keys and values of a chunk.
    pub(super) fn chunk_bytes(&self) -> u64 {
        u64::from(self.num_rows) * self.spec.workspace_row_bytes()
    }

    /// `[T, H, R]`, rotated.
    pub(super) fn q_pe(&self) -> View<&B> {
        View::dense(&self.q_pe, self.spec.shape.num_heads, self.spec.shape.qk_rope_head_dim)
    }

    /// `[D, H, R]`, rotated, as the absorbed decode reads it.
    pub(super) fn absorbed_q_pe(&self) -> View<&B> {
        let buffer = if self.spec.query == self.spec.dtype { &self.q_pe } else { &self.q_pe_codes };
        View::dense(buffer, self.spec.shape.num_heads, self.spec.shape.qk_rope_head_dim)
    }

    /// `[D, H, L]`, in the dtype of absorbed queries.
    pub(super) fn ql_nope(&self) -> View<&B> {
        View::dense(&self.ql_nope, self.spec.shape.num_heads, self.spec.shape.kv_lora_rank)
    }

    /// `[D, H, L]`.
    pub(super) fn latent_out(&self) -> View<&B> {
        View::dense(&self.latent_out, self.spec.shape.num_heads, self.spec.shape.kv_lora_rank)
    }

    /// `[S, L + R]`.
    pub(super) fn rows(&self) -> View<&B> {
        View::dense(&self.rows, 1, self.spec.shape.row_elems())
    }

    /// `[S, H, P]`.
    pub(super) fn k_nope(&self) -> View<&B> {
        View::dense(&self.k_nope, self.spec.shape.num_heads, self.spec.qk_nope_head_dim)
    }

    /// `[S, H, V]`.
    pub(super) fn v(&self) -> View<&B> {
        View::dense(&self.v, self.spec.shape.num_heads, self.spec.v_head_dim)
    }

    /// `[sets, D, H, V]` and its LSE: partial results of the decodes' own tokens, then of each part of a shared prefix.
    pub(super) fn sets(&self) -> (View<&B>, View<&B>) {
        let heads = self.spec.shape.num_heads;
        (View::dense(&self.sets, heads, self.spec.v_head_dim), View::dense(&self.set_lse, heads, 1))
    }

    /// `[T, H, V]` and its LSE.
    pub(super) fn target<'a>(&'a self, out: View<&'a B>, target: Target) -> (View<&'a B>, View<&'a B>) {
        let heads = self.spec.shape.num_heads;
        let dense = |buffer| View::dense(buffer, heads, self.spec.v_head_dim);
        let array = match target {
            Target::Out => out,
            Target::Other => dense(&self.other),
            Target::Partial => dense(&self.partial),
        };
        (array, View::dense(&self.lse[target as usize], heads, 1))
    }
}
