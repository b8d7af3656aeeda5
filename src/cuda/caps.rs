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
    /// TMA, and a driver that makes tensor maps.
    pub tma: bool,
}
