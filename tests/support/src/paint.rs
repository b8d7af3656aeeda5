//! Test problems: periodic or random data that does not depend on the paging, and poison everywhere else.

mod lists;

pub use lists::{Lengths, Lists};

use crate::reference::{Decode, attn_sink, cache_values, mla_decode, mla_decode_sparse, record};
use wgpu_mla::{Dtype, KvLayout, KvSpec, Mask, MlaDecode, MlaShape, SharedPrefix};

use super::case::DecodeCase;

/// splitmix64: small, and good enough to shuffle and to draw.
#[derive(Debug, Clone)]
pub struct Rng(pub u64);

impl Rng {
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)] // Endless: no iterator.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Uniform in `(0, 1)`.
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal.
    pub fn randn(&mut self) -> f32 {
        let (radius, angle) = ((-2.0 * self.unit().ln()).sqrt(), std::f64::consts::TAU * self.unit());
        (radius * angle.cos()) as f32
    }

    /// Shuffles in place.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        (1..items.len()).rev().for_each(|i| items.swap(i, self.below(i + 1)));
    }
}

/// A byte that makes a NaN of every dtype when it fills an element.
pub const POISON: u8 = 0xFF;

/// Table entries that no kernel may follow.
pub const WILD: [i32; 4] = [2_147_480_000, -1, i32::MIN, i32::MAX];

/// The rotary-scaled factor of DeepSeek's smaller models; any would do.
pub const SOFTMAX_SCALE: f32 = 0.114_721;

/// What the elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Sawtooths of prime periods, about +-1, with logits of about +-2, so that every token and head has a distinct result: with
    /// `Randn` all heads agree within the tolerances of 16-bit dtypes.
    Painted,
    /// randn / 10.
    Randn,
    /// One token takes all the weight.
    Needle,
    /// Logits from +-100 to beyond +-1000.
    BigLogits,
    /// Logits that rise or fall by 24 with each of the first 20 blocks of 16 tokens, and with the last 8 of every 64, where half of
    /// the heads have a new maximum. Not for f32 caches: f32 rounds such large logits too much.
    Rising,
    /// Cache elements of 1e-4 and of 300, side by side.
    Extremes,
    /// Cache elements of 1e5, past f16's range.
    Huge,
}

impl Data {
    /// Every kind but `Rising`, the last two for caches that can hold them.
    pub const ALL: [Self; 6] =
        [Self::Painted, Self::Randn, Self::Needle, Self::BigLogits, Self::Extremes, Self::Huge];

    /// About the largest magnitude in the cache and in the query: what an e4m3 scale is made from.
    fn amax(self) -> (f32, f32) {
        match self {
            Self::Painted => (1.0, 2.4),
            Self::Randn => (0.5, 0.5),
            Self::Needle => (1.5, 1.5),
            Self::BigLogits => (720.0, 16.0),
            // The logits rise over 2200 tokens.
            Self::Rising => (480.0, 16.0),
            Self::Extremes => (300.0, 4e-3),
            Self::Huge => (1e5, 1.2e-5),
        }
    }

    /// The key of a token: `latent + rope` elements.
    fn key(self, sequence: &Sequence, token: u64, latent: usize, row: usize) -> Vec<f32> {
        let mut rng = Rng(sequence.id << 40 ^ token << 8 ^ 1);
        let mut randn = || (0..row).map(|_| rng.randn() / 10.0).collect::<Vec<f32>>();
        match self {
            Self::Painted => cycle(sequence.id * 1_000_003 + token, row, 7, 251, 125.0),
            Self::Randn => randn(),
            Self::Needle => {
                let needle = token == u64::from(sequence.len) * 2 / 3;
                let with_needle = |(i, x)| if needle { x + direction(i) } else { x };
                randn().into_iter().enumerate().map(with_needle).collect()
            }
            Self::BigLogits => {
                // Steps of 8, in an order that is not the tokens': the best key wins by a lot, so that f32's error
                // of a large logit stays out of the result.
                let logit = 100.0 + 8.0 * (token * 37 % 151) as f32;
                let signed = if token.is_multiple_of(2) { logit } else { -logit };
                let mut key = randn();
                key[big_column(latent, row)] = signed / (16.0 * SOFTMAX_SCALE);
                key
            }
            Self::Rising => {
                let mut key = randn();
                let block = token / 16;
                let rises = block.min(20) + block / 64 * 8 + (block % 64).saturating_sub(56);
                key[big_column(latent, row)] = 24.0 * rises as f32 / (16.0 * SOFTMAX_SCALE);
                key
            }
            Self::Extremes => (0..row)
                .map(|_| {
                    let bits = rng.next();
                    let magnitude = if bits & 1 == 0 { 300.0 } else { 1e-4 };
                    let signed = if bits & 2 == 0 { magnitude } else { -magnitude };
                    signed * (0.5 + 0.5 * rng.unit() as f32)
                })
                .collect(),
            Self::Huge => {
                let mut draw = || (rng.unit() * 2.0 - 1.0) as f32;
                (0..row).map(|_| 1e5 * draw()).collect()
            }
        }
    }

