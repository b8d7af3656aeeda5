//! A workload's buffers on a device, and their check against the oracle.

use mla_support::reference::{self, Decode};
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Device, Dtype, KvView, Mask, MlaDecode, MlaDecodeArgs, PageTable, Plan,
    SplitPolicy,
};

use super::workload::{PAGE_SIZE, Workload};
use crate::support::Result;
use crate::support::device::{Layers, Timed};
use crate::support::paint::{CYCLE, Canvas, Paint};
use mla_support::close::{Tolerance, close};

pub const SOFTMAX_SCALE: f32 = 0.114_721;

/// Painted memory that holds the caches of many layers.
pub struct Pool<B> {
    pub buffer: B,
    pub paint: Paint,
}

impl<B> Pool<B> {
    pub fn new<D: Canvas<Buffer = B>>(device: &D, dtype: Dtype, elems: u64) -> Result<Self> {
        let paint = Paint::new(dtype);
        let buffer = device.painted(&paint, elems)?;
        Ok(Self { buffer, paint })
    }
}

/// A workload with as many layers as the pool holds, each with a cache of its own.
pub struct Problem<'a, D: Timed> {
    pub spec: MlaDecode,
    pub layers: Layers<MlaDecode, D>,
    pub plan: Plan,
    workload: Workload,
    pool: &'a Pool<D::Buffer>,
    out: D::Buffer,
    lse: D::Buffer,
    q: Vec<f32>,
}

impl<'a, D: Timed> Problem<'a, D> {
    pub fn new(
        device: &D,
        pool: &'a Pool<D::Buffer>,
        workload: &Workload,
        variant: Option<&str>,
        items: Option<u32>,
        copies: u32,
    ) -> Result<Self> {
        let spec = workload.spec();
        let lens = workload.seq_lens();
        let total_q = lens.len() as u32 * workload.q_len;
        let rows = u64::from(total_q * workload.heads);
        let (q, q_buffer) = query(device, &spec, rows)?;
        let out = device.buffer(rows * u64::from(spec.shape.kv_lora_rank) * spec.out.bytes() as u64)?;
        let lse = device.buffer(rows * 4)?;

        let variant = variant.map(Into::into);
        let options = DecodeOptions {
            variant,
            query_tokens: workload.q_len,
            shared_sequences: workload
                .shared_prefixes()
                .iter()
                .map(|group| group.sequences.len() as u32)
                .sum(),
            ..Default::default()
        };
        let decode = device.compile_with(spec, &options)?;
        let layer_stride = spec.cache_bytes();
        let layers = (0..copies).map(|layer| {
            let dense = MlaDecodeArgs::dense(&spec, &q_buffer, &pool.buffer, &out, &lse, SOFTMAX_SCALE);
            let kv = KvView { layer_stride, layer, ..dense.kv };
            MlaDecodeArgs { kv, ..dense }
        });

        let starts: Vec<i32> = (0..=lens.len() as u32).map(|i| (i * workload.q_len) as i32).collect();
        let mut tiling = decode.tiling();
        tiling.target_items = items.unwrap_or(tiling.target_items);
        let shared = workload.shared_prefixes();
        let batch = Batch { shared_prefixes: &shared, ..Batch::new(&lens, &starts) };
        let plan = Plan::new(&spec, &tiling, &batch, SplitPolicy::Auto)?;
        let (table, max_pages) = workload.block_table();
        let pages = PageTable::Dense { block_table: &table, max_pages: max_pages as u32 };
        let layers = Layers::new(decode, Capacity::of(&plan), (&plan, pages), layers)?;
        let workload = workload.clone();
        Ok(Self { spec, layers, plan, workload, pool, out, lse, q })
    }

