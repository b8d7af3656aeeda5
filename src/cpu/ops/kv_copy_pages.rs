//! `kv_copy_pages` on host memory.

use std::sync::atomic::Ordering;

use crate::base::error::Result;
use crate::base::memory::collected;
use crate::cache::KvView;
use crate::cpu::buffer::{Access, Buffer, lock};
use crate::cpu::decode::Pages;
use crate::cpu::device::HostOp;
use crate::cpu::pool::Pool;
use crate::ops::{KvCopyPages, check_copies};

impl HostOp for KvCopyPages {
    type Prepared = Vec<(u32, u32)>;

    fn prepare(&self, copies: &[(u32, u32)]) -> Result<(Vec<(u32, u32)>, ())> {
        check_copies(&self.kv, copies)?;
        Ok((collected(copies.iter().copied(), copies.len(), "page copies")?, ()))
    }

    fn run(&self, _: &Pool, copies: &Vec<(u32, u32)>, view: &KvView<&Buffer>) -> Result<()> {
        // From the first slab to the second, if there are two.
        let mut slabs = view.each_slab();
        let from = slabs.next().unwrap_or_else(|| view.clone());
        let to = slabs.last().unwrap_or_else(|| from.clone());
        let locked = lock([(from.buffer, Access::Write), (to.buffer, Access::Write)]);
        let (sources, targets) = (locked.words(0), locked.words(1));
        let pages = Pages::of(view, &self.kv, &self.shape);
        let word = |page: u32| pages.at(page as usize, 0) / 4;
        let page_words = self.page_bytes() as usize / 4;
        let (read, written) = (from.pages(&self.kv), to.pages(&self.kv));
        for (from, to) in copies.iter().filter(|(from, to)| read.contains(from) && written.contains(to)) {
            let from = &sources[word(from - read.start)..][..page_words];
            let to = &targets[word(to - written.start)..][..page_words];
            for (from, to) in from.iter().zip(to) {
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
        Ok(())
    }
}