    /// One head's query row.
    fn query(self, sequence: &Sequence, token: u64, head: u64, latent: usize, row: usize) -> Vec<f32> {
        let mut rng = Rng(sequence.id << 40 ^ token << 20 ^ head << 8 ^ 2);
        let mut randn = |scale: f32| (0..row).map(|_| rng.randn() * scale).collect::<Vec<f32>>();
        match self {
            Self::Painted => cycle((sequence.id * 1009 + token) * 131 + head, row, 11, 241, 50.0),
            Self::Randn => randn(0.1),
            Self::Needle => randn(0.1).iter().enumerate().map(|(i, x)| x + direction(i)).collect(),
            Self::BigLogits | Self::Rising => {
                let mut query = randn(0.1);
                query[big_column(latent, row)] = if head.is_multiple_of(2) { 16.0 } else { -16.0 };
                query
            }
            Self::Extremes => randn(1e-3),
            Self::Huge => randn(3e-6),
        }
    }
}

/// A sawtooth of a prime period; no two rows begin at the same phase.
fn cycle(index: u64, row: usize, step: u64, prime: u64, half: f32) -> Vec<f32> {
    (0..row as u64)
        .map(|i| (((index * row as u64 + i) * step % prime) as f32 - (prime / 2) as f32) / half)
        .collect()
}

/// +-1, the same for every row.
fn direction(column: usize) -> f32 {
    if Rng(column as u64).next() & 1 == 0 { 1.0 } else { -1.0 }
}

/// Where the large element goes: past the latent if there is anything, since it then stays out of the output.
fn big_column(latent: usize, row: usize) -> usize {
    latent.min(row - 1)
}

/// One sequence of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// What its data is drawn from: the same id is the same data in any batch.
    pub id: u64,
    /// Tokens in the cache.
    pub len: u32,
    /// Query tokens.
    pub q_len: u32,
    /// Number of its first query token: sets what its data is drawn from.
    pub q_first: u32,
}

/// Sequences from `(len, q_len)`, with ids 1, 2, ...
pub fn sequences(lens: &[(u32, u32)]) -> Vec<Sequence> {
    let sequence = |(i, &(len, q_len))| Sequence { id: i as u64 + 1, len, q_len, q_first: 0 };
    lens.iter().enumerate().map(sequence).collect()
}

/// Which keys a query token sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sees {
    /// Bottom-right.
    Causal,
    /// From a diagonal of its own.
    CausalFrom(i64),
    /// Every key.
    Full,
    /// A bound a query token.
    Bounds(Vec<u32>),
}

impl Sees {
    /// The same, as the planner and the oracle take it.
    pub fn mask(&self) -> Mask<'_> {
        match self {
            Self::Causal => Mask::Causal,
            Self::CausalFrom(first) => Mask::CausalFrom(*first),
            Self::Full => Mask::Full,
            Self::Bounds(bounds) => Mask::Bounds(bounds),
        }
    }
}

/// The dims of a problem that names none: 512/64, or what `MLA_DIMS` says, for a driver that compiles slowly.
fn usual_dims() -> (u32, u32) {
    let Ok(dims) = std::env::var("MLA_DIMS") else { return (512, 64) };
    let pair = dims.split_once('/').and_then(|(l, r)| Some((l.parse().ok()?, r.parse().ok()?)));
    pair.unwrap_or_else(|| panic!("MLA_DIMS={dims} is no pair of dims like 256/32"))
}

/// A recipe for a [`Problem`].
#[derive(Debug, Clone)]
pub struct Make {
    /// `(L, R)`.
    pub dims: (u32, u32),
    /// `H`.
    pub heads: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Dtype of the cache.
    pub cache: Dtype,
    /// A layout of records instead, of the same dims.
    pub records: Option<KvLayout>,
    /// Dtype of the query.
    pub query: Dtype,
    /// Dtype of the output.
    pub out: Dtype,
    /// The batch.
    pub sequences: Vec<Sequence>,
    /// Tokens that all sequences have in common; their full pages are the same pages.
    pub prefix: u32,
    /// Which keys a query token sees.
    pub sees: Sees,
    /// What the elements are.
    pub data: Data,
    /// Draws the order of the pages.
    pub page_seed: u64,
    /// Wild entries behind the longest row of the table.
    pub spare_entries: usize,
}

