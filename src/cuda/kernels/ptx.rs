//! The kernels of the crate `wgpu-mla-ptx`, as a card takes them.

use wgpu_mla_ptx::{ENTRIES, Entry};

use crate::cuda::caps::Card;

/// The compute capability since which a kernel may wait itself for the one before it.
pub(in crate::cuda) const HOPPER: u32 = 90;
/// Before an instruction for such cards, in the PTX of older ones a comment.
const SINCE_HOPPER: &str = "// sm_90: ";

/// The entry of a name that no other module has.
pub(in crate::cuda) fn named(name: &str) -> Option<&'static Entry> {
    let mut found = ENTRIES.iter().filter(|entry| entry.name == name);
    found.next().filter(|_| found.next().is_none())
}

/// The text of an entry for a card. `scripts/ptx.sh` has the assemblers read both.
pub(in crate::cuda) fn for_card(entry: &Entry, card: &Card) -> String {
    let ptx = entry.text();
    if card.capability < HOPPER || !entry.waits {
        return ptx;
    }
    let ptx = ptx.replace(SINCE_HOPPER, "").replace(".version 7.0", ".version 7.8");
    ptx.replace(".target sm_80", ".target sm_90").replace(".target sm_89", ".target sm_90")
}
