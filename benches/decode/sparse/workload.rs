//! The workloads of sparse decodes.

use wgpu_mla::{Dtype, KvLayout, KvSpec, MlaDecode, MlaShape};

use super::token_bytes;

pub const PAGE_SIZE: u32 = 64;

/// A line of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    pub heads: u32,
    pub sequences: u32,
    pub q_len: u32,
    pub layout: KvLayout,
    /// Whether the scales of records are any numbers, as vLLM writes them; else they are powers of two, as FlashMLA writes them.
    pub any_scales: bool,
    pub attends: Attends,
    /// Tokens of the pool.
    pub pool_tokens: u32,
}

/// What a query token attends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Attends {
    /// Slots drawn from the whole pool, so many.
    Listed(u32),
    /// Its sequence, of so many tokens.
    Sequence(u32),
}

const BASE: Workload = Workload {
    heads: 128,
    sequences: 64,
    q_len: 1,
    layout: KvLayout::Ds656,
    any_scales: false,
    attends: Attends::Listed(2048),
    pool_tokens: 64 * 8192,
};

/// For cards.
pub fn full() -> Vec<Workload> {
    let any = Workload { any_scales: true, ..BASE };
    let bf16 = Workload { layout: Dtype::Bf16.into(), ..BASE };
    // One long prompt, whose query tokens list tokens of it.
    let prefill = Workload { sequences: 1, q_len: 4096, pool_tokens: 32_768, ..BASE };
    let dense = Workload { heads: 16, attends: Attends::Sequence(8192), ..BASE };
    vec![
        BASE,
        Workload { heads: 64, ..BASE },
        Workload { heads: 16, ..BASE },
        Workload { sequences: 1, ..BASE },
        Workload { sequences: 1, heads: 16, ..BASE },
        Workload { q_len: 2, ..BASE },
        Workload { q_len: 2, heads: 16, ..BASE },
        any,
        Workload { heads: 64, ..any },
        Workload { heads: 16, ..any },
        Workload { layout: KvLayout::Ds528, heads: 64, ..BASE },
        bf16,
        Workload { heads: 64, ..bf16 },
        Workload { heads: 16, ..bf16 },
        Workload { sequences: 1, heads: 16, ..bf16 },
        prefill,
        Workload { any_scales: true, ..prefill },
        Workload { layout: Dtype::Bf16.into(), ..prefill },
        dense,
        Workload { any_scales: true, ..dense },
        Workload { layout: Dtype::Bf16.into(), ..dense },
    ]
}

/// For software and integrated devices, and the CPU: lists beside sequences of as many tokens.
pub fn small() -> Vec<Workload> {
    let one = Workload { heads: 16, sequences: 1, pool_tokens: 16_384, ..BASE };
    let sequence = Attends::Sequence(2048);
    let bf16 = Workload { layout: Dtype::Bf16.into(), ..one };
    vec![
        Workload { attends: sequence, ..bf16 },
        bf16,
        Workload { attends: sequence, ..one },
        one,
        Workload { any_scales: true, ..one },
        Workload { heads: 128, attends: sequence, ..bf16 },
        Workload { heads: 128, ..bf16 },
        Workload { sequences: 8, pool_tokens: 8 * 2048, attends: sequence, ..bf16 },
        Workload { sequences: 8, ..bf16 },
    ]
}

/// Every kind of [`full`], in seconds.
pub fn tiny() -> Vec<Workload> {
    let mut kinds: Vec<Workload> = Vec::new();
    for workload in full() {
        let tiny = workload.tiny();
        if !kinds.contains(&tiny) {
            kinds.push(tiny);
        }
    }
    kinds
}

impl Workload {
    fn tiny(self) -> Self {
        let attends = match self.attends {
            Attends::Listed(_) => Attends::Listed(75),
            Attends::Sequence(_) => Attends::Sequence(100),
        };
        let (sequences, q_len) = (self.sequences.min(2), self.q_len.min(20));
        Self { attends, sequences, q_len, pool_tokens: 640, ..self }
    }

    pub fn name(&self) -> String {
        let Self { heads, sequences, q_len, layout, .. } = self;
        let mut name = match self.attends {
            Attends::Listed(topk) => format!("sparse H{heads} b{sequences} topk {topk} kv {layout}"),
            Attends::Sequence(tokens) => format!("dense H{heads} b{sequences}x{tokens} kv {layout}"),
        };
        if *q_len > 1 {
            name += &format!(" q_len {q_len}");
        }
        if self.any_scales {
            name += " any scales";
        }
        name
    }

    pub fn dims(&self) -> (u32, u32) {
        (512, if self.layout == KvLayout::Ds528 { 0 } else { 64 })
    }

    pub fn tokens(&self) -> u32 {
        self.sequences * self.q_len
    }

    pub fn spec(&self) -> MlaDecode {
        let (kv_lora_rank, qk_rope_head_dim) = self.dims();
        let num_pages = self.pool_tokens / PAGE_SIZE;
        MlaDecode {
            shape: MlaShape { num_heads: self.heads, kv_lora_rank, qk_rope_head_dim },
            kv: KvSpec { layout: self.layout, page_size: PAGE_SIZE, num_pages },
            query: Dtype::Bf16,
            out: Dtype::Bf16,
        }
    }

    /// Tokens that a query token attends.
    fn attended(&self) -> f64 {
        match self.attends {
            Attends::Listed(count) | Attends::Sequence(count) => count.into(),
        }
    }

    /// Bytes of the cache that a decode reads: of a list once a query token, of a sequence once.
    pub fn kv_bytes(&self) -> f64 {
        let readers = match self.attends {
            Attends::Listed(_) => self.tokens(),
            Attends::Sequence(_) => self.sequences,
        };
        self.attended() * f64::from(readers) * token_bytes(self.layout, self.dims()) as f64
    }

    pub fn flop(&self) -> f64 {
        let (latent, rope) = self.dims();
        2.0 * f64::from(self.tokens() * self.heads) * self.attended() * f64::from(2 * latent + rope)
    }

    /// What it is compared with.
    pub fn base(&self) -> Option<Self> {
        match self.attends {
            _ if self.any_scales => Some(Self { any_scales: false, ..*self }),
            Attends::Listed(topk) => Some(Self { attends: Attends::Sequence(topk), ..*self }),
            Attends::Sequence(_) => None,
        }
    }
}
