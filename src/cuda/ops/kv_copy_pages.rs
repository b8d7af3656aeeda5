//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks.

use cudarc::driver::DeviceRepr;

use super::{THREADS, block_stride, checked_items};
use crate::cuda::{Buffer, Cuda};
use crate::layer::KvView;
use crate::ops::check_copies;
use crate::{Dtype, Error, KvSpec, MlaShape, MlaSpec, Result};

pub(super) const PTX: &str = include_str!("../../../shaders/cuda/kv_copy_pages.ptx");

/// `UNITS_PER_THREAD` of kv_copy_pages.cu.
const UNITS_PER_THREAD: u32 = 4;

/// `Args` of kv_copy_pages.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CopyArgs {
    kv: u64,
    copies: u64,
    block_stride: u64,
    num_pages: u32,
    page_units: u32,
    blocks_per_page: u32,
    num_copies: u32,
}

// SAFETY: plain data without padding, as the kernels have it.
unsafe impl DeviceRepr for CopyArgs {}

/// See [`crate::Backend::kv_copy_pages`].
pub(in crate::cuda) fn kv_copy_pages(
    cuda: &Cuda,
    kv: &KvSpec,
    row_elems: u32,
    copies: &[(u32, u32)],
    view: &KvView<'_, Buffer>,
) -> Result<()> {
    kv.check()?;
    if !row_elems.is_multiple_of(4) || !(4..=65_536).contains(&row_elems) {
        let cure = "must be kv_lora_rank + qk_rope_head_dim, a multiple of 4 in 4..=65536";
        return Err(Error::Shape { what: "row_elems", got: row_elems.into(), cure });
    }
    check_copies(kv, copies)?;
    // The view's check asks for the length of a row only.
    let shape = MlaShape { num_heads: 1, kv_lora_rank: row_elems, qk_rope_head_dim: 0 };
    view.check(&MlaSpec { shape, kv: *kv, query: Dtype::F32, out: Dtype::F32 }, view.buffer.bytes())?;
    if copies.is_empty() {
        return Ok(());
    }

    // Every place is in its buffer: the kernel reads pairs below num_copies, and pages below num_pages, whose last one's end was just
    // checked, in units below page_units.
    let bytes = kv.dtype.bytes() as u64;
    let page_bytes = u64::from(kv.page_size) * u64::from(row_elems) * bytes;
    let (first, stride) = (view.buffer.ptr() + view.base() * bytes, block_stride(kv, view));
    let is_wide = (first | stride | page_bytes).is_multiple_of(16);
    let (entry, unit) = if is_wide { ("kv_copy_pages_wide", 16) } else { ("kv_copy_pages_words", 4) };
    let page_units = (page_bytes / unit) as u32;
    let blocks_per_page = page_units.div_ceil(THREADS * UNITS_PER_THREAD);
    let words: Vec<u32> = copies.iter().flat_map(|&(from, to)| [from, to]).collect();
    // Each copy writes a page of its own, so there are fewer than pages.
    let num_copies = copies.len() as u32;
    let grid = u64::from(num_copies) * u64::from(blocks_per_page);
    let grid = checked_items("blocks of a copy", grid, "split the list over several calls")?;
    let table = cuda.scratch(&words)?;
    let args = CopyArgs {
        kv: first,
        copies: table.ptr(),
        block_stride: stride,
        num_pages: kv.num_pages,
        page_units,
        blocks_per_page,
        num_copies,
    };
    cuda.launch(&cuda.kernel(PTX, entry)?, grid, THREADS, 0, &args)
}
