//! The PTX of the crate `wgpu-mla-ptx`, as it is loaded on a card.

use wgpu_mla_ptx::{ENTRIES, Entry};

use crate::cuda::caps::Card;

/// The compute capability since which there is programmatic dependent launch.
pub(in crate::cuda) const HOPPER: u32 = 90;
/// The prefix of an instruction for such cards. In the PTX for older cards the line stays a comment.
const SINCE_HOPPER: &str = "// sm_90: ";

/// The entry of a name that is in one module only.
pub(in crate::cuda) fn named(name: &str) -> Option<&'static Entry> {
    let mut found = ENTRIES.iter().filter(|entry| entry.name == name);
    found.next().filter(|_| found.next().is_none())
}

/// The PTX of an entry for a card, with or without these instructions. `scripts/ptx.sh` assembles both.
pub(in crate::cuda) fn for_card(entry: &Entry, card: &Card) -> String {
    let ptx = entry.text();
    if card.capability < HOPPER || !entry.waits {
        return ptx;
    }
    let ptx = ptx.replace(SINCE_HOPPER, "").replace(".version 7.0", ".version 7.8");
    ptx.replace(".target sm_80", ".target sm_90").replace(".target sm_89", ".target sm_90")
}
