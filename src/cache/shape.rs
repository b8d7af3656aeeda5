//! The dims of the attention, and their checks. Pure.

use crate::base::error::{Error, Result};

/// Dims of one MLA layer in its absorbed form: `H` heads that share one latent row a token.
///
/// A cache row has `L + R` elements, the latent (also the value) first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaShape {
    /// `H`, query heads on this device: 1 to 128.
    pub num_heads: u32,
    /// `L`, elements of the latent: 512 or 256.
    pub kv_lora_rank: u32,
    /// `R`, elements of the rotary part: 0, 32 or 64.
    pub qk_rope_head_dim: u32,
}

/// The pairs `(L, R)` that are served, and a model of each.
pub const SUPPORTED_DIMS: [(u32, u32, &str); 4] = [
    (512, 64, "DeepSeek V2/V3/R1, Kimi-K2, GLM"),
    (256, 64, "Mistral Small 4"),
    (256, 32, "MiniCPM3"),
    (512, 0, "NoPE"),
];

impl MlaShape {
    /// Elements of a cache row and of a query row: `L + R`, at most `u32::MAX`.
    #[must_use]
    pub const fn row_elems(&self) -> u32 {
        self.kv_lora_rank.saturating_add(self.qk_rope_head_dim)
    }

    /// Whether these dims are served: see [`SUPPORTED_DIMS`].
    ///
    /// # Errors
    /// [`Error::Shape`] where no kernel serves them.
    pub fn check(&self) -> Result<()> {
        if !(1..=128).contains(&self.num_heads) {
            let got = self.num_heads.into();
            return Err(Error::Shape { what: "num_heads", got, cure: "must be 1..=128" });
        }
        let dims = (self.kv_lora_rank, self.qk_rope_head_dim);
        if !SUPPORTED_DIMS.iter().any(|&(l, r, _)| (l, r) == dims) {
            return Err(Error::Shape {
                what: "kv_lora_rank + qk_rope_head_dim",
                got: u64::from(dims.0) + u64::from(dims.1),
                cure: "kv_lora_rank/qk_rope_head_dim must be 512/64, 256/64, 256/32 or 512/0",
            });
        }
        Ok(())
    }
}
