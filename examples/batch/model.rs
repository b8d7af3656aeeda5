//! A stand-in for a model: dims, and activations that are a function of the token, so that the oracle can compute them again.

use wgpu_mla::{Dtype, KvAppend, KvSpec, MlaDecode, MlaShape, softmax_scale};

/// Two layers of a small MLA model.
pub struct Model {
    pub spec: MlaDecode,
    pub layers: usize,
    pub softmax_scale: f32,
    /// Query tokens of a step.
    pub max_tokens: u32,
    /// Values near normal / 10, walked by a hash.
    paint: Vec<f32>,
}

/// A token's id, which decides its key in every layer.
pub type Token = u64;

/// One layer's arrays of a step, as a model's projections would leave them.
#[derive(Debug, Clone, Default)]
pub struct StepData {
    /// `[tokens, H, L + R]`.
    pub q: Vec<u8>,
    /// `[tokens, L]`.
    pub kv_c: Vec<u8>,
    /// `[tokens, R]`.
    pub k_pe: Vec<u8>,
}

/// A prime: rows begin anywhere in it, so no two tokens are alike.
const PAINT: usize = 65_521;

impl Model {
    pub fn small() -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15;
        let paint = (0..PAINT).map(|_| (0..4).map(|_| uniform(&mut state) - 0.5).sum::<f32>() * 0.173);
        Self {
            spec: MlaDecode {
                shape: MlaShape { num_heads: 16, kv_lora_rank: 512, qk_rope_head_dim: 64 },
                kv: KvSpec { layout: Dtype::Bf16.into(), page_size: 16, num_pages: 128 },
                query: Dtype::Bf16,
                out: Dtype::F32,
            },
            layers: 2,
            softmax_scale: softmax_scale(128, 64, 40.0, 1.0).expect("a model's"),
            max_tokens: 64,
            paint: paint.collect(),
        }
    }

    pub fn describe(&self) -> String {
        let (shape, kv) = (self.spec.shape, self.spec.kv);
        let (heads, latent, rope) = (shape.num_heads, shape.kv_lora_rank, shape.qk_rope_head_dim);
        let (pages, size, dtype) = (kv.num_pages, kv.page_size, kv.dtype());
        format!(
            "{} layers, {heads} heads of {latent}+{rope}, {dtype}, {pages} pages of {size} tokens",
            self.layers
        )
    }

    /// The append of new tokens.
    pub fn append_spec(&self) -> KvAppend {
        KvAppend { shape: self.spec.shape, kv: self.spec.kv, input: self.spec.query, guard: false }
    }

    /// Bytes from one layer's cache to the next.
    pub fn layer_stride(&self) -> u64 {
        self.spec.cache_bytes()
    }

    /// Queries and new rows of a step's tokens, for every layer.
    pub fn fill(&self, tokens: &[Token], layers: &mut [StepData]) {
        let latent = self.spec.shape.kv_lora_rank as usize;
        for (layer, data) in layers.iter_mut().enumerate() {
            *data = StepData::default();
            for &token in tokens {
                let row = self.key(token, layer);
                data.kv_c.extend(self.spec.query.encode_all(&row[..latent]));
                data.k_pe.extend(self.spec.query.encode_all(&row[latent..]));
                data.q.extend(self.spec.query.encode_all(&self.query(token, layer)));
            }
        }
    }

    /// A token's latent and rotary part, `[L + R]`.
    pub fn key(&self, token: Token, layer: usize) -> Vec<f32> {
        self.values(hash(token, layer as u64 * 2), self.spec.shape.row_elems() as usize)
    }

    /// A token's queries, `[H, L + R]`, large enough for weights that differ.
    pub fn query(&self, token: Token, layer: usize) -> Vec<f32> {
        let elems = self.spec.shape.row_elems() * self.spec.shape.num_heads;
        let values = self.values(hash(token, layer as u64 * 2 + 1), elems as usize);
        values.into_iter().map(|x| x * 8.0).collect()
    }

    fn values(&self, from: u64, count: usize) -> Vec<f32> {
        let (start, step) = (from as usize % PAINT, 1 + (from >> 32) as usize % 1000);
        (0..count).map(|i| self.paint[(start + i * step) % PAINT]).collect()
    }
}

/// A hash of two numbers.
pub fn hash(a: u64, b: u64) -> u64 {
    let mut x =
        (a ^ b.rotate_left(32)).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 31;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 29
}

/// The next random number in 0..1.
pub fn uniform(state: &mut u64) -> f32 {
    *state = hash(*state, 7);
    (*state >> 40) as f32 / (1u64 << 24) as f32
}