impl Default for Make {
    fn default() -> Self {
        Self {
            dims: usual_dims(),
            heads: 16,
            page_size: 16,
            cache: Dtype::Bf16,
            records: None,
            query: Dtype::Bf16,
            out: Dtype::F32,
            sequences: sequences(&[(37, 1), (90, 2)]),
            prefix: 0,
            sees: Sees::Causal,
            data: Data::Painted,
            page_seed: 1,
            spare_entries: 3,
        }
    }
}

/// A decode problem: encoded inputs, and everything that says what they mean.
#[derive(Debug, Clone)]
pub struct Problem {
    /// For messages.
    pub name: String,
    /// Dims and dtypes.
    pub spec: MlaDecode,
    /// Factor of the logits.
    pub softmax_scale: f32,
    /// Factor of every cache element.
    pub k_scale: f32,
    /// Factor of every query element.
    pub q_scale: f32,
    /// `[batch]`.
    pub seq_lens: Vec<i32>,
    /// `[batch + 1]`.
    pub query_start_loc: Vec<i32>,
    /// `[batch, max_pages]`, wild past what is used.
    pub block_table: Vec<i32>,
    /// Entries in a row of `block_table`.
    pub max_pages: usize,
    /// Which keys a query token sees.
    pub sees: Sees,
    /// Groups that share a prefix; a hint that a plan may use.
    pub shared_prefixes: Vec<SharedPrefix>,
    /// `[total_q, H, L + R]`, encoded.
    pub q: Vec<u8>,
    /// `[num_pages, page_size, L + R]`, encoded; NaN where no token lives.
    pub kv: Vec<u8>,
    /// The slots that each query token attends, in place of its sequence's tokens; `None` for a dense decode.
    pub lists: Option<Lists>,
    /// `[H]`, or `None` without sinks.
    pub attn_sink: Option<Vec<f32>>,
}

impl Make {
    /// Draws the pages, encodes the data and poisons the rest.
    pub fn build(&self) -> Problem {
        let (latent, row) = (self.dims.0 as usize, (self.dims.0 + self.dims.1) as usize);
        let pages_of = |len: u32| len.div_ceil(self.page_size) as usize;
        let max_pages =
            self.sequences.iter().map(|s| pages_of(s.len)).max().unwrap_or(0) + self.spare_entries;
        let used: usize = self.sequences.iter().map(|s| pages_of(s.len)).sum();
        // Rounded, so that problems of about one size can use the same kernels.
        let num_pages = (used + 1).next_multiple_of((1024 / self.page_size as usize).clamp(16, 64));
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        Rng(self.page_seed).shuffle(&mut free);

        let (kv_amax, q_amax) = self.data.amax();
        let scale_of = |dtype, amax: f32| if dtype == Dtype::E4m3 { amax / 448.0 } else { 1.0 };
        let layout = self.records.unwrap_or(self.cache.into());
        let k_scale = if layout.is_plain() { scale_of(self.cache, kv_amax) } else { 1.0 };
        let q_scale = scale_of(self.query, q_amax);
        let encode = |dtype: Dtype, row: Vec<f32>, scale: f32| {
            dtype.encode_all(&row.iter().map(|x| x / scale).collect::<Vec<_>>())
        };

        let row_bytes = layout.token(self.dims.0, self.dims.1).bytes as usize;
        let mut kv = vec![POISON; num_pages * self.page_size as usize * row_bytes];
        let mut block_table: Vec<i32> =
            (0..self.sequences.len() * max_pages).map(|i| WILD[i % WILD.len()]).collect();
        let mut q = Vec::new();
        let mut query_start_loc = vec![0];
        let shared_pages = (self.prefix / self.page_size) as usize;
        for (index, sequence) in self.sequences.iter().enumerate() {
            for block in 0..pages_of(sequence.len) {
                let shared = index > 0 && block < shared_pages;
                block_table[index * max_pages + block] =
                    if shared { block_table[block] } else { free.pop().expect("enough pages") };
            }
            for token in 0..sequence.len {
                let source = if token < self.prefix { &self.sequences[0] } else { sequence };
                let page = block_table[index * max_pages + (token / self.page_size) as usize] as usize;
                let slot = page * self.page_size as usize + (token % self.page_size) as usize;
                let key = self.data.key(source, token.into(), latent, row);
                let stored = match layout {
                    KvLayout::Plain(dtype) => encode(dtype, key, k_scale),
                    _ => record(&key[..latent], &key[latent..]),
                };
                kv[slot * row_bytes..][..row_bytes].copy_from_slice(&stored);
            }
            for token in sequence.q_first..sequence.q_first + sequence.q_len {
                for head in 0..self.heads {
                    let query = self.data.query(sequence, token.into(), head.into(), latent, row);
                    q.extend(encode(self.query, query, q_scale));
                }
            }
            query_start_loc.push(query_start_loc[index] + sequence.q_len as i32);
        }
        let shared_prefixes = if shared_pages == 0 {
            Vec::new()
        } else {
            let sequences = (0..self.sequences.len() as u32).collect();
            vec![SharedPrefix { sequences, tokens: shared_pages as u32 * self.page_size }]
        };
        Problem {
            name: self.name(),
            spec: MlaDecode {
                shape: MlaShape {
                    num_heads: self.heads,
                    kv_lora_rank: self.dims.0,
                    qk_rope_head_dim: self.dims.1,
                },
                kv: KvSpec { layout, page_size: self.page_size, num_pages: num_pages as u32 },
                query: self.query,
                out: self.out,
            },
            softmax_scale: SOFTMAX_SCALE,
            k_scale,
            q_scale,
            seq_lens: self.sequences.iter().map(|s| s.len as i32).collect(),
            query_start_loc,
            block_table,
            max_pages,
            sees: self.sees.clone(),
            shared_prefixes,
            q,
            kv,
            lists: None,
            attn_sink: None,
        }
    }

