//! A painted decode problem, and its check against the oracle.

use wgpu_mla::reference::{self, Decode};
use wgpu_mla::{
    Backend, Batch, Capacity, Dtype, KvSpec, KvView, Layer, MlaShape, MlaSpec, PageTable, Plan, Policy,
    Visibility,
};

use super::Result;
use crate::close::{Tolerance, close};

#[derive(Debug, Clone, Copy)]
pub struct Workload {
    pub heads: u32,
    pub batch: u32,
    pub context: u32,
    pub q_len: u32,
    pub kv: Dtype,
    pub query: Dtype,
}

/// Elements after which the paint repeats: a prime, so that no two rows or pages are alike.
const CYCLE: usize = 1_000_003;
const PAGE_SIZE: u32 = 64;
pub const SOFTMAX_SCALE: f32 = 0.114_721;

impl Workload {
    pub fn spec(&self) -> MlaSpec {
        let pages = self.context.div_ceil(PAGE_SIZE);
        MlaSpec {
            shape: MlaShape { num_heads: self.heads, kv_lora_rank: 512, qk_rope_head_dim: 64 },
            kv: KvSpec { dtype: self.kv, page_size: PAGE_SIZE, num_pages: pages * self.batch },
            query: self.query,
            out: if self.query == Dtype::F32 { Dtype::F32 } else { self.query },
        }
    }

    pub fn name(&self) -> String {
        let Self { heads, batch, context, q_len, kv, query } = self;
        let mtp = if *q_len == 1 { String::new() } else { format!(" q_len {q_len}") };
        format!("H{heads} b{batch}x{context} kv {kv} q {query}{mtp}")
    }

    pub fn kv_bytes(&self) -> f64 {
        f64::from(self.batch) * f64::from(self.context) * 576.0 * self.kv.bytes() as f64
    }

    pub fn flop(&self) -> f64 {
        2.0 * f64::from(self.batch * self.q_len * self.heads) * f64::from(self.context) * (576.0 + 512.0)
    }

    /// Pages in an order in which no neighbours stay neighbours: multiples of a prime.
    pub fn block_table(&self) -> Vec<i32> {
        let pages = u64::from(self.spec().kv.num_pages);
        let stride = if pages.is_multiple_of(7919) { 1 } else { 7919 };
        (0..pages).map(|i| ((i * stride + 13) % pages) as i32).collect()
    }
}

/// Values of about normal / 10, the same at the same place.
fn paint() -> Vec<f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..CYCLE).map(|_| (uniform() + uniform() + uniform() + uniform() - 2.0) * 0.173).collect()
}

/// A workload's buffers on a backend, with `copies` caches, and what the first of them must give.
pub struct Problem<B: Backend> {
    pub spec: MlaSpec,
    pub decode: B::Decode,
    pub step: B::Step,
    pub bindings: Vec<B::Binding>,
    pub plan: Plan,
    pub out: B::Buffer,
    pub lse: B::Buffer,
    workload: Workload,
    kv_paint: Vec<f32>,
    q: Vec<f32>,
    _buffers: Vec<B::Buffer>,
}

impl<B: Backend> Problem<B> {
    pub fn new(
        backend: &B,
        workload: &Workload,
        variant: Option<&str>,
        items: Option<u32>,
        copies: u32,
    ) -> Result<Self> {
        let spec = workload.spec();
        let total_q = workload.batch * workload.q_len;
        let row = spec.shape.row_elems() as usize;
        let paint = paint();
        let kv_code = spec.kv.dtype.encode_all(&paint);
        let q_len = (total_q * workload.heads) as usize * row;
        let q: Vec<f32> = (0..q_len).map(|i| paint[(i * 5 + 77) % CYCLE]).collect();
        let q_code = spec.query.encode_all(&q);
        let q = spec.query.decode_all(&q_code);

        let layer_elems = spec.kv.num_slots() * row as u64;
        let kv = backend.buffer(layer_elems * u64::from(copies) * spec.kv.dtype.bytes() as u64)?;
        upload_cycle(backend, &kv, &kv_code, layer_elems as usize * copies as usize * spec.kv.dtype.bytes())?;
        let q_buffer = backend.buffer(q_code.len() as u64)?;
        backend.upload(&q_buffer, 0, &q_code)?;
        let rows = u64::from(total_q * workload.heads);
        let out = backend.buffer(rows * u64::from(spec.shape.kv_lora_rank) * spec.out.bytes() as u64)?;
        let lse = backend.buffer(rows * 4)?;

        let decode = backend.decode(&spec, variant)?;
        let mut bindings = Vec::new();
        for layer in 0..copies {
            let dense = Layer::dense(&spec, &q_buffer, &kv, &out, &lse, SOFTMAX_SCALE);
            let kv = KvView { layer_stride: layer_elems, layer, ..dense.kv };
            bindings.push(backend.bind(&decode, total_q, &Layer { kv, ..dense })?);
        }
        let seq_lens = vec![workload.context as i32; workload.batch as usize];
        let starts: Vec<i32> = (0..=workload.batch).map(|i| (i * workload.q_len) as i32).collect();
        let mut tiling = backend.tiling(&decode);
        tiling.target_items = items.unwrap_or(tiling.target_items);
        let plan = Plan::new(&spec, &tiling, &Batch::new(&seq_lens, &starts), Policy::Auto)?;
        let mut step = backend.step(&decode, Capacity::of(&plan))?;
        let table = workload.block_table();
        let max_pages = table.len() / workload.batch as usize;
        backend.prepare(&decode, &mut step, &plan, PageTable::Dense { block_table: &table, max_pages })?;
        let kv_paint = spec.kv.dtype.decode_all(&kv_code);
        let workload = *workload;
        Ok(Self {
            spec,
            decode,
            step,
            bindings,
            plan,
            out,
            lse,
            workload,
            kv_paint,
            q,
            _buffers: vec![kv, q_buffer],
        })
    }

