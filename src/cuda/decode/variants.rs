//! The variants of the decode in dispatch order, and which of them runs where. Pure.

use wgpu_mla_ptx::Entry;

use super::bodies::{self, Body};
use crate::cache::decode_spec::MlaDecode;
use crate::cuda::caps::Card;
use crate::ops::variants::Variant;
use crate::ops::{DecodeRequest, Features};

/// A row of the table of variants, chosen by a request and a card.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    pub tile: &'static Tile,
    pub compiled: Compiled,
}

/// A variant: its name, which its entries' names contain, the query rows of its tile, and its body.
macro_rules! variant {
    ($name:literal, $rows:literal, $body:expr) => {{
        const TILE: &Tile = &Tile { name: $name, rows: $rows, body: $body };
        let variant =
            Variant::new($name, |card: &Card, asked: &DecodeRequest| TILE.kernel(card, &asked.spec))
                .serves(TILE.features())
                .costing(cost);
        if TILE.body.tensor_cores { variant.rounding_weights().on_tensor_cores() } else { variant }
    }};
}

/// In dispatch order. The cheapest tensor-core variant that runs is taken, else the last, which runs everywhere.
pub(super) const VARIANTS: &[Variant<Card, DecodeRequest, Kernel>] = &[
    variant!("wgmma_m64", 64, bodies::WGMMA),
    variant!("wgmma_swap_ab_n64", 64, bodies::SWAP_AB_64),
    variant!("wgmma_swap_ab_n32", 32, bodies::SWAP_AB),
    variant!("wgmma_swap_ab_n16", 16, bodies::SWAP_AB),
    variant!("mma_m64", 64, bodies::MMA),
    variant!("mma_m32", 32, bodies::MMA),
    variant!("mma_m64_small", 64, bodies::MMA),
    variant!("mma_m32_small", 32, bodies::MMA),
    variant!("mma_tma_m16", 16, bodies::MMA_TMA),
    variant!("mma_m16", 16, bodies::MMA),
    variant!("mma_m16_small", 16, bodies::MMA),
    variant!("mma_fp8_m16", 16, bodies::MMA_FP8).not_by_default(not_run_yet),
    variant!("simple", 8, bodies::SIMPLE),
];

/// Keeps a variant from being chosen before it has run on a card whose tensor cores take FP8 by `mma.sync`: those of 9.0 to 10.3 do not.
fn not_run_yet(_: &Card, _: &DecodeRequest) -> Result<(), String> {
    Err("not run yet on a card of compute capability 8.9 or 12.0: only if it is forced".into())
}

/// The cost of a variant for one token, in units of one query row by mma.sync. A tile's read of the token costs about 16; wgmma multiplies
/// 64 rows in the time of 36.
fn cost(&DecodeRequest { spec, query_rows, features }: &DecodeRequest, kernel: &Kernel) -> u32 {
    let tile = kernel.tile;
    // Query tokens have lists of their own, so a tile has rows of one.
    let is_listed = features.contains(Features::INDICES);
    let query_rows = if is_listed { spec.shape.num_heads } else { query_rows };
    if !tile.body.tensor_cores {
        return u32::MAX;
    }
    query_rows.div_ceil(tile.rows) * (tile.rows.min(tile.body.most_arithmetic) + 16)
}

/// A variant's tile, compiled for each cache dtype and dims that it serves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    /// The name that callers see, and by which they force the variant.
    pub name: &'static str,
    /// Query rows of a tile.
    pub rows: u32,
    pub body: Body,
}

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
    /// The optional inputs that it serves.
    const fn features(&self) -> Features {
        let all = Features::DEVICE_PAGE_LIST.and(Features::ATTN_SINK);
        if self.body.lists { all.and(Features::INDICES) } else { all }
    }

    /// Its kernel for a card and a spec, or what is missing.
    fn kernel(&'static self, card: &Card, spec: &MlaDecode) -> Result<Kernel, String> {
        let compiled = Compiled::from((self.body.entry)(self.name, spec)?);
        (self.body.needs)(card, spec)?;
        card.has_shared(compiled.shared_bytes)?;
        if self.body.tensor_cores && spec.kv.dtype().is_fp8() && card.capability < 89 {
            let capability = card.capability;
            return Err(format!("compute capability {capability} does not convert FP8 (needs 89 or later)"));
        }
        Ok(Kernel { tile: self, compiled })
    }
}

