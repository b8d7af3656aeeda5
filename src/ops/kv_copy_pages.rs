//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks. Arguments and checks.

use super::op::{Op, Use};
use super::samples::{SHAPE, kv, records};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::step_table::{StepTable, TableOp};
use super::variants::OpOptions;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::memory::collected;
use crate::cache::{INDEX_SHAPE, KvLayout, KvSpec, KvView, MlaShape};

/// Copies whole pages inside one layer's pool, for a sequence that forks (copy-on-write): vLLM's
/// `copy_blocks_mla`.
///
/// Arguments of a layer: its cache, a [`KvView`]. Input of a step: a list of copies `(from, to)`, `&[(u32, u32)]` in page ids:
/// [`crate::AppendBatch::copies`]. [`check_copies`] is the check of it: [`Error::CopyConflict`].
///
/// Room of a binding: `()`. Capacity of a step: `u32`, copies.
///
/// ```
/// use wgpu_mla::{Device, Dtype, KvCopyPages, KvSpec, KvView, MlaShape, Slabs, cpu::Cpu};
///
/// # fn main() -> wgpu_mla::Result<()> {
/// // Three pages of 2 tokens, 256 + 32 elements each.
/// let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
/// let kv = KvSpec { layout: Dtype::F32.into(), page_size: 2, num_pages: 3 };
/// let cpu = Cpu::new();
/// let cache = cpu.buffer(3 * 576 * 4)?;
/// cpu.upload(&cache, 0, &Dtype::F32.encode_all(&[1.0; 576]))?;
/// let layer = KvView { buffer: &cache, offset: 0, layer_stride: 0, layer: 0, block_stride: 576 * 4, slabs: Slabs::ONE };
///
/// cpu.once(KvCopyPages { shape, kv }, &[(0, 2)], &layer)?;
/// let elements = Dtype::F32.decode_all(&cpu.download(&cache, 3 * 576 * 4)?);
/// assert_eq!(elements, [[1.0; 576], [0.0; 576], [1.0; 576]].concat());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvCopyPages {
    /// `kv_lora_rank` and `qk_rope_head_dim`; the heads do not matter. [`IndexSpec::copies`](crate::IndexSpec::copies) makes the copy of an
    /// index cache.
    pub shape: MlaShape,
    /// The cache.
    pub kv: KvSpec,
}

impl KvCopyPages {
    pub(crate) fn page_bytes(&self) -> u64 {
        self.kv.page_bytes(&self.shape)
    }
}

impl Op for KvCopyPages {
    const NAME: &'static str = "kv_copy_pages";
    type Options = OpOptions;
    type Facts = ();
    /// Copies `(from, to)` of pages: see [`check_copies`].
    type Input<'a> = &'a [(u32, u32)];
    /// One layer's cache.
    type Args<B> = KvView<B>;
    type Extent = ();
    /// Copies.
    type Capacity = u32;

    fn samples() -> Vec<Self> {
        let plain = Dtype::ALL.map(|dtype| (SHAPE, kv(dtype)));
        let index = (INDEX_SHAPE, kv(KvLayout::Index(Dtype::E4m3)));
        plain
            .into_iter()
            .chain(records())
            .chain([index])
            .map(|(shape, kv)| KvCopyPages { shape, kv })
            .collect()
    }

    fn check(&self) -> Result<()> {
        self.kv.check()?;
        match self.kv.layout {
            KvLayout::Index(_) if self.shape == INDEX_SHAPE => Ok(()),
            KvLayout::Index(_) => {
                let cure = "index keys have 128 elements: make the spec with `IndexSpec::copies`";
                Err(Error::Shape { what: "kv_lora_rank", got: self.shape.kv_lora_rank.into(), cure })
            }
            layout => self.shape.check().and_then(|()| layout.check(&self.shape)),
        }
    }

    fn kv_layout(&self) -> Option<KvLayout> {
        Some(self.kv.layout)
    }

    fn map<'a, B: 'a, C>(
        &self,
        kv: &'a KvView<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<KvView<C>> {
        kv.map(|buffer| f(Use::Write("kv"), buffer))
    }

    fn check_args<B>(&self, kv: &KvView<&B>, (): (), size: impl Fn(&B) -> u64 + Copy) -> Result<()> {
        kv.check(&self.kv, &self.shape, size)
    }

    /// Each pair of slabs, from the first to the second; a slab alone for copies inside of it.
    fn each_slab<B: Copy>(&self, kv: &KvView<B>) -> Vec<KvView<B>> {
        let slabs: Vec<_> = kv.each_slab().collect();
        let pairs = |(i, from): (usize, &KvView<B>)| {
            let others = slabs.iter().enumerate();
            others.map(|(j, to)| if i == j { to.clone() } else { from.with(to) }).collect::<Vec<_>>()
        };
        slabs.iter().enumerate().flat_map(pairs).collect()
    }

    fn fits((): (), (): ()) -> Result<(), &'static str> {
        Ok(())
    }
}

/// Checks page copies `(from, to)`: in the pool, and in an order that cannot matter.
///
/// # Errors
/// [`Error::CopyConflict`] and [`Error::OutOfMemory`].
pub fn check_copies(kv: &KvSpec, copies: &[(u32, u32)]) -> Result<()> {
    let conflict = |index: usize, page: u32, why: &'static str| Err(Error::CopyConflict { index, page, why });
    let mut writes: Vec<u32> = collected(copies.iter().map(|&(_, to)| to), copies.len(), "page copies")?;
    writes.sort_unstable();
    for (index, &(from, to)) in copies.iter().enumerate() {
        for page in [from, to] {
            if page >= kv.num_pages {
                return conflict(
                    index,
                    page,
                    "is not in the pool: take pages from the pool that owns the cache",
                );
            }
        }
        if writes.binary_search(&from).is_ok() {
            return conflict(index, from, "is read and written by one call: use two calls, in order");
        }
    }
    if let Some(pair) = writes.windows(2).find(|pair| pair[0] == pair[1]) {
        let index = copies.iter().rposition(|&(_, to)| to == pair[0]).unwrap_or(0);
        return conflict(index, pair[0], "is written twice: copy each page to a page of its own");
    }
    Ok(())
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl TableOp for KvCopyPages {
    fn table(&self, copies: &[(u32, u32)], check: impl FnOnce(u64) -> Result<()>) -> Result<StepTable<()>> {
        check_copies(&self.kv, copies)?;
        // Copies write different pages, none of which is read, so there are fewer copies than pages.
        check(copies.len() as u64)?;
        let words = copies.iter().flat_map(|&(from, to)| [from, to]);
        let words = collected(words, 2 * copies.len(), "page copies")?;
        Ok(StepTable { count: copies.len() as u32, words, extent: () })
    }
}
