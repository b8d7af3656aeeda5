//! What a card can do. Pure.

/// What a card can do, as plain data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// Compute capability: 90 for 9.0.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Largest dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: u32,
    /// Whether it has TMA, with a driver that makes tensor maps.
    pub tma: bool,
    /// Whether it has `mma.sync` of FP8 codes, with a driver that reads PTX 8.4.
    pub fp8_mma: bool,
}

impl Card {
    /// Whether it has wgmma, with a driver that takes it.
    ///
    /// # Errors
    /// What is missing.
    pub fn has_wgmma(&self) -> Result<(), String> {
        if self.capability == 90 && self.tma {
            Ok(())
        } else {
            Err("no wgmma (needs compute capability 9.0, driver 525 or later)".into())
        }
    }

    /// Whether it multiplies FP8 codes by mma.sync, with a driver that takes it.
    ///
    /// # Errors
    /// What is missing.
    pub fn has_fp8_mma(&self) -> Result<(), String> {
        if self.fp8_mma {
            Ok(())
        } else {
            Err("no FP8 mma.sync (needs compute capability 8.9 or later, driver 550 or later)".into())
        }
    }

    /// Whether a block may have so much dynamic shared memory.
    ///
    /// # Errors
    /// How much it may have.
    pub fn has_shared(&self, need: u32) -> Result<(), String> {
        let has = self.shared_bytes;
        if need <= has {
            Ok(())
        } else {
            Err(format!("a block needs {need} bytes of shared memory, the card allows {has}"))
        }
    }
}

/// Cards that tests choose variants for.
#[cfg(test)]
impl Card {
    /// Every variant runs there.
    pub const H200: Self = Self {
        capability: 90,
        multiprocessors: 132,
        shared_bytes: 232_448,
        l2_bytes: 50 << 20,
        tma: true,
        fp8_mma: true,
    };
    pub const RTX_5090: Self = Self {
        capability: 120,
        multiprocessors: 170,
        shared_bytes: 101_376,
        l2_bytes: 96 << 20,
        tma: true,
        fp8_mma: true,
    };
    pub const A100: Self = Self {
        capability: 80,
        multiprocessors: 108,
        shared_bytes: 166_912,
        l2_bytes: 40 << 20,
        tma: false,
        fp8_mma: false,
    };
}
