//! Scales that keep the arrays between the ops of an f16 layer in f16's range.
//!
//! Its dtype holds the input, the cache and the output; a product between them may be larger. `q_nope . W_UK` and `kv_c . W_UK` meet only
//! in logits, which are f32, and values only in sums, which are f32 too. So these products are stored scaled by a power of two, which the
//! softmax scale and the output undo: f16 then holds 2^22 of a key or query and 2^19 of a value, and what is larger saturates, so that no
//! finite input becomes infinite or NaN on the way. What f16 rounds to zero, below 2^-25, is 2^-19 of a key and 2^-22 of a value.
//!
//! f32 and bf16 hold every such product of their own input.

use super::MlaLayer;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};

/// Factors of what is stored between the ops; exact, as powers of two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scales {
    /// The factor of absorbed queries, of rotated ones and of expanded keys. Logits get smaller by it.
    pub keys: f32,
    /// The factor of expanded values and of partial results.
    pub values: f32,
    /// Whether products past the dtype's range saturate.
    pub saturates: bool,
}

impl MlaLayer {
    pub(super) fn scales(&self) -> Scales {
        match self.dtype {
            Dtype::F16 => Scales { keys: 1.0 / 64.0, values: 1.0 / 8.0, saturates: true },
            _ => Scales { keys: 1.0, values: 1.0, saturates: false },
        }
    }

    /// The factor of absorbed queries: codes have a scale of their own, and saturate by it.
    pub(super) fn query_scale(&self) -> f32 {
        if self.query == self.dtype { self.scales().keys } else { 1.0 }
    }
}

/// # Errors
/// [`Error::LayoutMismatch`] for codes that are past the dtype's range once they are scaled.
pub(super) fn check_range(spec: &MlaLayer, k_scale: f32) -> Result<()> {
    let cache = spec.kv.dtype();
    if spec.dtype == Dtype::F16 && cache.is_fp8() && k_scale * cache.max() > Dtype::F16.max() {
        let detail = "a layer of f16 has no latent past 65504, so the k_scale of its cache is at most 146: calibrate it, or use a layer of bf16";
        return Err(Error::LayoutMismatch { detail });
    }
    Ok(())
}