impl From<&'static Entry> for Compiled {
    fn from(entry: &'static Entry) -> Self {
        let Entry { threads, shared_bytes, tokens, .. } = *entry;
        Self { entry, threads, shared_bytes, tokens: tokens.unwrap_or(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::cache::{KvLayout, KvSpec, MlaShape, SUPPORTED_DIMS};
    use crate::ops::DecodeOptions;
    use crate::ops::variants::choose;

    fn chosen(card: &Card, spec: &MlaDecode, query_rows: u32) -> &'static Tile {
        choose(VARIANTS, card, &DecodeRequest { query_rows, ..DecodeRequest::one_token(spec) }, None)
            .expect("some variant runs everywhere")
            .0
            .tile
    }

    fn spec((latent, rope): (u32, u32), num_heads: u32, cache: Dtype, query: Dtype) -> MlaDecode {
        MlaDecode {
            shape: MlaShape { num_heads, kv_lora_rank: latent, qk_rope_head_dim: rope },
            kv: KvSpec { layout: cache.into(), page_size: 64, num_pages: 4 },
            query,
            out: Dtype::F32,
        }
    }

    #[test]
    fn each_spec_has_a_variant_on_each_card() {
        for card in [Card::H200, Card::RTX_5090, Card::A100] {
            for (latent, rope, _) in SUPPORTED_DIMS {
                for cache in Dtype::ALL {
                    for query in Dtype::ALL {
                        let spec = spec((latent, rope), 16, cache, query);
                        let tile = chosen(&card, &spec, 16);
                        let on_tensor_cores =
                            cache != Dtype::F32 && (cache != Dtype::E4m3 || card.capability >= 89);
                        assert_eq!(
                            tile.body.tensor_cores, on_tensor_cores,
                            "{card:?} {spec:?}: {}",
                            tile.name
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn records_have_tensor_cores_where_codes_do() {
        let name = |card: &Card, rope, heads, query| {
            let layout = if rope > 0 { KvLayout::Ds656 } else { KvLayout::Ds528 };
            let plain = spec((512, rope), heads, Dtype::E4m3, query);
            chosen(card, &MlaDecode { kv: KvSpec { layout, ..plain.kv }, ..plain }, heads).name
        };
        let blackwell = Card { capability: 100, ..Card::H200 };
        for query in [Dtype::Bf16, Dtype::E4m3] {
            assert_eq!(name(&Card::H200, 64, 16, query), "wgmma_swap_ab_n16");
            assert_eq!(name(&Card::H200, 64, 32, query), "wgmma_swap_ab_n32");
            assert_eq!(name(&Card::H200, 64, 128, query), "wgmma_swap_ab_n64");
            assert_eq!(name(&Card::H200, 0, 128, query), "wgmma_swap_ab_n64");
            assert_eq!(name(&blackwell, 64, 128, query), "mma_m64");
            assert_eq!(name(&Card::RTX_5090, 64, 128, query), "mma_m32_small");
            assert_eq!(name(&Card::RTX_5090, 0, 8, query), "mma_m16");
            assert_eq!(name(&Card::A100, 64, 16, query), "simple");
        }
        // The rotary part is multiplied as bf16, which holds no f16.
        assert_eq!(name(&Card::H200, 64, 128, Dtype::F16), "mma_m16");
        assert_eq!(name(&Card::H200, 0, 128, Dtype::F16), "wgmma_swap_ab_n64");
        assert_eq!(name(&Card::RTX_5090, 64, 128, Dtype::F32), "mma_m16");
        assert_eq!(name(&Card::H200, 0, 128, Dtype::F32), "simple");
    }

    #[test]
    fn lists_have_every_body_that_copies_single_tokens() {
        let options =
            DecodeOptions { topk: 64, query_tokens: 4, attn_sink: true, ..DecodeOptions::default() };
        let lists = |card: &Card, heads, cache| {
            let request = DecodeRequest::new(&spec((512, 64), heads, cache, Dtype::Bf16), &options);
            let (_, choice) = choose(VARIANTS, card, &request, None).expect("some variant serves it");
            (choice.variant, choice.why)
        };
        // A tile has rows of one query token.
        assert_eq!(lists(&Card::H200, 16, Dtype::Bf16).0, "wgmma_swap_ab_n16");
        assert_eq!(lists(&Card::H200, 128, Dtype::Bf16).0, "wgmma_m64");
        assert_eq!(lists(&Card::H200, 128, Dtype::E4m3).0, "wgmma_swap_ab_n64");
        assert_eq!(lists(&Card::RTX_5090, 128, Dtype::F16).0, "mma_m64_small");
        assert_eq!(lists(&Card::H200, 16, Dtype::F32).0, "simple");
        let (name, why) = lists(&Card { capability: 100, ..Card::H200 }, 16, Dtype::Bf16);
        assert_eq!(name, "mma_m16");
        assert!(why.contains("not mma_tma_m16: it does not serve lists of slots (topk)"), "{why}");
    }

    #[test]
    fn fp8_products_are_forced_only_and_of_codes_only() {
        let forced = |card: &Card, cache, query| {
            let request = DecodeRequest::one_token(&spec((512, 64), 16, cache, query));
            choose(VARIANTS, card, &request, Some("mma_fp8_m16"))
                .map(|(kernel, _)| kernel.compiled.entry.name)
                .map_err(|error| error.to_string())
        };
        let ada = Card { capability: 89, ..Card::RTX_5090 };
        for card in [ada, Card::RTX_5090, Card::H200] {
            assert_eq!(forced(&card, Dtype::E4m3, Dtype::E4m3), Ok("mla_decode_512_64_mma_fp8_m16"));
            for (latent, rope, _) in SUPPORTED_DIMS {
                let spec = spec((latent, rope), 16, Dtype::E4m3, Dtype::E4m3);
                let forced = choose(VARIANTS, &card, &DecodeRequest::one_token(&spec), Some("mma_fp8_m16"));
                forced.expect("every dims has a kernel");
                assert_ne!(chosen(&card, &spec, 16).name, "mma_fp8_m16");
            }
        }
        let lacks = |card, cache, query, why: &str| {
            let error = forced(card, cache, query).expect_err("it cannot run");
            let want = format!("variant mma_fp8_m16 cannot run here: {why}; force another, or none");
            assert_eq!(error, want);
        };
        let rounded = "a query of bf16 would be rounded: it needs e4m3, with a q_scale";
        lacks(&ada, Dtype::E4m3, Dtype::Bf16, rounded);
        let other = "no kernel of this variant reads a cache of bf16";
        lacks(&ada, Dtype::Bf16, Dtype::E4m3, other);
        let old = "no FP8 mma.sync (needs compute capability 8.9 or later, driver 550 or later)";
        lacks(&Card::A100, Dtype::E4m3, Dtype::E4m3, old);
        lacks(&Card { fp8_mma: false, ..ada }, Dtype::E4m3, Dtype::E4m3, old);
    }

    #[test]
    fn tiles_suit_card_and_heads() {
        let name = |card, heads, query| chosen(card, &spec((512, 64), heads, Dtype::Bf16, query), heads).name;
        assert_eq!(name(&Card::H200, 16, Dtype::Bf16), "wgmma_swap_ab_n16");
        assert_eq!(name(&Card { capability: 100, ..Card::H200 }, 16, Dtype::Bf16), "mma_tma_m16");
        assert_eq!(name(&Card { tma: false, ..Card::H200 }, 16, Dtype::Bf16), "mma_m16");
        assert_eq!(name(&Card::H200, 20, Dtype::Bf16), "wgmma_swap_ab_n32");
        assert_eq!(name(&Card::H200, 32, Dtype::Bf16), "wgmma_swap_ab_n32");
        assert_eq!(name(&Card { capability: 100, ..Card::H200 }, 32, Dtype::Bf16), "mma_m32");
        assert_eq!(name(&Card::H200, 40, Dtype::Bf16), "wgmma_m64");
        assert_eq!(name(&Card::H200, 128, Dtype::Bf16), "wgmma_m64");
        assert_eq!(name(&Card { tma: false, ..Card::H200 }, 128, Dtype::Bf16), "mma_m64");
        assert_eq!(name(&Card { capability: 100, ..Card::H200 }, 128, Dtype::Bf16), "mma_m64");
        assert_eq!(name(&Card::H200, 128, Dtype::F32), "mma_m16");
        assert_eq!(name(&Card::RTX_5090, 128, Dtype::Bf16), "mma_m64_small");
        assert_eq!(name(&Card::RTX_5090, 20, Dtype::Bf16), "mma_m32_small");
        assert_eq!(name(&Card::RTX_5090, 16, Dtype::Bf16), "mma_m16_small");
        assert_eq!(name(&Card::RTX_5090, 128, Dtype::F32), "mma_m16_small");
        assert_eq!(name(&Card::RTX_5090, 16, Dtype::F32), "mma_m16_small");
    }

    #[test]
    fn tiles_of_an_fp8_cache_suit_card_and_heads() {
        let name = |card, heads, query| chosen(card, &spec((512, 64), heads, Dtype::E4m3, query), heads).name;
        assert_eq!(name(&Card::H200, 16, Dtype::Bf16), "wgmma_swap_ab_n16");
        assert_eq!(name(&Card::H200, 20, Dtype::Bf16), "wgmma_swap_ab_n32");
        for heads in [40, 96, 128] {
            for query in [Dtype::Bf16, Dtype::F16, Dtype::E4m3] {
                assert_eq!(name(&Card::H200, heads, query), "wgmma_swap_ab_n64");
            }
        }
        assert_eq!(name(&Card::H200, 128, Dtype::F32), "mma_m16");
        let blackwell = Card { capability: 100, ..Card::H200 };
        assert_eq!(name(&blackwell, 16, Dtype::Bf16), "mma_tma_m16");
        assert_eq!(name(&blackwell, 128, Dtype::E4m3), "mma_m64");
    }
}