    /// Compares the last sequence of the first cache with the oracle, over its first heads.
    pub fn check(&self, backend: &B) -> Result<String> {
        backend.run(&self.decode, &self.step, &self.bindings[0])?;
        let (w, shape) = (&self.workload, &self.spec.shape);
        let (row, latent) = (shape.row_elems() as usize, shape.kv_lora_rank as usize);
        let heads = (w.heads as usize).min(if w.context > 16_384 { 2 } else { 16 });
        let table = w.block_table();
        let max_pages = table.len() / w.batch as usize;
        let seq = w.batch as usize - 1;
        let page = PAGE_SIZE as usize * row;
        let cache: Vec<f32> = table[seq * max_pages..]
            .iter()
            .flat_map(|&id| (0..page).map(move |i| (id as usize * page + i) % CYCLE))
            .map(|i| self.kv_paint[i])
            .collect();
        let first = seq * w.q_len as usize;
        let q: Vec<f32> = (first..first + w.q_len as usize)
            .flat_map(|token| &self.q[token * w.heads as usize * row..][..heads * row])
            .copied()
            .collect();
        let (want_out, want_lse) = reference::mla_decode(&Decode {
            num_heads: heads,
            kv_lora_rank: latent,
            qk_rope_head_dim: row - latent,
            page_size: PAGE_SIZE as usize,
            q: &q,
            kv_cache: &cache,
            block_table: &(0..max_pages as i32).collect::<Vec<_>>(),
            max_pages,
            seq_lens: &[w.context as i32],
            query_start_loc: &[0, w.q_len as i32],
            visibility: Visibility::Causal,
            softmax_scale: SOFTMAX_SCALE.into(),
            k_scale: 1.0,
            q_scale: 1.0,
        });
        let rows = (w.batch * w.q_len * w.heads) as usize;
        let out = backend.download(&self.out, (rows * latent * self.spec.out.bytes()) as u64)?;
        let lse = backend.download(&self.lse, rows as u64 * 4)?;
        let (out, lse) = (self.spec.out.decode_all(&out), Dtype::F32.decode_all(&lse));
        let pick = |values: &[f32], width: usize| -> Vec<f32> {
            (first..first + w.q_len as usize)
                .flat_map(|token| &values[token * w.heads as usize * width..][..heads * width])
                .copied()
                .collect()
        };
        let tolerance = Tolerance::decode(w.kv, w.query, self.spec.out, false, 1.0, latent);
        let report = close("out", &pick(&out, latent), &want_out, &tolerance).into_result()?;
        close("lse", &pick(&lse, 1), &want_lse, &Tolerance::lse()).into_result()?;
        Ok(report.to_string())
    }
}

fn upload_cycle<B: Backend>(backend: &B, buffer: &B::Buffer, cycle: &[u8], bytes: usize) -> Result<()> {
    const CHUNK: usize = 32 << 20;
    let mut chunk = Vec::with_capacity(CHUNK + cycle.len());
    for begin in (0..bytes).step_by(CHUNK) {
        let length = CHUNK.min(bytes - begin);
        chunk.clear();
        chunk.extend_from_slice(&cycle[begin % cycle.len()..]);
        while chunk.len() < length {
            chunk.extend_from_slice(cycle);
        }
        backend.upload(buffer, begin as u64, &chunk[..length])?;
    }
    Ok(())
}
