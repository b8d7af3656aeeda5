//! What lies between the ops of a layer, in buffers that grow with the batch.

use super::super::MlaLayerSpec;
use super::super::plan::LayerPlan;
use crate::{Backend, Error, Result};

/// What lies between the ops. `T` query tokens, `S` rows of the workspace.
#[derive(Debug)]
pub(super) struct Workspace<T> {
    /// i32 `[T]`
    pub(super) positions: Room<T>,
    /// `[T, H, R]`, rotated
    pub(super) q_pe: Room<T>,
    /// `[T, H, L]`
    pub(super) ql_nope: Room<T>,
    /// `[T, H, L]`
    pub(super) latent_out: Room<T>,
    /// `[S, L + R]`, `[S, H, P]` and `[S, H, V]`: one buffer, within the budget
    pub(super) rows: Room<T>,
    pub(super) k_nope: Room<T>,
    pub(super) v: Room<T>,
    /// `[T, H, V]`
    pub(super) other: Room<T>,
    pub(super) partial: Room<T>,
    /// f32 `[T, H]`, of out, other and partial
    pub(super) lse: [Room<T>; 3],
    /// `[sets, T, H, V]` and f32 `[sets, T, H]` of the tokens up to the last that is decoded, with expanded prefixes
    pub(super) sets: Room<T>,
    pub(super) set_lse: Room<T>,
}

/// A buffer that is made, or made anew, where it is too small.
#[derive(Debug)]
pub(super) struct Room<T>(pub(super) Option<(T, u64)>);

impl<T> Default for Room<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> Room<T> {
    /// What was in it is gone if it grows.
    pub(super) fn grow(&mut self, backend: &impl Backend<Buffer = T>, bytes: u64) -> Result<()> {
        if self.0.as_ref().is_none_or(|(_, have)| *have < bytes) {
            self.0 = None;
            self.0 = Some((backend.buffer(bytes)?, bytes));
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::LayoutMismatch`] before the first step is prepared.
    pub(super) fn buffer(&self) -> Result<&T> {
        let detail = "a layer needs a step: call `MlaLayer::prepare` first";
        self.0.as_ref().map(|(buffer, _)| buffer).ok_or(Error::LayoutMismatch { detail })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |(_, bytes)| *bytes)
    }
}

impl<T> Default for Workspace<T> {
    fn default() -> Self {
        Self {
            positions: Room::default(),
            q_pe: Room::default(),
            ql_nope: Room::default(),
            latent_out: Room::default(),
            rows: Room::default(),
            k_nope: Room::default(),
            v: Room::default(),
            other: Room::default(),
            partial: Room::default(),
            lse: Default::default(),
            sets: Room::default(),
            set_lse: Room::default(),
        }
    }
}

impl<T> Workspace<T> {
    /// Makes room for a step, and only for what it does.
    pub(super) fn grow(
        &mut self,
        backend: &impl Backend<Buffer = T>,
        spec: &MlaLayerSpec,
        plan: &LayerPlan,
        num_parts: u32,
    ) -> Result<()> {
        let (heads, bytes) = (u64::from(spec.shape.num_heads), spec.dtype.bytes() as u64);
        let (latent, rope) = (u64::from(spec.shape.kv_lora_rank), u64::from(spec.shape.qk_rope_head_dim));
        let (nope, value) = (u64::from(spec.qk_nope_head_dim), u64::from(spec.v_head_dim));
        let tokens = plan.positions.len() as u64;
        let rows = plan.chunks.iter().map(|chunk| chunk.rows).max().unwrap_or(0).into();
        let decodes = u64::from(plan.decode.num_queries);
        let merges = if plan.num_merges > 0 { tokens } else { 0 };
        let sets = if num_parts > 0 { decodes * (u64::from(num_parts) + 1) } else { 0 };
        let [lse_out, lse_other, lse_partial] = &mut self.lse;
        for (room, count, row_bytes) in [
            (&mut self.positions, tokens, 4),
            (&mut self.q_pe, tokens, heads * rope * bytes),
            (&mut self.ql_nope, decodes, heads * latent * bytes),
            (&mut self.latent_out, decodes, heads * latent * bytes),
            (&mut self.rows, rows, (latent + rope) * bytes),
            (&mut self.k_nope, rows, heads * nope * bytes),
            (&mut self.v, rows, heads * value * bytes),
            (&mut self.other, merges, heads * value * bytes),
            (&mut self.partial, merges, heads * value * bytes),
            (lse_out, tokens, heads * 4),
            (lse_other, tokens, heads * 4),
            (lse_partial, merges, heads * 4),
            (&mut self.sets, sets, heads * value * bytes),
            (&mut self.set_lse, sets, heads * 4),
        ] {
            room.grow(backend, count * row_bytes)?;
        }
        Ok(())
    }
}
