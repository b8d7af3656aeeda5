//! A batch whose lengths and pages are known on the device only.

mod template;

pub(crate) use template::Sequences;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use template::template;

use super::op::{Op, sealed};
use super::{KvAppend, RopeAppend};
use crate::base::error::{Error, Result};
use crate::base::view::fits;
use crate::cache::KvSpec;
use crate::ops::RopeAppendBatch;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use crate::plan::shares::Pattern;

/// The arrays of a batch as the device has them, each i32, dense and at the front of its buffer. What is in them is not known to the
/// host: kernels that read them skip or clamp what leads out of the pool.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBatch<B> {
    /// `[batch]`: tokens in the cache, this step's new ones included; 0 or less for a sequence that is only padding. Where ranks hold
    /// shares of them, those of the whole sequence.
    pub seq_lens: B,
    /// `[batch + 1]`: where each sequence's query tokens begin. Tokens from the last entry on are padding.
    pub query_start_loc: B,
    /// `[batch, max_pages]`, of what this device holds. Entries at or past `ceil(seq_len / page_size)` may hold anything.
    pub block_table: B,
    /// Sequences, those that are padding included: at least 1.
    pub batch: u32,
    /// Entries in a row of `block_table`: at least 1.
    pub max_pages: u32,
}

impl<'a, B> DeviceBatch<&'a B> {
    /// # Errors
    /// [`Error::Shape`], and [`Error::BufferTooSmall`], given each buffer's bytes.
    pub(crate) fn check(&self, size: impl Fn(&B) -> u64) -> Result<()> {
        for (what, got) in [("batch", self.batch), ("max_pages", self.max_pages)] {
            if got == 0 {
                return Err(Error::Shape { what, got: 0, cure: "must be at least 1" });
            }
        }
        for ((what, buffer), words) in self.arrays().into_iter().zip(self.words()) {
            fits(what, words.saturating_mul(4), size(buffer))?;
        }
        Ok(())
    }

    pub(crate) fn arrays(&self) -> [(&'static str, &'a B); 3] {
        [
            ("seq_lens", self.seq_lens),
            ("query_start_loc", self.query_start_loc),
            ("block_table", self.block_table),
        ]
    }

    /// The length of each array in words, in the order of `arrays`.
    pub(crate) fn words(&self) -> [u64; 3] {
        let batch = u64::from(self.batch);
        [batch, batch + 1, batch * u64::from(self.max_pages)]
    }
}

/// The most new tokens of a step: so many of the shortest rows, 288 elements of e4m3, already take 19 GB.
pub(crate) const MOST_NEW_TOKENS: u32 = 1 << 26;

/// A mapping in which no token has a slot.
///
/// # Errors
/// [`Error::Limit`] and [`Error::OutOfMemory`].
pub(crate) fn no_slots(max_tokens: u32) -> Result<Vec<i64>> {
    if max_tokens > MOST_NEW_TOKENS {
        let (what, cure) = ("max_tokens of BatchTables", "pass the most new tokens of a step");
        return Err(Error::Limit { what, need: max_tokens.into(), limit: MOST_NEW_TOKENS.into(), cure });
    }
    let mut slots = Vec::new();
    let out_of_memory = |_| Error::OutOfMemory { what: "a slot_mapping" };
    slots.try_reserve_exact(max_tokens as usize).map_err(out_of_memory)?;
    slots.resize(max_tokens as usize, -1);
    Ok(slots)
}

/// A batch is recorded by tables of the pool and share that it was bound for.
///
/// # Errors
/// [`Error::LayoutMismatch`].
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn check_binding(
    is_of_pool: bool,
    tables: &std::sync::Arc<Pattern>,
    batch: &std::sync::Arc<Pattern>,
) -> Result<()> {
    if !is_of_pool {
        let detail =
            "the batch was bound by BatchTables of another pool of pages: bind it with those that record it";
        return Err(Error::LayoutMismatch { detail });
    }
    // Most often they are one and the same: a pattern may have 65,536 blocks.
    if !std::sync::Arc::ptr_eq(tables, batch) && tables != batch {
        let detail = "the batch was bound by BatchTables of another rank or of other shares: bind it with those that record it";
        return Err(Error::LayoutMismatch { detail });
    }
    Ok(())
}

/// An op that writes new tokens to slots of a cache, which may be written on the device.
pub trait AppendsSlots: Op<Capacity = u32> + sealed::Sealed {
    /// What a step of these slots is prepared with.
    fn of_slots(slot_mapping: &[i64]) -> Self::Input<'_>;

    /// The cache.
    fn cache(&self) -> &KvSpec;
}

impl sealed::Sealed for KvAppend {}
impl AppendsSlots for KvAppend {
    fn of_slots(slot_mapping: &[i64]) -> &[i64] {
        slot_mapping
    }

    fn cache(&self) -> &KvSpec {
        &self.kv
    }
}

impl sealed::Sealed for RopeAppend {}
impl AppendsSlots for RopeAppend {
    fn of_slots(slot_mapping: &[i64]) -> RopeAppendBatch<'_> {
        RopeAppendBatch::slots(slot_mapping)
    }

    fn cache(&self) -> &KvSpec {
        &self.append.kv
    }
}
