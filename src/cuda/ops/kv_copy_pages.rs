//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks.

use super::single::{SingleOp, kernel_args};
use super::table::Table;
use super::{THREADS, address, checked_items, stride};
use crate::base::error::Result;
use crate::cache::KvView;
use crate::cuda::{Buffer, Cuda};
use crate::ops::KvCopyPages;

/// `UNITS_PER_THREAD` of kv_copy_pages.cu.
const UNITS_PER_THREAD: u32 = 4;

kernel_args! {
    /// `Args` of kv_copy_pages.cu.
    pub struct CopyParams {
        source: u64,
        target: u64,
        table: u64,
        block_stride: u64,
        from_first_page: u32,
        from_num_pages: u32,
        to_first_page: u32,
        to_num_pages: u32,
        page_units: u32,
        blocks_per_page: u32,
        max_copies: u32,
        reserved_0: u32,
    }
}

/// The copy by units of 16 bytes, where all addresses are multiples of that, and by words.
const ENTRIES: [&str; 2] = ["kv_copy_pages_wide", "kv_copy_pages_words"];

impl SingleOp for KvCopyPages {
    type Params = CopyParams;
    const SERVES_RECORDS: bool = true;

    fn entries(&self) -> Vec<String> {
        ENTRIES.map(str::to_owned).into()
    }

    fn new_table(cuda: &Cuda, max_copies: u32) -> Result<Table> {
        Table::new(cuda, u64::from(max_copies) * 2, 0)
    }

    fn capacity(table: &Table) -> u32 {
        table.room(2)
    }

    fn params(&self, kv: &KvView<&Buffer>, (): ()) -> Result<CopyParams> {
        let page_bytes = self.page_bytes();
        // From the first slab to the second, if there are two.
        let slabs: Vec<_> = kv.each_slab().collect();
        let pair = [&slabs[0], &slabs[slabs.len() - 1]];
        let [source, target] = pair.map(|slab| address(slab.buffer, slab.base(), 1));
        let [from, to] = pair.map(|slab| slab.pages(&self.kv));
        let block_stride = stride(self.kv.num_pages, kv.block_stride, 1);
        let unit = if (source | target | block_stride | page_bytes).is_multiple_of(16) { 16 } else { 4 };
        let page_units = (page_bytes / unit) as u32;
        Ok(CopyParams {
            source,
            target,
            block_stride,
            from_first_page: from.start,
            from_num_pages: from.len() as u32,
            to_first_page: to.start,
            to_num_pages: to.len() as u32,
            page_units,
            blocks_per_page: page_units.div_ceil(THREADS * UNITS_PER_THREAD),
            ..CopyParams::default()
        })
    }

    fn entry_of(&self, params: &CopyParams) -> usize {
        let is_wide = u64::from(params.page_units) * 16 == self.page_bytes();
        usize::from(!is_wide)
    }

    fn launch(&self, params: CopyParams, table: &Table) -> Result<(CopyParams, u64)> {
        // bounds: kv_copy_pages
        let params = CopyParams { table: table.address(), max_copies: table.room(2), ..params };
        let blocks = u64::from(params.max_copies) * u64::from(params.blocks_per_page);
        let blocks = checked_items("blocks of a copy", blocks, "split the list over several steps")?;
        Ok((params, u64::from(blocks) * u64::from(THREADS)))
    }
}
