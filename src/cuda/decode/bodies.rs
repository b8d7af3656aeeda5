//! The bodies of the decode's kernels, as data: what distinguishes one from another. Variants of one body differ by the query rows of a
//! tile.

use wgpu_mla_ptx::{ENTRIES, Entry, find};

use crate::base::dtype::Dtype;
use crate::cache::decode_spec::MlaDecode;
use crate::cuda::caps::Card;
use crate::cuda::formats::splits_queries;

/// How kernels multiply, and copy the cache to shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Body {
    /// The entry of a variant's name for a spec, or why there is none.
    pub entry: fn(&str, &MlaDecode) -> Result<&'static Entry, String>,
    /// What the body needs of a card, for a spec, beside its shared memory.
    pub needs: fn(&Card, &MlaDecode) -> Result<(), String>,
    pub tensor_cores: bool,
    /// A tile of many rows takes as long to multiply as one of so many by mma.sync.
    pub most_arithmetic: u32,
    /// The boxes that TMA copies; `None` where the kernels take no tensor map.
    pub boxes: Option<Boxes>,
    /// Whether items begin at multiples of a tile's tokens; else of 16.
    pub begins_at_tiles: bool,
    /// Whether a block of the merge fits on a multiprocessor beside one of these.
    pub leaves_room: bool,
    /// Whether tokens may be listed by slots.
    pub lists: bool,
}

/// How TMA copies a cache for a body.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boxes {
    /// Tokens that pages must be a multiple of.
    pub tokens: fn(&MlaDecode) -> u32,
    /// Tokens and lines of a box, or all lines of a token, given the tokens of a tile.
    pub shape: fn(&MlaDecode, u32) -> (u32, Option<u32>),
    /// A variant with the same tiles, for bindings whose pages, strides or address TMA does not take. `None`: the kernel itself then copies
    /// by cp.async.
    pub otherwise: Option<&'static str>,
}

/// mma.sync, and cp.async of 16 bytes.
pub(super) const MMA: Body = Body {
    entry: |name, spec| in_module("mla_decode_", name, spec),
    needs: |_, _| Ok(()),
    tensor_cores: true,
    most_arithmetic: u32::MAX,
    boxes: None,
    begins_at_tiles: false,
    leaves_room: false,
    lists: true,
};

/// mma.sync, and TMA boxes of 16 tokens.
pub(super) const MMA_TMA: Body = Body {
    entry: |name, spec| in_module("mla_decode_tma_", name, spec),
    needs: has_tma,
    boxes: Some(Boxes {
        tokens: |_| TMA_TOKENS,
        shape: |_, _| (TMA_TOKENS, None),
        otherwise: Some("mma_m16"),
    }),
    lists: false,
    ..MMA
};

/// mma.sync of FP8 codes as they are, of the cache and of an e4m3 query, and cp.async of 16 bytes.
pub(super) const MMA_FP8: Body = Body {
    entry: |name, spec| {
        if spec.kv.dtype().is_fp8() && spec.query != Dtype::E4m3 {
            let query = spec.query;
            return Err(format!("a query of {query} would be rounded: it needs e4m3, with a q_scale"));
        }
        in_module("mla_decode_fp8_", name, spec)
    },
    needs: |card, _| card.has_fp8_mma(),
    lists: false,
    ..MMA
};

/// wgmma, and TMA boxes of 64 columns and up to a tile's tokens where pages are a multiple of 8 tokens, else cp.async.
pub(super) const WGMMA: Body = Body {
    entry: |name, spec| in_module("mla_decode_wgmma_", name, spec),
    needs: |card, _| card.has_wgmma(),
    most_arithmetic: 36,
    boxes: Some(Boxes {
        tokens: |_| BOX_TOKENS,
        shape: |spec, tile| (1 << spec.kv.page_size.trailing_zeros().min(tile.ilog2()), Some(1)),
        otherwise: None,
    }),
    begins_at_tiles: true,
    ..MMA
};

/// wgmma with query rows as its N (swap AB), and TMA boxes of 8 tokens, of 16 for a cache of FP8, where pages are a multiple of them, else
/// cp.async; bulk copies of records.
pub(super) const SWAP_AB: Body = Body {
    entry: |name, spec| in_module("mla_decode_swap_", name, spec),
    boxes: Some(Boxes {
        tokens: swapped_tokens,
        shape: |spec, _| (swapped_tokens(spec), None),
        otherwise: None,
    }),
    leaves_room: true,
    ..WGMMA
};

/// The same for 64 query rows.
pub(super) const SWAP_AB_64: Body = Body { leaves_room: false, ..SWAP_AB };

/// Without tensor cores, for every dtype in one module.
pub(super) const SIMPLE: Body = Body {
    entry: |_, spec| {
        let (latent, rope, layout) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim, spec.kv.layout);
        let entry = find("mla_decode_simple", &format!("mla_decode_{layout}_{latent}_{rope}"));
        entry.ok_or_else(|| format!("no kernel for {latent}/{rope}"))
    },
    tensor_cores: false,
    ..MMA
};

/// Tokens of a TMA box of [`MMA_TMA`].
const TMA_TOKENS: u32 = 16;
/// Tokens of a TMA box of a wgmma kernel, at least: the rows that the hardware swizzles together.
const BOX_TOKENS: u32 = 8;
/// The same for a kernel that reads an FP8 cache, where a row of the box is two tokens.
const FP8_BOX_TOKENS: u32 = 16;
/// Shared memory of a card below which [`MMA_TMA`] is not used: only one block would fit a multiprocessor, and nothing would hide the
/// latency of its copies.
const TMA_SHARED_BYTES: u32 = 200 << 10;

fn swapped_tokens(spec: &MlaDecode) -> u32 {
    if spec.kv.dtype().is_fp8() { FP8_BOX_TOKENS } else { BOX_TOKENS }
}

fn has_tma(card: &Card, spec: &MlaDecode) -> Result<(), String> {
    if !card.tma || card.shared_bytes < TMA_SHARED_BYTES {
        return Err("no TMA (needs compute capability 9.0 or later, driver 525 or later), or less than 200 KiB of shared memory".into());
    }
    let page_size = spec.kv.page_size;
    if page_size.is_multiple_of(TMA_TOKENS) {
        Ok(())
    } else {
        Err(format!("page_size {page_size}: TMA needs a multiple of {TMA_TOKENS}"))
    }
}

/// The entry of a variant in the module of a prefix and the cache's layout.
fn in_module(prefix: &str, variant: &str, spec: &MlaDecode) -> Result<&'static Entry, String> {
    let (latent, rope, layout) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim, spec.kv.layout);
    let module = format!("{prefix}{layout}");
    if !ENTRIES.iter().any(|entry| entry.module == module) {
        return Err(format!("no kernel of this variant reads a cache of {layout}"));
    }
    let parts = if splits_queries(spec) { "_split" } else { "" };
    find(&module, &format!("mla_decode_{latent}_{rope}_{variant}{parts}")).ok_or_else(|| {
        let parts = if parts.is_empty() { "" } else { " with a query in two parts" };
        format!("no kernel for {latent}/{rope}{parts}")
    })
}
