//! A model of sparse attention for tests: one layer with an indexer, and others that share its list. Each step is compared with the single
//! ops, byte for byte, and with the f64 oracle over the list that was made.

use crate::close::{Tolerance, close};
use crate::paint::Rng;
use crate::reference::{LayerSequence, mla_layer};
use wgpu_mla::{
    Backend, Binding, Capacity, Compiled, Dtype, Error, IndexFormat, IndexSpec, KvCopyPages, LayerArrays,
    LayerCapacity, LayerIndexer, LayerOptions, MlaLayer, MlaLayerArgs, PagePool, Result, Selection, SeqId,
    SplitPolicy, Step,
};

use super::layer_rig::{draw, rotated, tolerance, uploaded};
use super::selecting_arrays::{IndexBuffers, LIST_BYTES, LayerBuffers, Single, list};

/// Layers of the model, of which the first makes the list.
pub const LAYERS: usize = 4;
pub const TOPK: u32 = 16;
pub const MAX_POSITION: u32 = 128;
pub const MAX_TOKENS: u32 = 64;
pub const INDEX_HEADS: u32 = 4;
pub const INDEX_DIM: u32 = 128;
/// Scores take so many rows, fewer than prompts have tokens.
const ROUND: u32 = 11;
/// Elements from a list to the next: more than a list has.
pub const LIST_STRIDE: u64 = TOPK as u64 + 4;

pub const ROOM: LayerCapacity = LayerCapacity {
    tokens: MAX_TOKENS,
    decode_tokens: MAX_TOKENS,
    prefix_rows: 0,
    positions: 0,
    listed_tokens: 0,
};

/// How a test runs the layers of a step.
pub trait RunsLayers<B: Backend> {
    fn run(
        &mut self,
        layer: &Compiled<MlaLayer, B>,
        step: &Step<MlaLayer, B>,
        layers: &[Binding<MlaLayer, B>],
    ) -> Result<()>;
}

/// All in one submit.
pub struct OneSubmit;

impl<B: Backend> RunsLayers<B> for OneSubmit {
    fn run(
        &mut self,
        layer: &Compiled<MlaLayer, B>,
        step: &Step<MlaLayer, B>,
        layers: &[Binding<MlaLayer, B>],
    ) -> Result<()> {
        layer.device().submit(|mut recorder| {
            layers.iter().try_for_each(|binding| layer.record_on(&mut recorder, step, binding))
        })
    }
}

/// What a model is made of.
#[derive(Debug, Clone, Copy)]
pub struct Sparse {
    pub layer: MlaLayer,
    pub format: IndexFormat,
    pub slab_pages: u32,
    pub policy: SplitPolicy,
}

impl Sparse {
    pub fn indexer(&self) -> LayerIndexer {
        LayerIndexer {
            format: self.format,
            num_heads: INDEX_HEADS,
            input: self.layer.dtype,
            max_seq_len: MAX_POSITION,
            logits_bytes: u64::from(ROUND * MAX_POSITION) * 4,
        }
    }

    pub fn options(&self) -> LayerOptions {
        LayerOptions {
            capacity: ROOM,
            slab_pages: self.slab_pages,
            topk: TOPK,
            indexer: Some(self.indexer()),
            ..LayerOptions::default()
        }
    }

    pub fn index(&self) -> IndexSpec {
        self.indexer().index(&self.layer)
    }
}

pub struct Selecting<B: Backend, R: RunsLayers<B>> {
    sparse: Sparse,
    pub layer: Compiled<MlaLayer, B>,
    pub step: Step<MlaLayer, B>,
    pub layers: Vec<Binding<MlaLayer, B>>,
    /// The same layers where nothing is chosen, and their step.
    dense: Compiled<MlaLayer, B>,
    dense_step: Step<MlaLayer, B>,
    dense_layers: Vec<Binding<MlaLayer, B>>,
    single: Single<B>,
    buffers: Vec<LayerBuffers<B>>,
    index: IndexBuffers<B>,
    pub runs: R,
    pub pool: PagePool,
    rng: Rng,
    weight: Vec<f64>,
    cos_sin: Vec<f32>,
    k_scale: f32,
    softmax_scale: f32,
    /// The outputs of all layers and steps so far, and what the oracle says of them: one case.
    case: (Vec<f32>, Vec<f64>),
}

