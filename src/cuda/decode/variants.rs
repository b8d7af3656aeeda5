//! The variants of the decode in dispatch order, and which of them runs where. Pure.

use wgpu_mla_ptx::{ENTRIES, Entry, find};

use crate::cuda::caps::Card;
use crate::ops::variants::Variant;
use crate::{Dtype, MlaDecode};

/// What a decode is asked for: its spec, and query rows of a sequence.
pub(super) type Request = (MlaDecode, u32);

/// A variant for a request on a card.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    pub tile: &'static Tile,
    pub compiled: Compiled,
}

/// A variant: its name, which its entries' names contain, the query rows of its tile, and its body.
macro_rules! variant {
    ($name:literal, $rows:literal, $body:expr) => {{
        const TILE: &Tile = &Tile { name: $name, rows: $rows, body: $body };
        let variant = Variant::new($name, |card, (spec, _)| TILE.kernel(card, spec)).costing(cost);
        if TILE.on_matrices() { variant.rounding_weights() } else { variant }
    }};
}

/// In dispatch order: the cheapest of those on tensor cores that run, else the last, which runs everywhere.
pub(super) const VARIANTS: &[Variant<Card, Request, Kernel>] = &[
    variant!("wgmma_m64", 64, Body::Warpgroups { tokens: 32, swapped: false }),
    variant!("wgmma_swap_ab_n32", 32, Body::Warpgroups { tokens: 8, swapped: true }),
    variant!("wgmma_swap_ab_n16", 16, Body::Warpgroups { tokens: 8, swapped: true }),
    variant!("mma_m64", 64, Body::Matrices),
    variant!("mma_m32", 32, Body::Matrices),
    variant!("mma_m64_small", 64, Body::Matrices),
    variant!("mma_m32_small", 32, Body::Matrices),
    variant!("mma_tma_m16", 16, Body::TensorCopies { tokens: 16, otherwise: "mma_m16" }),
    variant!("mma_m16", 16, Body::Matrices),
    variant!("mma_m16_small", 16, Body::Matrices),
    variant!("simple", 8, Body::Simple),
];

/// Each tile reads the cache once more, which costs as much as about 16 rows of arithmetic. wgmma multiplies 64 rows in the time in which
/// mma.sync does 36.
fn cost(&(_, query_rows): &Request, kernel: &Kernel) -> u32 {
    let tile = kernel.tile;
    if !tile.on_matrices() {
        return u32::MAX;
    }
    let arithmetic =
        if matches!(tile.body, Body::Warpgroups { swapped: false, .. }) { 36 } else { tile.rows };
    query_rows.div_ceil(tile.rows) * (arithmetic + 16)
}

/// A variant's tile, compiled for each cache dtype and dims that it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    /// What callers see and force.
    pub name: &'static str,
    /// Query rows of a tile.
    pub rows: u32,
    pub body: Body,
}

/// How a variant multiplies, and copies the cache to shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// mma.sync, and cp.async of 16 bytes.
    Matrices,
    /// mma.sync, and TMA boxes of `tokens` tokens; the variant `otherwise` has the same tiles, for a binding that TMA
    /// cannot copy.
    TensorCopies { tokens: u32, otherwise: &'static str },
    /// wgmma, of compute capability 9.0 alone, and TMA boxes of `tokens` tokens where pages are a multiple of them, else cp.async.
    /// `swapped`: operands are swapped (swap AB), query rows are wgmma's N.
    Warpgroups { tokens: u32, swapped: bool },
    /// Without tensor cores.
    Simple,
}

/// The least shared memory of a card for [`Body::TensorCopies`]: with less, a block is alone on its multiprocessor and its copies' latency is exposed.
const TMA_SHARED_BYTES: u32 = 200 << 10;

/// A compiled variant.
#[derive(Debug, Clone)]
pub(super) struct Compiled {
    pub entry: &'static Entry,
    pub threads: u32,
    pub shared_bytes: u32,
    /// Tokens of a tile.
    pub tokens: u32,
}

impl Tile {
    fn kernel(&'static self, card: &Card, spec: &MlaDecode) -> Result<Kernel, String> {
        self.runs_on(card, spec)?;
        Ok(Kernel { tile: self, compiled: self.compiled(spec)? })
    }

    /// What keeps it from running; `Ok` where nothing does.
    ///
    /// # Errors
    /// A sentence that names what is missing.
    fn runs_on(&self, card: &Card, spec: &MlaDecode) -> Result<(), String> {
        let compiled = self.compiled(spec)?;
        match self.body {
            Body::TensorCopies { .. } if !card.tma || card.shared_bytes < TMA_SHARED_BYTES => {
                return Err("no tensor copies (TMA), or too little shared memory: H100 and B100 have both, with a driver of 525 or later".into());
            }
            Body::TensorCopies { tokens, .. } if !spec.kv.page_size.is_multiple_of(tokens) => {
                let page_size = spec.kv.page_size;
                return Err(format!(
                    "pages of {page_size} tokens: tensor copies take a multiple of {tokens}"
                ));
            }
            Body::Warpgroups { .. } if card.capability != 90 || !card.tma => {
                return Err("no matrices of warpgroups (wgmma): H100 and H200 have them, with a driver of 525 or later".into());
            }
            _ => {}
        }
        if compiled.shared_bytes > card.shared_bytes {
            let (need, has) = (compiled.shared_bytes, card.shared_bytes);
            return Err(format!("a block needs {need} bytes of shared memory, the card allows {has}"));
        }
        if self.on_matrices() && spec.kv.dtype.is_fp8() && card.capability < 89 {
            return Err(format!("compute capability {} converts no FP8: 89 does", card.capability));
        }
        Ok(())
    }

