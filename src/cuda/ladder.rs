//! The rows of the CUDA ladder, best first, and which of them runs where. Pure.

use super::driver::Card;
use super::ptx::{
    MLA_DECODE_BF16, MLA_DECODE_E4M3, MLA_DECODE_F16, MLA_DECODE_SIMPLE, MLA_DECODE_TMA_BF16,
    MLA_DECODE_TMA_E4M3, MLA_DECODE_TMA_F16, Ptx,
};
use super::tensor_map::BOX_TOKENS;
use crate::{Dtype, MlaSpec};

/// One row: a tile, compiled for each cache dtype and dims that it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// What callers see and force.
    pub name: &'static str,
    /// Query rows of a tile.
    pub rows: u32,
    /// Only 512/64 is compiled.
    deepseek_only: bool,
    /// On tensor cores.
    pub matrices: bool,
    /// By tensor copies (TMA), and the row of the same tiles for a cache that they cannot take.
    pub without_tma: Option<&'static Row>,
}

/// The rows, best first. The last one runs everywhere.
pub(super) const ROWS: [Row; 8] = [
    matrices("rows64", 64, true),
    matrices("rows32", 32, true),
    matrices("rows64_small", 64, true),
    matrices("rows32_small", 32, true),
    Row { without_tma: Some(&ROWS16), ..matrices("rows16_tma", 16, true) },
    ROWS16,
    matrices("rows16_small", 16, true),
    Row { matrices: false, ..matrices("simple", 8, false) },
];

const ROWS16: Row = matrices("rows16", 16, false);

const fn matrices(name: &'static str, rows: u32, deepseek_only: bool) -> Row {
    Row { name, rows, deepseek_only, matrices: true, without_tma: None }
}

/// What a card has for the rows by tensor copies: where there is less, a block is alone and waits for its copies. Not made for it.
const TMA_SHARED_BYTES: u32 = 200 << 10;

/// A compiled row.
#[derive(Debug, Clone)]
pub(super) struct Compiled {
    pub ptx: &'static Ptx,
    pub entry: &'static str,
    pub threads: u32,
    pub shared_bytes: u32,
    /// Tokens of the cache that it takes at a time.
    pub tokens: u32,
}

impl Row {
    /// What keeps it from running; `Ok` where nothing does.
    ///
    /// # Errors
    /// A sentence that names what is missing.
    pub fn runs_on(&self, card: &Card, spec: &MlaSpec) -> Result<(), String> {
        let compiled = self.compiled(spec)?;
        if self.without_tma.is_some() {
            if !card.tma || card.shared_bytes < TMA_SHARED_BYTES {
                return Err("no tensor copies (TMA), or too little shared memory: H100 and B100 have both, with a driver of 525 or later".into());
            }
            if !spec.kv.page_size.is_multiple_of(BOX_TOKENS) {
                return Err(format!(
                    "pages of {} tokens: tensor copies take a multiple of {BOX_TOKENS}",
                    spec.kv.page_size
                ));
            }
        }
        if compiled.shared_bytes > card.shared_bytes {
            let (need, has) = (compiled.shared_bytes, card.shared_bytes);
            return Err(format!("a block needs {need} bytes of shared memory, the card allows {has}"));
        }
        if self.matrices && spec.kv.dtype == Dtype::E4m3 && card.capability < 89 {
            return Err(format!("compute capability {} converts no FP8: 89 does", card.capability));
        }
        Ok(())
    }

    /// Its kernel for a spec.
    ///
    /// # Errors
    /// A sentence about why there is none.
    pub fn compiled(&self, spec: &MlaSpec) -> Result<Compiled, String> {
        let (latent, rope) = (spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim);
        if !self.matrices {
            let ptx = &MLA_DECODE_SIMPLE;
            let entry = find(ptx.text(), &format!("mla_decode_{}_{latent}_{rope}", spec.kv.dtype));
            let entry = entry.ok_or_else(|| format!("no kernel for {latent}/{rope}"))?;
            return Ok(Compiled { ptx, entry, threads: self.rows * 32, shared_bytes: 0, tokens: 1 });
        }
        let ptx = match (spec.kv.dtype, self.without_tma) {
            (Dtype::F32, _) => return Err("an f32 cache is not multiplied by tensor cores".into()),
            (Dtype::F16, None) => &MLA_DECODE_F16,
            (Dtype::F16, Some(_)) => &MLA_DECODE_TMA_F16,
            (Dtype::Bf16, None) => &MLA_DECODE_BF16,
            (Dtype::Bf16, Some(_)) => &MLA_DECODE_TMA_BF16,
            (Dtype::E4m3, None) => &MLA_DECODE_E4M3,
            (Dtype::E4m3, Some(_)) => &MLA_DECODE_TMA_E4M3,
        };
        let text = ptx.text();
        let parts = if splits_queries(spec) { "_split" } else { "" };
        let name = format!("mla_decode_{latent}_{rope}_{}{parts}", self.name);
        let entry = find(text, &name).ok_or_else(|| {
            let parts = if parts.is_empty() { "" } else { " with a query in two parts" };
            format!("no kernel for {latent}/{rope}{parts}")
        })?;
        let number = |what: &str| {
            let after = text.split_once(&format!(" {entry}_{what} = "))?.1;
            after.split(';').next()?.trim().parse().ok()
        };
        let numbers = (number("threads"), number("shared_bytes"), number("tokens"));
        let (Some(threads), Some(shared_bytes), Some(tokens)) = numbers else {
            return Err(format!("{entry} does not say what it needs"));
        };
        Ok(Compiled { ptx, entry, threads, shared_bytes, tokens })
    }
}

