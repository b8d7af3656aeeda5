//! A sparse workload's buffers on a device, and their check against the oracle.

use mla_support::close::{Tolerance, close};
use mla_support::reference::{Decode, Lists, cache_values, mla_decode_sparse, record};
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Dtype, Indices, KvLayout, KvSpec, Mask, MlaDecode, MlaDecodeArgs,
    PageTable, Plan, SparseBatch, SplitPolicy, View,
};

use super::workload::{Attends, PAGE_SIZE, Workload};
use crate::decode::problem::{SOFTMAX_SCALE, picked_heads};
use crate::support::device::{Layers, Timed};
use crate::support::paint::Paint;
use crate::support::{Draws, Result};

/// Tokens after which the pool repeats: a prime, so that pages differ.
const CYCLE_TOKENS: usize = 4099;
/// Bytes of listed tokens after which lists are used again: more than any card's L2.
const ROTATED_BYTES: f64 = 300e6;

/// A workload. Its pool is one; each layer has lists of its own.
pub struct Problem<D: Timed> {
    pub layers: Layers<MlaDecode, D>,
    pub plan: Plan,
    workload: Workload,
    /// A cycle of the pool's tokens.
    tokens: Vec<u8>,
    /// The last query token's slots in the first layer.
    last: Vec<i32>,
    query: Paint,
    out: D::Buffer,
    lse: D::Buffer,
}

impl<D: Timed> Problem<D> {
    pub fn new(device: &D, w: &Workload, variant: Option<&str>, items: Option<u32>) -> Result<Self> {
        let (spec, tokens) = (w.spec(), w.tokens());
        let topk = if let Attends::Listed(topk) = w.attends { topk } else { 0 };
        let options = DecodeOptions {
            variant: variant.map(Into::into),
            // A tile of a list has one query token's heads.
            query_tokens: if topk > 0 { 1 } else { w.q_len },
            topk,
            ..Default::default()
        };
        let decode = device.compile_with(spec, &options)?;

        let cycle = tokens_of(w);
        let pool = Paint { dtype: Dtype::E4m3, codes: cycle, values: Vec::new() };
        let kv = device.painted(&pool, spec.cache_bytes())?;
        let query = Paint::query(spec.query);
        let rows = u64::from(tokens * w.heads);
        let q = device.painted(&query, rows * u64::from(spec.shape.row_elems()))?;
        let (out, lse) = (device.buffer(spec.out_bytes(tokens))?, device.buffer(spec.lse_bytes(tokens))?);

        let mut tiling = decode.tiling();
        tiling.target_items = items.unwrap_or(tiling.target_items);
        let copies = match w.attends {
            _ if device.is_software() => 1,
            Attends::Listed(_) => (ROTATED_BYTES / w.kv_bytes()).ceil().clamp(1.0, 128.0) as u32,
            Attends::Sequence(_) => 1,
        };
        let lists = slots(w, copies);
        let per_layer = lists.len() / copies as usize;
        let last = lists[per_layer - per_layer / tokens as usize..per_layer].to_vec();
        let words: Vec<u8> = lists.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        let listed = device.buffer(words.len() as u64)?;
        device.upload(&listed, 0, &words)?;
        let layers = (0..copies).map(|layer| {
            let slots =
                View { offset: u64::from(layer) * per_layer as u64, ..Indices::dense(&listed, topk).slots };
            let indices = (topk > 0).then_some(Indices { slots, topk_length: None });
            MlaDecodeArgs { indices, ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, SOFTMAX_SCALE) }
        });
        let (plan, layers) = match w.attends {
            Attends::Listed(topk) => {
                let plan = Plan::sparse(&spec, &tiling, &SparseBatch::new(tokens, topk), SplitPolicy::Auto)?;
                let layers = Layers::new(decode, Capacity::of(&plan), (&plan, PageTable::Indices), layers)?;
                (plan, layers)
            }
            Attends::Sequence(len) => {
                let lens = vec![len as i32; w.sequences as usize];
                let starts: Vec<i32> = (0..=w.sequences).map(|i| (i * w.q_len) as i32).collect();
                let plan = Plan::new(&spec, &tiling, &Batch::new(&lens, &starts), SplitPolicy::Auto)?;
                let (table, max_pages) = block_table(w, len);
                let pages = PageTable::Dense { block_table: &table, max_pages };
                let layers = Layers::new(decode, Capacity::of(&plan), (&plan, pages), layers)?;
                (plan, layers)
            }
        };
        let (workload, tokens) = (*w, pool.codes);
        Ok(Self { layers, plan, workload, tokens, last, query, out, lse })
    }

    /// Compares the last query token of the first layer with the oracle, over some heads, the outermost among them.
    pub fn check(&self, device: &D) -> Result<String> {
        self.layers.run_first()?;
        let (w, spec) = (&self.workload, self.workload.spec());
        let (heads, latent, row) =
            (w.heads as usize, spec.shape.kv_lora_rank as usize, spec.shape.row_elems() as usize);
        let picked = picked_heads(heads, self.last.len());
        let first_row = (w.tokens() as usize - 1) * heads;
        let q: Vec<f32> = picked
            .iter()
            .flat_map(|head| (0..row).map(move |i| ((first_row + head) * row + i) as u64))
            .map(|element| self.query.at(element))
            .collect();
        let size = self.tokens.len() / CYCLE_TOKENS;
        let attended: Vec<u8> = self
            .last
            .iter()
            .flat_map(|&slot| &self.tokens[slot as usize % CYCLE_TOKENS * size..][..size])
            .copied()
            .collect();
        let cache = cache_values(&spec.kv, &spec.shape, &attended);
        // The attended tokens are a pool of their own.
        let list: Vec<i32> = (0..self.last.len() as i32).collect();
        let args = Decode {
            num_heads: picked.len(),
            kv_lora_rank: latent,
            qk_rope_head_dim: row - latent,
            page_size: 1,
            q: &q,
            kv_cache: &cache,
            block_table: &[],
            max_pages: 0,
            seq_lens: &[],
            query_start_loc: &[0],
            mask: Mask::Full,
            softmax_scale: SOFTMAX_SCALE.into(),
            k_scale: 1.0,
            q_scale: 1.0,
        };
        let lists = Lists { slots: &list, topk: list.len(), topk_length: None };
        let (want_out, want_lse) = mla_decode_sparse(&args, &lists);

        let all_rows = w.tokens() as usize * heads;
        let out = device.download(&self.out, (all_rows * latent * spec.out.bytes()) as u64)?;
        let lse = device.download(&self.lse, all_rows as u64 * 4)?;
        let pick = |dtype: Dtype, bytes: &[u8], width: usize| -> Vec<f32> {
            let row = width * dtype.bytes();
            picked
                .iter()
                .flat_map(|head| dtype.decode_all(&bytes[(first_row + head) * row..][..row]))
                .collect()
        };
        let rounds = self.layers.op.rounds_weights();
        let tolerance = Tolerance::decode(w.layout.dtype(), spec.query, spec.out, rounds, 1.0, latent);
        let report = close("out", &pick(spec.out, &out, latent), &want_out, &tolerance).into_result()?;
        close("lse", &pick(Dtype::F32, &lse, 1), &want_lse, &Tolerance::lse()).into_result()?;
        Ok(format!("{:.1e} ({:.1} %)", report.worst_abs, 100.0 * report.worst_ratio))
    }
}