    /// Whether it is on tensor cores.
    pub const fn on_matrices(&self) -> bool {
        !matches!(self.body, Body::Simple)
    }

    /// Its kernel for a spec.
    ///
    /// # Errors
    /// A sentence about why there is none.
    fn compiled(&self, spec: &MlaDecode) -> Result<Compiled, String> {
        let (latent, rope) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
        let (dtype, has) = (spec.kv.dtype, |module: &str| ENTRIES.iter().any(|entry| entry.module == module));
        let body = match self.body {
            Body::Simple => {
                let entry = find("mla_decode_simple", &format!("mla_decode_{dtype}_{latent}_{rope}"));
                return Ok(entry.ok_or_else(|| format!("no kernel for {latent}/{rope}"))?.into());
            }
            Body::Matrices => "",
            Body::TensorCopies { .. } => "tma_",
            Body::Warpgroups { swapped: false, .. } => "wgmma_",
            Body::Warpgroups { swapped: true, .. } => "swap_",
        };
        let module = format!("mla_decode_{body}{dtype}");
        if !has(&module) {
            return Err(format!("no such kernel for tensor cores reads an {dtype} cache"));
        }
        let parts = if splits_queries(spec) { "_split" } else { "" };
        let name = format!("mla_decode_{latent}_{rope}_{}{parts}", self.name);
        let entry = find(&module, &name).ok_or_else(|| {
            let parts = if parts.is_empty() { "" } else { " with a query in two parts" };
            format!("no kernel for {latent}/{rope}{parts}")
        })?;
        Ok(entry.into())
    }
}

impl From<&'static Entry> for Compiled {
    fn from(entry: &'static Entry) -> Self {
        let Entry { threads, shared_bytes, tokens, .. } = *entry;
        Self { entry, threads, shared_bytes, tokens: tokens.unwrap_or(1) }
    }
}

/// Whether the tensor cores' dtype does not hold a query, even scaled by a power of two.
fn splits_queries(spec: &MlaDecode) -> bool {
    matches!((spec.kv.dtype, spec.query), (_, Dtype::F32) | (Dtype::Bf16, Dtype::F16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::variants::choose;
    use crate::{KvSpec, MlaShape, SUPPORTED_DIMS};

    fn chosen(card: &Card, spec: &MlaDecode, query_rows: u32) -> &'static Tile {
        choose(VARIANTS, card, &(*spec, query_rows), None).expect("some variant runs everywhere").0.tile
    }

    const H200: Card = Card { capability: 90, multiprocessors: 132, shared_bytes: 232_448, tma: true };
    const RTX_5090: Card = Card { capability: 120, multiprocessors: 170, shared_bytes: 101_376, tma: true };
    const A100: Card = Card { capability: 80, multiprocessors: 108, shared_bytes: 166_912, tma: false };

    fn spec((latent, rope): (u32, u32), num_heads: u32, cache: Dtype, query: Dtype) -> MlaDecode {
        MlaDecode {
            shape: MlaShape { num_heads, kv_lora_rank: latent, qk_rope_head_dim: rope },
            kv: KvSpec { dtype: cache, page_size: 64, num_pages: 4 },
            query,
            out: Dtype::F32,
        }
    }

    #[test]
    fn each_spec_has_a_variant_on_each_card() {
        for card in [H200, RTX_5090, A100] {
            for (latent, rope, _) in SUPPORTED_DIMS {
                for cache in Dtype::ALL {
                    for query in Dtype::ALL {
                        let spec = spec((latent, rope), 16, cache, query);
                        let tile = chosen(&card, &spec, 16);
                        let on_matrices =
                            cache != Dtype::F32 && (cache != Dtype::E4m3 || card.capability >= 89);
                        assert_eq!(tile.on_matrices(), on_matrices, "{card:?} {spec:?}: {}", tile.name);
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_suit_card_and_heads() {
        let name = |card, heads, query| chosen(card, &spec((512, 64), heads, Dtype::Bf16, query), heads).name;
        assert_eq!(name(&H200, 16, Dtype::Bf16), "wgmma_swap_ab_n16");
        assert_eq!(name(&Card { capability: 100, ..H200 }, 16, Dtype::Bf16), "mma_tma_m16");
        assert_eq!(name(&Card { tma: false, ..H200 }, 16, Dtype::Bf16), "mma_m16");
        assert_eq!(name(&H200, 20, Dtype::Bf16), "wgmma_swap_ab_n32");
        assert_eq!(name(&H200, 32, Dtype::Bf16), "wgmma_swap_ab_n32");
        assert_eq!(name(&Card { capability: 100, ..H200 }, 32, Dtype::Bf16), "mma_m32");
        assert_eq!(name(&H200, 40, Dtype::Bf16), "wgmma_m64");
        assert_eq!(name(&H200, 128, Dtype::Bf16), "wgmma_m64");
        assert_eq!(name(&Card { tma: false, ..H200 }, 128, Dtype::Bf16), "mma_m64");
        assert_eq!(name(&Card { capability: 100, ..H200 }, 128, Dtype::Bf16), "mma_m64");
        assert_eq!(name(&H200, 128, Dtype::F32), "mma_m16");
        assert_eq!(name(&RTX_5090, 128, Dtype::Bf16), "mma_m64_small");
        assert_eq!(name(&RTX_5090, 20, Dtype::Bf16), "mma_m32_small");
        assert_eq!(name(&RTX_5090, 16, Dtype::Bf16), "mma_m16_small");
        assert_eq!(name(&RTX_5090, 128, Dtype::F32), "mma_m16_small");
        assert_eq!(name(&RTX_5090, 16, Dtype::F32), "mma_m16_small");
    }
}