/// The name of an entry point, as it stands in the text.
fn find(text: &'static str, name: &str) -> Option<&'static str> {
    let head = format!(".entry {name}(");
    let at = text.find(&head)? + ".entry ".len();
    Some(&text[at..at + name.len()])
}

/// Whether the matrices' type does not hold a query, after it was scaled by a power of two.
fn splits_queries(spec: &MlaSpec) -> bool {
    matches!((spec.kv.dtype, spec.query), (_, Dtype::F32) | (Dtype::Bf16, Dtype::F16))
}

/// The row for so many query rows a sequence: each tile reads the cache once more, which is worth about 16 rows of arithmetic.
pub(super) fn choose(card: &Card, spec: &MlaSpec, query_rows: u32) -> Option<&'static Row> {
    let cost = |row: &&Row| query_rows.div_ceil(row.rows) * (row.rows + 16);
    let runs = |row: &&Row| row.runs_on(card, spec).is_ok();
    let matrices = ROWS.iter().filter(|row| row.matrices).filter(runs).min_by_key(cost);
    matrices.or_else(|| ROWS.iter().find(runs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvSpec, MlaShape, SUPPORTED_DIMS};

    const H200: Card = Card { capability: 90, multiprocessors: 132, shared_bytes: 232_448, tma: true };
    const RTX_5090: Card = Card { capability: 120, multiprocessors: 170, shared_bytes: 101_376, tma: true };
    const A100: Card = Card { capability: 80, multiprocessors: 108, shared_bytes: 166_912, tma: false };

    fn spec((latent, rope): (u32, u32), num_heads: u32, cache: Dtype, query: Dtype) -> MlaSpec {
        MlaSpec {
            shape: MlaShape { num_heads, kv_lora_rank: latent, qk_rope_head_dim: rope },
            kv: KvSpec { dtype: cache, page_size: 64, num_pages: 4 },
            query,
            out: Dtype::F32,
        }
    }

    #[test]
    fn each_spec_has_a_row_on_each_card() {
        for card in [H200, RTX_5090, A100] {
            for (latent, rope, _) in SUPPORTED_DIMS {
                for cache in Dtype::ALL {
                    for query in Dtype::ALL {
                        let spec = spec((latent, rope), 16, cache, query);
                        let row = choose(&card, &spec, 16).expect("a row");
                        let on_matrices =
                            cache != Dtype::F32 && (cache != Dtype::E4m3 || card.capability >= 89);
                        assert_eq!(row.matrices, on_matrices, "{card:?} {spec:?}: {}", row.name);
                        row.compiled(&spec).expect("its kernel");
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_suit_card_and_heads() {
        let name = |card, heads, query| {
            choose(card, &spec((512, 64), heads, Dtype::Bf16, query), heads).map(|row| row.name)
        };
        assert_eq!(name(&H200, 16, Dtype::Bf16), Some("rows16_tma"));
        assert_eq!(name(&Card { tma: false, ..H200 }, 16, Dtype::Bf16), Some("rows16"));
        assert_eq!(name(&H200, 20, Dtype::Bf16), Some("rows32"));
        assert_eq!(name(&H200, 128, Dtype::Bf16), Some("rows64"));
        assert_eq!(name(&H200, 128, Dtype::F32), Some("rows16"));
        assert_eq!(name(&RTX_5090, 128, Dtype::Bf16), Some("rows64_small"));
        assert_eq!(name(&RTX_5090, 20, Dtype::Bf16), Some("rows32_small"));
        assert_eq!(name(&RTX_5090, 16, Dtype::Bf16), Some("rows16_small"));
        assert_eq!(name(&RTX_5090, 128, Dtype::F32), Some("rows16_small"));
        assert_eq!(name(&RTX_5090, 16, Dtype::F32), Some("rows16_small"));
    }
}