/// A cycle of encoded tokens, of the values that other tables have.
fn tokens_of(w: &Workload) -> Vec<u8> {
    let values = Paint::new(Dtype::F32).values;
    let (latent, rope) = (w.dims().0 as usize, w.dims().1 as usize);
    let keys = values.chunks_exact(latent + rope).cycle().take(CYCLE_TOKENS);
    let mut draws = Draws(0x51);
    keys.flat_map(|key| match w.layout {
        KvLayout::Plain(dtype) => dtype.encode_all(key),
        _ => {
            let mut token = record(&key[..latent], &key[latent..]);
            for scale in token[512..528].chunks_mut(4).filter(|_| w.any_scales) {
                let other = Dtype::F32.decode_at(scale, 0) * (0.75 + 0.5 * draws.next());
                scale.copy_from_slice(&other.to_le_bytes());
            }
            token
        }
    })
    .collect()
}

/// Lists `[copies, tokens, topk]`, each of different slots of the whole pool; of sequences the last one's slots, once.
fn slots(w: &Workload, copies: u32) -> Vec<i32> {
    match w.attends {
        Attends::Sequence(len) => {
            let (table, max_pages) = block_table(w, len);
            let last = &table[(w.sequences as usize - 1) * max_pages as usize..];
            let slot = |token: u32| last[(token / PAGE_SIZE) as usize] as u32 * PAGE_SIZE + token % PAGE_SIZE;
            let list: Vec<i32> = (0..len).map(|token| slot(token) as i32).collect();
            list.repeat(w.tokens() as usize)
        }
        Attends::Listed(topk) => {
            let mut draws = Draws(1_770_005_310);
            let mut list = move || {
                // An affine walk over the pool, whose size is no multiple of the prime: no slot twice, and no two neighbours.
                let (begin, step) = (draws.next(), draws.next());
                let pool = u64::from(w.pool_tokens);
                let begin = (f64::from(begin) * pool as f64) as u64;
                let step = 7919 * (1 + 2 * (f64::from(step) * 64.0) as u64);
                (0..u64::from(topk)).map(move |i| ((begin + i * step) % pool) as i32)
            };
            (0..copies * w.tokens()).flat_map(|_| list()).collect()
        }
    }
}

/// Pages of sequences of `len` tokens, consecutive ones not adjacent in memory.
fn block_table(w: &Workload, len: u32) -> (Vec<i32>, u32) {
    let (KvSpec { num_pages, .. }, max_pages) = (w.spec().kv, len.div_ceil(PAGE_SIZE));
    let page = |index: u32| (u64::from(index) * 7919 % u64::from(num_pages)) as i32;
    ((0..w.sequences * max_pages).map(page).collect(), max_pages)
}