    /// Compares the last sequence of the first cache with the oracle, over some heads, the outermost among them.
    pub fn check(&self, device: &D) -> Result<String> {
        self.layers.run_first()?;
        let (w, latent) = (&self.workload, self.spec.shape.kv_lora_rank as usize);
        let (heads, row_elems) = (w.heads as usize, self.spec.shape.row_elems() as usize);
        let lens = w.seq_lens();
        let seq = lens.len() - 1;
        let picked = picked_heads(heads, lens[seq] as usize);
        let cache = self.cache_of(seq);
        let tokens = seq * w.q_len as usize..lens.len() * w.q_len as usize;
        let pick = |values: &[f32], width: usize| -> Vec<f32> {
            let rows = tokens.clone().flat_map(|token| picked.iter().map(move |head| token * heads + head));
            rows.flat_map(|row| &values[row * width..][..width]).copied().collect()
        };
        let q = pick(&self.q, row_elems);
        let num_pages = (cache.len() / row_elems / PAGE_SIZE as usize) as i32;
        let (want_out, want_lse) = reference::mla_decode(&Decode {
            num_heads: picked.len(),
            kv_lora_rank: latent,
            qk_rope_head_dim: row_elems - latent,
            page_size: PAGE_SIZE as usize,
            q: &q,
            kv_cache: &cache,
            block_table: &(0..num_pages).collect::<Vec<_>>(),
            max_pages: num_pages as usize,
            seq_lens: &[lens[seq]],
            query_start_loc: &[0, w.q_len as i32],
            mask: Mask::Causal,
            softmax_scale: SOFTMAX_SCALE.into(),
            k_scale: 1.0,
            q_scale: 1.0,
        });
        let rows = lens.len() * w.q_len as usize * heads;
        let out = device.download(&self.out, (rows * latent * self.spec.out.bytes()) as u64)?;
        let lse = device.download(&self.lse, rows as u64 * 4)?;
        let (out, lse) = (self.spec.out.decode_all(&out), Dtype::F32.decode_all(&lse));
        let tolerance =
            Tolerance::decode(w.kv, w.query, self.spec.out, self.layers.op.rounds_weights(), 1.0, latent);
        let report = close("out", &pick(&out, latent), &want_out, &tolerance).into_result()?;
        close("lse", &pick(&lse, 1), &want_lse, &Tolerance::lse()).into_result()?;
        Ok(format!("{:.1e} ({:.1} %)", report.worst_abs, 100.0 * report.worst_ratio))
    }

    /// The cache of a sequence in the first layer, its pages in order.
    fn cache_of(&self, seq: usize) -> Vec<f32> {
        let (table, max_pages) = self.workload.block_table();
        let page = u64::from(PAGE_SIZE * self.spec.shape.row_elems());
        let used = table[seq * max_pages..][..max_pages].iter().filter(|&&id| id >= 0);
        used.flat_map(|&id| (0..page).map(move |i| self.pool.paint.at(id as u64 * page + i))).collect()
    }
}

/// The oracle takes a moment for each head and token.
pub fn picked_heads(heads: usize, context: usize) -> Vec<usize> {
    let wanted = if context > 16_384 { 2 } else { 4 };
    if heads <= wanted {
        return (0..heads).collect();
    }
    (0..wanted).map(|i| i * (heads - 1) / (wanted - 1)).collect()
}

/// Query values as the device has them, and their buffer.
fn query<D: Device>(device: &D, spec: &MlaDecode, rows: u64) -> Result<(Vec<f32>, D::Buffer)> {
    let paint = Paint::query(spec.query);
    let count = rows * u64::from(spec.shape.row_elems());
    let at = |i: u64| ((i * 5 + 77) % CYCLE as u64) as usize;
    let size = spec.query.bytes();
    let codes: Vec<u8> = (0..count).flat_map(|i| &paint.codes[at(i) * size..][..size]).copied().collect();
    let buffer = device.buffer(codes.len() as u64)?;
    device.upload(&buffer, 0, &codes)?;
    Ok(((0..count).map(|i| paint.values[at(i)]).collect(), buffer))
}
