//! `kv_copy_pages`: whole pages inside one layer's pool, for a sequence that forks. Arguments and checks.

use super::op::{Op, Use};
use super::variants::OpOptions;
use crate::view::KvView;
use crate::{Error, KvSpec, Result};

/// What a `kv_copy_pages` is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvCopyPages {
    /// The cache.
    pub kv: KvSpec,
    /// Elements of a row, `L + R`: a multiple of 4. Where in a row the latent ends does not matter.
    pub row_elems: u32,
}

impl KvCopyPages {
    pub(crate) fn page_bytes(&self) -> u64 {
        u64::from(self.kv.page_size) * u64::from(self.row_elems) * self.kv.dtype.bytes() as u64
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

    fn check(&self) -> Result<()> {
        self.kv.check()?;
        if !self.row_elems.is_multiple_of(4) || !(4..=65_536).contains(&self.row_elems) {
            let cure = "must be kv_lora_rank + qk_rope_head_dim, a multiple of 4 in 4..=65536";
            return Err(Error::Shape { what: "row_elems", got: self.row_elems.into(), cure });
        }
        Ok(())
    }

    fn map<'a, B: 'a, C>(
        &self,
        kv: &'a KvView<B>,
        mut f: impl FnMut(Use, &'a B) -> Result<C>,
    ) -> Result<KvView<C>> {
        kv.map(|buffer| f(Use::Write("kv"), buffer))
    }

    fn check_args<B>(&self, kv: &KvView<&B>, (): (), size: impl Fn(&B) -> u64 + Copy) -> Result<()> {
        kv.check(&self.kv, self.row_elems, size(kv.buffer))
    }

    fn fits((): (), (): ()) -> Result<(), &'static str> {
        Ok(())
    }
}

/// Checks page copies `(from, to)`: in the pool, and in an order that cannot matter.
///
/// # Errors
/// [`Error::CopyConflict`].
pub fn check_copies(kv: &KvSpec, copies: &[(u32, u32)]) -> Result<()> {
    let conflict = |index: usize, page: u32, why: &'static str| Err(Error::CopyConflict { index, page, why });
    let mut writes: Vec<u32> = copies.iter().map(|&(_, to)| to).collect();
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
