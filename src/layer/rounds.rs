//! How many rounds prefills take, counted before they are planned. Pure.

use crate::base::error::{Error, Result};
use crate::plan::tables::PageRows;

/// The most entries of all rounds together, each a sequence that attends or is passed on: 1.3 GB.
const MOST_ENTRIES: u64 = 1 << 25;

/// Prompts, `(sequence, tokens)`, whose pages hold them, and that are attended in not too many parts of at most `tokens` tokens each. A
/// part is a round, which names every prompt.
///
/// # Errors
/// [`Error::SeqLen`] and [`Error::Limit`].
pub(super) fn check_rounds(
    pages: PageRows<'_>,
    prompts: impl ExactSizeIterator<Item = (u32, u32)>,
    tokens: u32,
) -> Result<()> {
    let (count, mut rounds) = (prompts.len() as u64, 0);
    for (sequence, len) in prompts {
        pages.used(sequence as usize, len)?;
        rounds += u64::from(len.div_ceil(tokens.max(1)));
    }
    let need = rounds.saturating_mul(count);
    if need > MOST_ENTRIES {
        let (what, limit) = ("parts of a layer's prompts, times prompts", MOST_ENTRIES);
        let cure =
            "use longer splits (SplitPolicy::FixedTokens), a larger workspace, or fewer prompts a step";
        return Err(Error::Limit { what, need, limit, cure });
    }
    Ok(())
}