/// Cosines and sines of all positions.
pub fn table(rope: u32) -> Vec<f32> {
    let half = rope / 2;
    let angle =
        |position: u32, i: u32| f64::from(position) * 10_000f64.powf(-2.0 * f64::from(i) / f64::from(rope));
    let row = |position| {
        let cos = (0..half).map(move |i| angle(position, i).cos() as f32);
        cos.chain((0..half).map(move |i| angle(position, i).sin() as f32))
    };
    (0..MAX_POSITION).flat_map(row).collect()
}

impl<B: Backend, R: RunsLayers<B>> Selecting<B, R> {
    pub fn new(backend: &B, sparse: Sparse, decodes: Capacity, runs: R, seed: u64) -> Result<Self> {
        let spec = sparse.layer;
        let mut rng = Rng(seed);
        let (heads, rope) = (spec.shape.num_heads, spec.shape.qk_rope_head_dim);
        let rows = heads * (spec.qk_nope_head_dim + spec.v_head_dim);
        let latent = spec.shape.kv_lora_rank;
        let (weight, bytes) =
            draw(&mut rng, spec.weight, (rows * latent) as usize, (latent as f32).sqrt().recip());
        let weight_buffer = uploaded(backend, &bytes)?;
        let cos_sin = table(rope);
        let cos_sin_buffer = uploaded(backend, &Dtype::F32.encode_all(&cos_sin))?;
        let buffers = (0..LAYERS).map(|_| LayerBuffers::new(backend, &sparse)).collect::<Result<Vec<_>>>()?;
        let index = IndexBuffers::new(backend, &sparse, &mut rng)?;
        let layer = backend.compile_with(spec, &sparse.options())?;
        let dense = LayerOptions { topk: 0, indexer: None, ..sparse.options() };
        let dense = backend.compile_with(spec, &dense)?;
        let k_scale = if spec.kv.layout == Dtype::E4m3.into() { 1.0 / 128.0 } else { 1.0 };
        let softmax_scale = wgpu_mla::softmax_scale(spec.qk_nope_head_dim, rope, 1.0, 1.0)?;
        let (mut layers, mut dense_layers) = (Vec::new(), Vec::new());
        for (i, buffers) in buffers.iter().enumerate() {
            let args = MlaLayerArgs {
                k_scale,
                softmax_scale,
                ..buffers.args(&sparse, &weight_buffer, &cos_sin_buffer)?
            };
            let selection = if i == 0 {
                Selection::Own(index.own(&sparse)?)
            } else {
                Selection::Shared(list(&index.list))
            };
            dense_layers.push(dense.bind(&args, ROOM)?);
            layers.push(layer.bind(&MlaLayerArgs { selection, ..args }, ROOM)?);
        }
        Ok(Self {
            step: layer.step(decodes)?,
            dense_step: dense.step(decodes)?,
            single: Single::new(backend, &sparse)?,
            pool: PagePool::in_slabs(spec.kv, sparse.slab_pages)?,
            sparse,
            layer,
            layers,
            dense,
            dense_layers,
            buffers,
            index,
            runs,
            rng,
            weight,
            cos_sin,
            k_scale,
            softmax_scale,
            case: Default::default(),
        })
    }

