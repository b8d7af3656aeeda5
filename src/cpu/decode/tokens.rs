//! The tokens of a work item, a block at a time: those of a sequence's pages, or the listed slots.

use super::Call;
use crate::cpu::kernels::tile::BLOCK;
use crate::plan::WorkItem;

/// Tokens that are widened and attended together: their rows of the cache.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    rows: [&'a [u8]; BLOCK],
    pub(super) tokens: usize,
}

impl<'a> Block<'a> {
    pub(super) fn rows(&self) -> &[&'a [u8]] {
        &self.rows[..self.tokens]
    }
}

/// The tokens of a work item that were not given out yet.
pub(super) struct Tokens<'c, 'a> {
    call: &'c Call<'a>,
    /// Page ids, or `None` where the tokens are listed by slots.
    pages: Option<&'a [u32]>,
    /// The first entry of the list, in elements.
    list: usize,
    begin: u32,
    next: u32,
    end: u32,
}

impl<'c, 'a> Tokens<'c, 'a> {
    pub(super) fn new(call: &'c Call<'a>, item: &WorkItem) -> Self {
        let (begin, end) = (item.kv_begin, item.kv_end);
        let Some(lists) = &call.binding.lists else {
            let pages = Some(&call.pages[item.page_begin as usize..]);
            return Self { call, pages, list: 0, begin, next: begin, end };
        };
        let token = call.queries[call.row(item, 0).0].token as usize;
        let length = lists.lengths.map_or(i32::MAX, |lengths| word(call.topk_length, lengths.at(token, 0)));
        let end = end.min(length.max(0) as u32).max(begin);
        Self { call, pages: None, list: lists.slots.at(token, 0), begin, next: begin, end }
    }

    /// How many of the item's tokens a query token sees that sees those before `visible`: of a list, all.
    pub(super) fn seen(&self, visible: u32) -> u32 {
        match self.pages {
            Some(_) => visible.clamp(self.begin, self.end) - self.begin,
            None => u32::MAX,
        }
    }

    /// The next tokens, up to a block of them; none at the end. Entries that are no slot of this cache are left out.
    pub(super) fn next_block(&mut self) -> Block<'a> {
        let mut block = Block { rows: [&[]; BLOCK], tokens: 0 };
        while block.tokens < BLOCK && self.next < self.end {
            if let Some(at) = self.place(self.next) {
                block.rows[block.tokens] = &self.call.kv[at..][..self.call.token.bytes as usize];
                block.tokens += 1;
            }
            self.next += 1;
        }
        block
    }

    /// The first byte of a token, if it has one.
    fn place(&self, token: u32) -> Option<usize> {
        let binding = self.call.binding;
        let page_size = self.call.spec.kv.page_size;
        match (self.pages, &binding.lists) {
            (None, Some(lists)) => {
                let slot = word(self.call.indices, self.list + token as usize) as u32;
                // A negative entry becomes a large one.
                let slot = slot.wrapping_sub(lists.first_slot);
                (slot < lists.num_slots).then(|| binding.kv.slot(slot as usize))
            }
            (pages, _) => {
                let page = pages?[(token / page_size) as usize] as usize;
                Some(binding.kv.at(page, (token % page_size) as usize))
            }
        }
    }
}

/// The `index`-th i32 of an array.
fn word(bytes: &[u8], index: usize) -> i32 {
    bytemuck::pod_read_unaligned(&bytes[4 * index..][..4])
}
