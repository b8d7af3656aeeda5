//! The workloads of the decode bench.

use wgpu_mla::{Dtype, KvSpec, MlaDecode, MlaShape, SharedPrefix};

use crate::support::Draws;

pub const PAGE_SIZE: u32 = 64;

/// A workload: one line of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    pub heads: u32,
    /// `L` and `R`.
    pub dims: (u32, u32),
    pub lens: Lens,
    pub q_len: u32,
    pub kv: Dtype,
    pub query: Dtype,
    /// The best variant without tensor cores, even where the device has them.
    pub plain: bool,
    /// Cascade: a prefix that sequences share is attended once for all of them.
    pub cascade: bool,
}

/// The tokens of a batch's sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lens {
    Uniform {
        batch: u32,
        context: u32,
    },
    /// Drawn from `1..=longest`, the same in every run.
    Ragged {
        batch: u32,
        longest: u32,
    },
    /// The first tokens are the same pages.
    Shared {
        batch: u32,
        context: u32,
        prefix: u32,
    },
}

/// What a workload is compared with: 16 heads over 64 x 8192 tokens of the same cache, one query token; a cascade: the same without.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ratio {
    /// Their times.
    Time,
    /// Their times per KV byte.
    TimePerByte,
}

const BASE: Workload = Workload {
    heads: 16,
    dims: (512, 64),
    lens: uniform(64, 8192),
    q_len: 1,
    kv: Dtype::Bf16,
    query: Dtype::Bf16,
    plain: false,
    cascade: false,
};

const fn uniform(batch: u32, context: u32) -> Lens {
    Lens::Uniform { batch, context }
}

const RAGGED: Lens = Lens::Ragged { batch: 64, longest: 16_384 };

/// For cards: the workloads of the peers and those that compare them.
pub fn full() -> Vec<Workload> {
    let e4m3 = Workload { kv: Dtype::E4m3, ..BASE };
    let long = uniform(1, 131_072);
    let shared = Workload { lens: Lens::Shared { batch: 64, context: 9216, prefix: 8192 }, ..BASE };
    vec![
        BASE,
        Workload { lens: uniform(32, 4096), ..BASE },
        Workload { lens: uniform(128, 4096), ..BASE },
        Workload { lens: uniform(8, 8192), ..BASE },
        Workload { lens: uniform(1, 4096), ..BASE },
        Workload { lens: uniform(1, 32_768), ..BASE },
        Workload { lens: long, ..BASE },
        Workload { lens: RAGGED, ..BASE },
        Workload { q_len: 2, ..BASE },
        Workload { query: Dtype::F32, ..BASE },
        Workload { heads: 20, ..BASE },
        Workload { heads: 64, ..BASE },
        Workload { heads: 128, ..BASE },
        Workload { heads: 128, lens: uniform(32, 4096), ..BASE },
        Workload { heads: 128, lens: long, ..BASE },
        Workload { heads: 128, lens: RAGGED, ..BASE },
        Workload { heads: 128, q_len: 2, ..BASE },
        Workload { dims: (256, 64), ..BASE },
        Workload { dims: (256, 32), ..BASE },
        Workload { plain: true, ..BASE },
        Workload { kv: Dtype::F16, query: Dtype::F16, ..BASE },
        e4m3.clone(),
        Workload { lens: RAGGED, ..e4m3.clone() },
        Workload { lens: long, ..e4m3.clone() },
        Workload { heads: 128, ..e4m3.clone() },
        Workload { heads: 128, query: Dtype::E4m3, ..e4m3 },
        shared.clone(),
        Workload { cascade: true, ..shared },
    ]
}