    fn name(&self) -> String {
        let Self { dims: (l, r), heads, page_size, query, out, data, .. } = self;
        let cache = self.records.unwrap_or(self.cache.into());
        let lens: Vec<_> = self.sequences.iter().map(|s| (s.len, s.q_len)).collect();
        format!(
            "{data:?} {l}/{r} h{heads} page {page_size} kv {cache} q {query} out {out} (len, q_len) {lens:?}"
        )
    }
}

impl Problem {
    /// The problem of a case file.
    pub fn of_case(name: &str, case: &DecodeCase) -> Self {
        let case = case.clone();
        Self {
            name: name.to_owned(),
            spec: case.spec,
            softmax_scale: case.softmax_scale,
            k_scale: case.k_scale,
            q_scale: case.q_scale,
            seq_lens: case.seq_lens,
            query_start_loc: case.query_start_loc,
            block_table: case.block_table,
            max_pages: case.max_pages,
            sees: if case.causal { Sees::Causal } else { Sees::Full },
            shared_prefixes: Vec::new(),
            q: case.q,
            kv: case.kv_cache,
            lists: None,
            attn_sink: None,
        }
    }

    /// Query tokens.
    pub fn total_q(&self) -> usize {
        self.query_start_loc.last().map_or(0, |&end| end as usize)
    }

    /// The mask, as the planner and the oracle take it.
    pub fn mask(&self) -> Mask<'_> {
        self.sees.mask()
    }

    /// The oracle's `out [total_q, H, L]` and natural `lse [total_q, H]` on the encoded, so rounded, inputs.
    pub fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let shape = self.spec.shape;
        let args = Decode {
            num_heads: shape.num_heads as usize,
            kv_lora_rank: shape.kv_lora_rank as usize,
            qk_rope_head_dim: shape.qk_rope_head_dim as usize,
            page_size: self.spec.kv.page_size as usize,
            q: &self.spec.query.decode_all(&self.q),
            kv_cache: &cache_values(&self.spec.kv, &self.spec.shape, &self.kv),
            block_table: &self.block_table,
            max_pages: self.max_pages,
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            mask: self.mask(),
            softmax_scale: self.softmax_scale.into(),
            k_scale: self.k_scale.into(),
            q_scale: self.q_scale.into(),
        };
        let (mut out, lse) = match &self.lists {
            None => mla_decode(&args),
            Some(lists) => mla_decode_sparse(&args, &lists.view()),
        };
        if let Some(sinks) = &self.attn_sink {
            attn_sink(&mut out, &lse, sinks);
        }
        (out, lse)
    }

    /// `u`: the largest |latent| that a query token attends or a sequence has, at least 1.
    pub fn largest_latent(&self) -> f64 {
        let (row, latent) = (self.spec.shape.row_elems() as usize, self.spec.shape.kv_lora_rank as usize);
        let values = cache_values(&self.spec.kv, &self.spec.shape, &self.kv);
        let slots: Vec<usize> = match &self.lists {
            None => {
                (0..self.seq_lens.len()).flat_map(|seq| self.slots(seq)).map(|slot| slot as usize).collect()
            }
            Some(lists) => lists.named(self.spec.kv.num_slots() as usize).collect(),
        };
        let latents = slots.iter().flat_map(|slot| &values[slot * row..][..latent]);
        latents.fold(1.0, |largest, &x| f64::max(largest, (f64::from(x) * f64::from(self.k_scale)).abs()))
    }

    /// The slots of a sequence's tokens, in their order.
    pub fn slots(&self, seq: usize) -> Vec<i32> {
        let page_size = self.spec.kv.page_size as usize;
        let page = |token: usize| self.block_table[seq * self.max_pages + token / page_size];
        let slot = |token: usize| page(token) * page_size as i32 + (token % page_size) as i32;
        (0..self.seq_lens[seq] as usize).map(slot).collect()
    }
}