    /// A step of all layers, and what is wrong with it.
    pub fn step(&mut self, requests: &[(SeqId, u32)]) -> Result<Result<(), String>> {
        let backend = self.layer.device().clone();
        let (arrays, copies) = self.pool.layer_step(requests)?;
        let spec = self.sparse.layer;
        let copy = KvCopyPages { shape: spec.shape, kv: spec.kv };
        if !copies.is_empty() {
            for buffers in &self.buffers {
                backend.once(copy, &copies[..], &buffers.cache(&self.sparse)?)?;
            }
            for cache in [&self.index.cache, &self.index.twin] {
                let cache = self.index.view(&self.sparse, cache)?;
                backend.once(self.sparse.index().copies(), &copies[..], &cache)?;
            }
        }
        let mut queries = Vec::new();
        for buffers in &self.buffers {
            queries.push(buffers.refill(&backend, &spec, &mut self.rng)?);
        }
        self.index.refill(&backend, &self.sparse, &mut self.rng)?;
        let batch = arrays.batch();
        self.layer.prepare(&mut self.step, (&batch, self.sparse.policy))?;
        self.runs.run(&self.layer, &self.step, &self.layers)?;
        let outs = self.buffers.iter().map(|buffers| buffers.read_out(&backend, &spec));
        let outs = outs.collect::<Result<Vec<_>>>()?;
        self.dense.prepare(&mut self.dense_step, (&batch, self.sparse.policy))?;
        OneSubmit.run(&self.dense, &self.dense_step, &self.dense_layers)?;
        self.single.run(&self.sparse, &self.index, &arrays)?;

        let lists = self.lists(&arrays)?;
        let mut checked = self.check_index(&arrays, &lists);
        for (layer, (out, q)) in outs.iter().zip(&queries).enumerate() {
            let dense = self.buffers[layer].read_out(&backend, &spec)?;
            let cache = self.buffers[layer].read_cache(&backend, &self.sparse)?;
            let wrong = |error| format!("layer {layer}: {error}");
            checked = checked
                .and_then(|()| check_dense(&arrays, &spec, (out, &dense), self.sparse.policy).map_err(wrong))
                .and_then(|()| self.check_out(&arrays, &lists, q, &cache, out).map_err(wrong))
                .map(|(got, want)| {
                    self.case.0.extend(got);
                    self.case.1.extend(want);
                });
        }
        Ok(checked)
    }

    /// The list of each query token that has one.
    fn lists(&self, arrays: &LayerArrays) -> Result<Vec<Option<Vec<i32>>>> {
        let words = self.layer.device().download(&self.index.list, LIST_BYTES)?;
        let row = |token: usize| {
            let row = &words[token * LIST_STRIDE as usize * 4..][..TOPK as usize * 4];
            row.chunks(4).map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
        };
        Ok(listed(arrays).into_iter().enumerate().map(|(token, is)| is.then(|| row(token))).collect())
    }