/// For software and integrated devices, and the CPU.
pub fn small() -> Vec<Workload> {
    let one = Workload { lens: uniform(1, 4096), ..BASE };
    let f16 = Workload { kv: Dtype::F16, query: Dtype::F16, ..one.clone() };
    vec![
        f16.clone(),
        Workload { query: Dtype::F32, ..f16 },
        one.clone(),
        Workload { kv: Dtype::E4m3, ..one.clone() },
        Workload { plain: true, ..one.clone() },
        Workload { q_len: 2, ..one.clone() },
        Workload { heads: 20, ..one.clone() },
        Workload { heads: 128, ..one.clone() },
        Workload { lens: uniform(8, 512), ..one.clone() },
        Workload { lens: Lens::Ragged { batch: 8, longest: 1024 }, ..one },
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
    /// The same kind in a fraction of a second.
    pub fn tiny(&self) -> Self {
        let lens = match self.lens {
            Lens::Uniform { batch: 1, .. } => uniform(1, 300),
            Lens::Uniform { .. } => uniform(2, 100),
            Lens::Ragged { .. } => Lens::Ragged { batch: 3, longest: 200 },
            Lens::Shared { .. } => Lens::Shared { batch: 3, context: 150, prefix: 128 },
        };
        Self { lens, ..self.clone() }
    }

    /// `b64x8192` or `ragged64`.
    pub fn shape_name(&self) -> String {
        match self.lens {
            Lens::Uniform { batch, context } => format!("b{batch}x{context}"),
            Lens::Ragged { batch, .. } => format!("ragged{batch}"),
            Lens::Shared { batch, context, prefix } => format!("b{batch}x{context} sharing {prefix}"),
        }
    }

    pub fn name(&self) -> String {
        let mut name = format!("H{} {} kv {} q {}", self.heads, self.shape_name(), self.kv, self.query);
        if self.q_len > 1 {
            name += &format!(" q_len {}", self.q_len);
        }
        if self.dims != (512, 64) {
            name += &format!(" L{} R{}", self.dims.0, self.dims.1);
        }
        if self.plain {
            name += " plain";
        }
        if self.cascade {
            name += " cascade";
        }
        name
    }

    pub fn seq_lens(&self) -> Vec<i32> {
        match self.lens {
            Lens::Uniform { batch, context } | Lens::Shared { batch, context, .. } => {
                vec![context as i32; batch as usize]
            }
            Lens::Ragged { batch, longest } => {
                // With 64 draws up to 16384, as many tokens as the peers' draws have.
                let mut draws = Draws(1_770_005_310);
                (0..batch).map(|_| 1 + (draws.next() * longest as f32) as i32).collect()
            }
        }
    }

    pub fn tokens(&self) -> u64 {
        self.seq_lens().iter().map(|&len| len as u64).sum()
    }

    pub fn pages(&self) -> u32 {
        let (shared, first) = self.shared_pages();
        first + self.seq_lens().iter().map(|&len| (len as u32).div_ceil(PAGE_SIZE) - shared).sum::<u32>()
    }

    /// Pages that each sequence begins with, and how many of them there are in all.
    fn shared_pages(&self) -> (u32, u32) {
        match self.lens {
            Lens::Shared { prefix, .. } => (prefix / PAGE_SIZE, prefix / PAGE_SIZE),
            _ => (0, 0),
        }
    }

    /// The groups that a cascade attends together.
    pub fn shared_prefixes(&self) -> Vec<SharedPrefix> {
        match self.lens {
            Lens::Shared { batch, prefix, .. } if self.cascade => {
                vec![SharedPrefix { sequences: (0..batch).collect(), tokens: prefix }]
            }
            _ => Vec::new(),
        }
    }

    pub fn spec(&self) -> MlaDecode {
        MlaDecode {
            shape: MlaShape {
                num_heads: self.heads,
                kv_lora_rank: self.dims.0,
                qk_rope_head_dim: self.dims.1,
            },
            kv: KvSpec { layout: self.kv.into(), page_size: PAGE_SIZE, num_pages: self.pages() },
            query: self.query,
            // No output is e4m3.
            out: if self.query == Dtype::E4m3 { Dtype::Bf16 } else { self.query },
        }
    }

    /// Elements of one layer's cache, the unused ends of last pages included.
    pub fn layer_elems(&self) -> u64 {
        self.spec().kv.num_slots() * u64::from(self.dims.0 + self.dims.1)
    }

    /// Bytes of the cache that a decode must read.
    pub fn kv_bytes(&self) -> f64 {
        let tokens = match self.lens {
            Lens::Shared { batch, prefix, .. } => self.tokens() - u64::from(batch - 1) * u64::from(prefix),
            _ => self.tokens(),
        };
        tokens as f64 * f64::from(self.dims.0 + self.dims.1) * self.kv.bytes() as f64
    }

    pub fn flop(&self) -> f64 {
        let (latent, rope) = self.dims;
        2.0 * f64::from(self.q_len * self.heads) * self.tokens() as f64 * f64::from(2 * latent + rope)
    }

    /// What it is compared with, if it is.
    pub fn ratio(&self) -> Option<(Workload, Ratio)> {
        let base = Workload { kv: self.kv, ..BASE };
        match self {
            Self { lens: Lens::Ragged { .. }, .. } => Some((base, Ratio::TimePerByte)),
            Self { q_len: 2, .. } | Self { heads: 20, .. } => Some((base, Ratio::Time)),
            Self { cascade: true, .. } => Some((Workload { cascade: false, ..self.clone() }, Ratio::Time)),
            _ => None,
        }
    }

    /// The block table, with consecutive pages not adjacent in memory, `-1` past a sequence's last; and its columns.
    pub fn block_table(&self) -> (Vec<i32>, usize) {
        let pages = u64::from(self.pages());
        let stride = if pages.is_multiple_of(7919) { 1 } else { 7919 };
        let used: Vec<_> =
            self.seq_lens().iter().map(|&len| (len as usize).div_ceil(PAGE_SIZE as usize)).collect();
        let max_pages = used.iter().copied().max().unwrap_or(0);
        let (shared, first) = self.shared_pages();
        let page = |index: u64| ((index * stride + 13) % pages) as i32;
        let mut table = Vec::with_capacity(used.len() * max_pages);
        let mut next = u64::from(first);
        for used in used {
            let own = used as u64 - u64::from(shared);
            let row = (0..u64::from(shared)).chain(next..next + own).map(page);
            table.extend(row.chain(std::iter::repeat_n(-1, max_pages - used)));
            next += own;
        }
        (table, max_pages)
    }
}
