//! Which pages of a pool are free, and how many sequences have each of the others.

use std::ops::Range;

use super::OUT_OF_MEMORY;
use crate::base::error::{Error, Result};

/// Free pages and the owners of the others, slab by slab.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Store {
    /// Pages in the pool.
    pub(super) total: u32,
    /// Pages of a slab: all, for a pool in one buffer.
    pub(super) slab_pages: u32,
    slabs: Vec<SlabStore>,
}

#[derive(Debug, Clone, PartialEq)]
struct SlabStore {
    total: u32,
    /// Owners of each page that was ever handed out. The ids at and past its end are free: a large pool costs no
    /// memory before it is used. An owner takes memory of its own, so a count cannot overflow.
    owners: Vec<usize>,
    /// Pages that were freed, counted in the slab; the last is handed out first.
    freed: Vec<u32>,
}

impl SlabStore {
    fn num_free_pages(&self) -> u32 {
        // `owners` and `freed` have at most `total` entries.
        self.total - self.owners.len() as u32 + self.freed.len() as u32
    }
}

impl Store {
    pub(super) fn new(total: u32, slab_pages: u32) -> Self {
        let slabs = (0..total).step_by(slab_pages as usize).map(|first| SlabStore {
            total: slab_pages.min(total - first),
            owners: Vec::new(),
            freed: Vec::new(),
        });
        Self { total, slab_pages, slabs: slabs.collect() }
    }

    pub(super) fn num_free_pages(&self) -> u32 {
        self.slabs.iter().map(SlabStore::num_free_pages).sum()
    }

    pub(super) fn check_room(&self, wanted: u64) -> Result<()> {
        let free = self.num_free_pages();
        if wanted > u64::from(free) {
            return Err(Error::OutOfPages { wanted, free, total: self.total });
        }
        Ok(())
    }

    /// Makes room for the owners of `wanted` more pages, whichever slabs they will be of, and for all of them in the lists of freed pages:
    /// what [`Self::take_all`] and [`Self::release`] do then cannot fail.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn reserve(&mut self, wanted: u64) -> Result<()> {
        for slab in &mut self.slabs {
            let never_used = slab.total as usize - slab.owners.len();
            let fresh = (wanted as usize).saturating_sub(slab.freed.len()).min(never_used);
            slab.owners.try_reserve(fresh).map_err(|_| OUT_OF_MEMORY)?;
            let ever_used = slab.owners.len() + fresh;
            slab.freed.try_reserve(ever_used - slab.freed.len()).map_err(|_| OUT_OF_MEMORY)?;
        }
        Ok(())
    }

    /// A page for one owner, as [`Self::take_all`] hands them out.
    pub(super) fn take(&mut self, near: Option<u32>) -> u32 {
        let slab = self.slab_for(near);
        match self.slabs[slab].freed.pop() {
            Some(page) => self.hand_out(slab, page..page + 1).start,
            None => self.fresh(slab, 1).start,
        }
    }

    /// Pages for one owner, behind those that it has: in the slab of its last page if there is one left, else in the slab with the most
    /// free pages, as a sequence in few slabs has few partial results. [`Self::check_room`] comes first.
    pub(super) fn take_all(&mut self, pages: &mut Vec<u32>, count: u64) {
        let mut left = count;
        while left > 0 {
            let slab = self.slab_for(pages.last().copied());
            let taken = match self.slabs[slab].freed.pop() {
                Some(page) => self.hand_out(slab, page..page + 1),
                // Consecutive pages are handed out at once: one by one, a hundred million pages would take seconds.
                None => self.fresh(slab, left),
            };
            left -= taken.len() as u64;
            pages.extend(taken);
        }
    }

    fn slab_for(&self, near: Option<u32>) -> usize {
        debug_assert!(self.num_free_pages() > 0, "check_room must come before take");
        let near = near.map(|page| (page / self.slab_pages) as usize);
        let near = near.filter(|&slab| self.slabs[slab].num_free_pages() > 0);
        let emptiest = || (0..self.slabs.len()).rev().max_by_key(|&slab| self.slabs[slab].num_free_pages());
        near.or_else(emptiest).unwrap_or(0)
    }

    /// Up to `most` pages of a slab that were never handed out.
    fn fresh(&mut self, slab: usize, most: u64) -> Range<u32> {
        let SlabStore { total, owners, .. } = &mut self.slabs[slab];
        let first = owners.len() as u32;
        let count = most.min(u64::from(*total - first)) as u32;
        owners.resize((first + count) as usize, 0);
        self.hand_out(slab, first..first + count)
    }

    /// Pages of a slab that have no owner, as pages of the pool.
    fn hand_out(&mut self, slab: usize, pages: Range<u32>) -> Range<u32> {
        self.slabs[slab].owners[pages.start as usize..pages.end as usize].fill(1);
        let first = slab as u32 * self.slab_pages;
        first + pages.start..first + pages.end
    }

    pub(super) fn share(&mut self, page: u32) {
        let (slab, page) = self.place(page);
        self.slabs[slab].owners[page] += 1;
    }

    pub(super) fn release(&mut self, page: u32) {
        let (slab, page) = self.place(page);
        let SlabStore { owners, freed, .. } = &mut self.slabs[slab];
        owners[page] -= 1;
        if owners[page] == 0 {
            freed.push(page as u32);
        }
    }

    pub(super) fn owners(&self, page: u32) -> usize {
        let (slab, page) = self.place(page);
        self.slabs.get(slab).and_then(|slab| slab.owners.get(page)).copied().unwrap_or(0)
    }

    /// A page's slab, and its index there.
    fn place(&self, page: u32) -> (usize, usize) {
        ((page / self.slab_pages) as usize, (page % self.slab_pages) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::Store;

    #[test]
    fn pages_are_freed_without_new_memory() {
        let mut store = Store::new(1000, 400);
        let mut pages = Vec::new();
        for count in [3, 500, 400] {
            store.reserve(count).expect("memory");
            let rooms: Vec<usize> = store.slabs.iter().map(|slab| slab.freed.capacity()).collect();
            store.take_all(&mut pages, count);
            let mut freed = store.clone();
            pages.iter().for_each(|&page| freed.release(page));
            for ((slab, freed), room) in store.slabs.iter().zip(&freed.slabs).zip(rooms) {
                assert!(room >= freed.freed.len(), "room for {room} of {} freed pages", slab.owners.len());
            }
        }
    }
}