    /// The index cache and the lists are those of the single ops, and each list is of slots that its token sees.
    fn check_index(&self, arrays: &LayerArrays, lists: &[Option<Vec<i32>>]) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let backend = self.layer.device();
        let bytes = u64::from(self.sparse.slab_pages) * self.sparse.index().page_bytes();
        let read = |buffer: &B::Buffer| backend.download(buffer, bytes.next_multiple_of(4)).map_err(text);
        for (slab, twin) in self.index.cache.iter().zip(&self.index.twin) {
            if read(slab)? != read(twin)? {
                return Err("the index cache is not what the single op writes".to_owned());
            }
        }
        let [got, want] =
            [&self.index.list, &self.index.twin_list].map(|list| backend.download(list, LIST_BYTES));
        let (got, want) = (got.map_err(text)?, want.map_err(text)?);
        let page_size = self.sparse.layer.kv.page_size as usize;
        for (token, (sequence, position)) in tokens(arrays).into_iter().enumerate() {
            let Some(list) = &lists[token] else { continue };
            let row = token * LIST_STRIDE as usize * 4..(token + 1) * LIST_STRIDE as usize * 4;
            let row = row.start..row.start + TOPK as usize * 4;
            if got[row.clone()] != want[row] {
                return Err(format!("the list of token {token} is not what the single op makes: {list:?}"));
            }
            let pages = self.pool.pages(sequence).map_err(text)?;
            let slots: Vec<i32> = (0..=position as usize)
                .map(|at| (pages[at / page_size] as usize * page_size + at % page_size) as i32)
                .collect();
            let count = slots.len().min(TOPK as usize);
            let is_full = list[..count].iter().all(|slot| slots.contains(slot));
            if !is_full || list[count..].iter().any(|&slot| slot != -1) {
                return Err(format!("token {token} sees {slots:?} and lists {list:?}"));
            }
        }
        Ok(())
    }

    /// What the oracle says of the lists; and what it says of all tokens is something else. Returns the output and what it should be.
    ///
    /// A layer's step is a part of a case, and of few elements. Four bf16 roundings (absorbed query, weights of the softmax, latent output,
    /// output) are 3.9e-6 of a cosine on average, and over 288 elements more than 5e-6 once in a hundred draws. So the tolerance holds over
    /// the case, as docs/numbers.md says, and a part may have twice as much.
    fn check_out(
        &self,
        arrays: &LayerArrays,
        lists: &[Option<Vec<i32>>],
        q: &[f64],
        cache: &[f32],
        out: &[u8],
    ) -> Result<(Vec<f32>, Vec<f64>), String> {
        let spec = self.sparse.layer;
        let tolerance = tolerance(&spec, self.layer.rounds_weights());
        let part = Tolerance { cos: 2.0 * tolerance.cos, ..tolerance };
        let value = (spec.shape.num_heads * spec.v_head_dim) as usize;
        let mut got = spec.dtype.decode_all(out);
        let mut wanted = Vec::new();
        for (token, (sequence, position)) in tokens(arrays).into_iter().enumerate() {
            let pages = self.pool.pages(sequence).map_err(|error| error.to_string())?;
            let page_size = spec.kv.page_size as usize;
            let all =
                (0..=position as usize).map(|at| pages[at / page_size] as usize * page_size + at % page_size);
            let all: Vec<usize> = all.collect();
            let expected = |slots: &[usize]| self.expected(q, cache, token, position as usize, slots);
            let Some(list) = &lists[token] else {
                wanted.extend(expected(&all));
                continue;
            };
            let slots: Vec<usize> =
                list.iter().filter(|&&slot| slot >= 0).map(|&slot| slot as usize).collect();
            wanted.extend(expected(&slots));
            let got = &got[token * value..][..value];
            if all.len() > TOPK as usize + 8 && close("out", got, &expected(&all), &tolerance).ok() {
                return Err(format!("token {token}: its list makes no difference"));
            }
        }
        got.truncate(wanted.len());
        close("out", &got, &wanted, &part).into_result()?;
        Ok((got, wanted))
    }

    fn expected(&self, q: &[f64], cache: &[f32], token: usize, position: usize, slots: &[usize]) -> Vec<f64> {
        let spec = self.sparse.layer;
        let (heads, nope) = (spec.shape.num_heads as usize, spec.qk_nope_head_dim as usize);
        let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
        let row = |slot: &usize| &cache[slot * (latent + rope)..][..latent + rope];
        let rows: Vec<f64> =
            slots.iter().flat_map(row).map(|&x| f64::from(x) * f64::from(self.k_scale)).collect();
        let queries = q[token * heads * (nope + rope)..][..heads * (nope + rope)].chunks(nope + rope);
        let q_nope: Vec<f64> = queries.clone().flat_map(|row| row[..nope].to_vec()).collect();
        let q_pe: Vec<f64> =
            queries.flat_map(|row| rotated(&self.cos_sin, spec.rope, &row[nope..], position)).collect();
        mla_layer(&LayerSequence {
            num_heads: heads,
            kv_lora_rank: latent,
            qk_rope_head_dim: rope,
            qk_nope_head_dim: nope,
            v_head_dim: spec.v_head_dim as usize,
            q_nope: &q_nope,
            q_pe: &q_pe,
            rows: &rows,
            kv_b_proj: &self.weight,
            visible: &[slots.len()],
            softmax_scale: self.softmax_scale.into(),
        })
    }

    /// A run of several steps, each with what is wrong with it: a prompt that is longer than a list beside shorter ones, decodes of one and
    /// two tokens, a prompt in parts, a fork that diverges, sequences that grow past a list; then steps that need no new recording.
    pub fn life(&mut self) -> Result<Vec<(String, Result<(), String>)>> {
        let [a, b, c] = [(); 3].map(|()| self.pool.add());
        let mut steps = Vec::new();
        let mut step = |rig: &mut Self, requests: &[(SeqId, u32)]| -> Result<()> {
            steps.push((format!("step {}", steps.len()), rig.step(requests)?));
            Ok(())
        };
        step(self, &[(a, 37), (b, 5), (c, 12)])?;
        step(self, &[(b, 1), (a, 2), (c, 9)])?;
        // They share pages. The last is partly full, and the first to write to it copies it.
        let d = self.pool.fork(a)?;
        step(self, &[(a, 1), (d, 1), (c, 1), (b, 1)])?;
        step(self, &[(d, 3), (a, 1), (c, 1), (b, 11)])?;
        let all = [(a, 1), (d, 1), (c, 1), (b, 1)];
        for _ in 0..3 {
            step(self, &all)?;
        }
        let tolerance = tolerance(&self.sparse.layer, self.layer.rounds_weights());
        let whole = close("out", &self.case.0, &self.case.1, &tolerance).into_result().map(drop);
        steps.push(("all steps".to_owned(), whole));
        Ok(steps)
    }
}

