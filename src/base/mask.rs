//! Which keys a query token sees.

/// Which keys of its sequence a query token sees, in a decode's [`Batch`](crate::Batch) or a prefill's
/// [`PrefillSequence`](crate::PrefillSequence).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mask<'a> {
    /// Bottom-right causal: query `i` of `q_len` sees key `j` where `j <= kv_len - q_len + i`, so that the last query sees all keys.
    #[default]
    Causal,
    /// Causal from another diagonal, such as that of a part of the keys: query `i` of the sequence sees the first
    /// `clamp(first + i, 0, kv_len)` keys. The number may be negative.
    CausalFrom(i64),
    /// Every key of its sequence.
    Full,
    /// The keys before `bounds[token]`: one bound for each query token of the batch. A prefill refuses it.
    Bounds(&'a [u32]),
}

impl Mask<'_> {
    /// Keys that query `i` of `q_len` sees, of `kv_len`; `token` is its index in the batch.
    pub(crate) fn visible(&self, i: i64, q_len: u32, kv_len: u32, token: usize) -> u32 {
        match self {
            Self::Bounds(bounds) => bounds.get(token).copied().unwrap_or(0),
            // The clamp leaves what fits.
            _ => self.first(q_len, kv_len).saturating_add(i).clamp(0, kv_len.into()) as u32,
        }
    }

    /// Keys that query 0 sees where each query sees one more than the one before it, before it is clamped to what there is.
    pub(crate) fn first(&self, q_len: u32, kv_len: u32) -> i64 {
        match *self {
            Self::Causal => i64::from(kv_len) - i64::from(q_len) + 1,
            Self::CausalFrom(first) => first,
            Self::Full | Self::Bounds(_) => i64::MAX,
        }
    }
}