/// Whether each query token attends a list.
fn listed(arrays: &LayerArrays) -> Vec<bool> {
    let batch = arrays.batch();
    let of = |(&len, loc): (&i32, &[i32])| vec![len as u32 > TOPK; (loc[1] - loc[0]) as usize];
    batch.seq_lens.iter().zip(batch.query_start_loc.windows(2)).flat_map(of).collect()
}

/// The sequence and position of each query token.
fn tokens(arrays: &LayerArrays) -> Vec<(SeqId, u32)> {
    let of = |(sequence, positions): &(SeqId, std::ops::Range<u32>)| {
        let sequence = *sequence;
        positions.clone().map(move |position| (sequence, position)).collect::<Vec<_>>()
    };
    arrays.tokens().iter().flat_map(of).collect()
}

/// Tokens without a list have the bits of a dense layer, where splits do not depend on the batch. An f16 layer stores partial results
/// scaled by 2^-3, and those that are then subnormal are rounded once a merge: how many merges there are depends on the other prompts.
fn check_dense(
    arrays: &LayerArrays,
    spec: &MlaLayer,
    (out, dense): (&[u8], &[u8]),
    policy: SplitPolicy,
) -> Result<(), String> {
    if !matches!(policy, SplitPolicy::FixedTokens(_)) {
        return Ok(());
    }
    let row = (spec.shape.num_heads * spec.v_head_dim) as usize;
    let tiny = if spec.dtype == Dtype::F16 { 2f32.powi(-11) } else { 0.0 };
    let [out, dense] = [out, dense].map(|bytes| spec.dtype.decode_all(bytes));
    for (token, _) in listed(arrays).into_iter().enumerate().filter(|(_, is_listed)| !is_listed) {
        let rows = out[token * row..][..row].iter().zip(&dense[token * row..][..row]);
        let differs = |(got, want): &(&f32, &f32)| got.to_bits() != want.to_bits() && want.abs() >= tiny;
        if let Some((got, want)) = rows.clone().find(differs) {
            return Err(format!("token {token} is {got:e} where a dense layer gives {want:e}"));
        }
    }
    Ok(())
}
