//! What tests of a layer run: sequences that grow, fork and share pages over several steps, each step against the f64 oracle.

use crate::reference::{LayerSequence, cache_values, mla_layer};
use wgpu_mla::{
    Backend, Binding, Capacity, Compiled, Device, Dtype, Error, ExpandBatch, Expanded, ExpandedPrefix,
    Kernel, KvCopyPages, KvLayout, KvSpec, KvView, LayerBatch, LayerCapacity, LayerOptions, MlaExpand,
    MlaExpandArgs, MlaLayer, MlaLayerArgs, MlaShape, Op, PagePool, Result, RopeLayout, SeqId, SplitPolicy,
    Step, View,
};

use crate::close::{Tolerance, close};
use crate::paint::Rng;

const MAX_POSITION: u32 = 128;
/// Query tokens that arrays have room for.
const MAX_TOKENS: u32 = 64;

/// Rows that arrays of expanded prefixes have.
pub const PREFIX_ROWS: u32 = 80;

/// How a test runs an op that is prepared and bound.
pub trait Runs<B: Device> {
    fn run<O: Op>(&self, op: &Compiled<O, B>, step: &Step<O, B>, binding: &Binding<O, B>) -> Result<()>
    where
        B: Kernel<O>;
}

/// By [`Compiled::run`].
pub struct Submitted;

impl<B: Device> Runs<B> for Submitted {
    fn run<O: Op>(&self, op: &Compiled<O, B>, step: &Step<O, B>, binding: &Binding<O, B>) -> Result<()>
    where
        B: Kernel<O>,
    {
        op.run(step, binding)
    }
}

pub fn spec(dtype: Dtype, cache: impl Into<KvLayout>, rope: RopeLayout, workspace_rows: u64) -> MlaLayer {
    let layout = cache.into();
    let (kv_lora_rank, qk_rope_head_dim) = if layout.is_plain() { (256, 32) } else { (512, 64) };
    let spec = MlaLayer {
        shape: MlaShape { num_heads: 3, kv_lora_rank, qk_rope_head_dim },
        qk_nope_head_dim: 16,
        v_head_dim: 24,
        kv: KvSpec { layout, page_size: 8, num_pages: 40 },
        dtype,
        query: dtype,
        weight: dtype,
        out: dtype,
        rope,
        decode_threshold: 2,
        workspace_bytes: 0,
    };
    MlaLayer { workspace_bytes: workspace_rows * spec.workspace_row_bytes(), ..spec }
}

/// How large random values are.
#[derive(Debug, Clone, Copy)]
pub struct Amplitudes {
    pub w_uk: f32,
    pub w_uv: f32,
    pub q: f32,
    pub kv_c: f32,
    /// `None`: by [`wgpu_mla::softmax_scale`].
    pub softmax_scale: Option<f32>,
}

impl Amplitudes {
    pub const USUAL: Self =
        Self { w_uk: 1.0 / 16.0, w_uv: 1.0 / 16.0, q: 0.7, kv_c: 0.3, softmax_scale: None };
}

/// A compiled layer, its weights and cache on a backend, and what the oracle needs to know of them.
pub struct Rig<B: Backend, R: Runs<B>> {
    layer: Compiled<MlaLayer, B>,
    step: Step<MlaLayer, B>,
    runs: R,
    pub(super) pool: PagePool,
    rng: Rng,
    amplitudes: Amplitudes,
    k_scale: f32,
    weight: Vec<f64>,
    cos_sin: Vec<f32>,
    /// One, or slabs of `slab_pages` pages.
    kv: Vec<B::Buffer>,
    slab_pages: u32,
    weight_buffer: B::Buffer,
    /// f32 `[2, H]` of codes.
    scales_buffer: Option<B::Buffer>,
    cos_sin_buffer: B::Buffer,
}

/// A layer's expanded prefixes: rows, keys and values.
pub(super) struct Cascade<B: Backend> {
    arrays: [B::Buffer; 3],
    prefixes: Vec<ExpandedPrefix>,
}

/// The output of a step, and what the oracle says of it.
pub struct StepOutput {
    pub got: Vec<f32>,
    pub want: Vec<f64>,
    pub tolerance: Tolerance,
}

impl StepOutput {
    pub fn check(&self) -> Result<(), String> {
        close("out", &self.got, &self.want, &self.tolerance).into_result().map(drop)
    }
}

/// Random values as a dtype holds them, and their bytes.
pub(super) fn draw(rng: &mut Rng, dtype: Dtype, count: usize, scale: f32) -> (Vec<f64>, Vec<u8>) {
    let values: Vec<f32> = (0..count).map(|_| rng.randn() * scale).collect();
    let bytes = dtype.encode_all(&values);
    (dtype.decode_all(&bytes).into_iter().map(f64::from).collect(), bytes)
}

impl<B: Backend, R: Runs<B>> Rig<B, R> {
    /// `prefix_rows` is 0 or [`PREFIX_ROWS`].
    pub fn new(backend: &B, spec: MlaLayer, prefix_rows: u32, runs: R, seed: u64) -> Result<Self> {
        Self::in_slabs(backend, (spec, spec.kv.num_pages), prefix_rows, runs, seed)
    }

    /// With a pool in slabs of so many pages.
    pub fn in_slabs(
        backend: &B,
        (spec, slab_pages): (MlaLayer, u32),
        prefix_rows: u32,
        runs: R,
        seed: u64,
    ) -> Result<Self> {
        Self::with(backend, (spec, slab_pages), prefix_rows, runs, seed, Amplitudes::USUAL)
    }

    /// With values of those sizes.
    pub fn with(
        backend: &B,
        (spec, slab_pages): (MlaLayer, u32),
        prefix_rows: u32,
        runs: R,
        seed: u64,
        amplitudes: Amplitudes,
    ) -> Result<Self> {
        let capacity = LayerCapacity {
            tokens: MAX_TOKENS,
            decode_tokens: MAX_TOKENS,
            prefix_rows,
            positions: 0,
            listed_tokens: 0,
        };
        let options = LayerOptions { capacity, slab_pages, ..LayerOptions::default() };
        let layer = backend.compile_with(spec, &options)?;
        assert!(layer.facts().workspace_bytes <= spec.workspace_bytes, "the workspace is over its budget");
        let mut rng = Rng(seed);
        let shape = spec.shape;
        let (latent, rope) = (shape.kv_lora_rank as usize, shape.qk_rope_head_dim as usize);
        let (mut weight, mut bytes, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..shape.num_heads {
            for (rows, amplitude) in
                [(spec.qk_nope_head_dim, amplitudes.w_uk), (spec.v_head_dim, amplitudes.w_uv)]
            {
                // Codes have an amplitude and a scale of their own in each half of each head.
                let scale = if spec.weight.is_fp8() {
                    amplitude / 60.0 * (0.5 + 1.5 * rng.unit() as f32)
                } else {
                    1.0
                };
                let part = draw(&mut rng, spec.weight, rows as usize * latent, amplitude / scale);
                weight.extend(part.0.iter().map(|code| code * f64::from(scale)));
                scales.push(scale);
                bytes.extend(part.1);
            }
        }
        let weight_buffer = uploaded(backend, &bytes)?;
        // `[2, H]`: those of keys, then those of values.
        let scales: Vec<f32> =
            [0, 1].into_iter().flat_map(|half| scales[half..].iter().step_by(2).copied()).collect();
        let scales_buffer = match spec.weight.is_fp8() {
            true => Some(uploaded(backend, &Dtype::F32.encode_all(&scales))?),
            false => None,
        };
        let mut cos_sin = Vec::new();
        for position in 0..MAX_POSITION {
            let angle = |i: usize| f64::from(position) * 10_000f64.powf(-2.0 * i as f64 / rope as f64);
            cos_sin.extend((0..rope / 2).map(|i| angle(i).cos() as f32));
            cos_sin.extend((0..rope / 2).map(|i| angle(i).sin() as f32));
        }
        let cos_sin_buffer = uploaded(backend, &Dtype::F32.encode_all(&cos_sin))?;
        // Rows that were never written hold NaN.
        let num_slabs = spec.kv.num_slabs(slab_pages)?;
        let nothing = vec![0xFF; slab_pages as usize * spec.kv.page_bytes(&shape) as usize];
        let kv = (0..num_slabs).map(|_| uploaded(backend, &nothing)).collect::<Result<_>>()?;
        Ok(Self {
            step: layer.step(Capacity::default())?,
            layer,
            runs,
            pool: PagePool::in_slabs(spec.kv, slab_pages)?,
            slab_pages,
            rng,
            // No code saturates.
            k_scale: if spec.kv.layout == Dtype::E4m3.into() {
                (amplitudes.kv_c / 38.4).log2().round().exp2()
            } else {
                1.0
            },
            amplitudes,
            weight,
            cos_sin,
            kv,
            weight_buffer,
            scales_buffer,
            cos_sin_buffer,
        })
    }

    /// One step: so many new tokens of each sequence, appended, attended, and compared with what the oracle says.
    pub(super) fn step(
        &mut self,
        requests: &[(SeqId, u32)],
        policy: SplitPolicy,
        cascade: Option<&Cascade<B>>,
    ) -> Result<StepOutput> {
        let (spec, backend) = (*self.layer.op(), self.layer.device());
        let (heads, nope) = (spec.shape.num_heads as usize, spec.qk_nope_head_dim as usize);
        let (latent, rope) = (spec.shape.kv_lora_rank as usize, spec.shape.qk_rope_head_dim as usize);
        let (value, row_elems) = (spec.v_head_dim as usize, latent + rope);

        let slabs = self.kv.clone();
        let cache = KvView::in_slabs(&slabs.iter().collect::<Vec<_>>(), &spec.mla(), self.slab_pages, 0)?;
        let seqs: Vec<SeqId> = requests.iter().map(|&(seq, _)| seq).collect();
        let mut tokens = Vec::new();
        let mut loc = vec![0i32];
        for &(seq, count) in requests {
            let append = self.pool.append(seq, count)?;
            let copy = KvCopyPages { shape: spec.shape, kv: spec.kv };
            backend.once(copy, append.copies(), &cache)?;
            tokens.push((seq, append.tokens));
            loc.push(loc[loc.len() - 1] + count as i32);
        }
        let total = loc[loc.len() - 1] as usize;
        let slots = self.pool.slot_mapping(&tokens)?;
        let (table, lens) = (self.pool.block_table(&seqs, -1)?, self.pool.seq_lens(&seqs)?);
        let shared = self.pool.shared_prefixes(&seqs)?;

        let (q, q_bytes) = draw(&mut self.rng, spec.dtype, total * heads * (nope + rope), self.amplitudes.q);
        let (_, kv_c_bytes) = draw(&mut self.rng, spec.dtype, total * latent, self.amplitudes.kv_c);
        let (_, k_pe_bytes) = draw(&mut self.rng, spec.dtype, total * rope, 0.5);
        let [q_buffer, kv_c, k_pe] = [&q_bytes, &kv_c_bytes, &k_pe_bytes].map(|bytes| {
            let room = bytes.len() / total * MAX_TOKENS as usize;
            uploaded(backend, &[bytes.as_slice(), &vec![0; room - bytes.len()]].concat())
        });
        let (q_buffer, kv_c, k_pe) = (q_buffer?, kv_c?, k_pe?);
        let out_bytes = total * heads * value * spec.dtype.bytes();
        let out = backend.buffer((out_bytes / total * MAX_TOKENS as usize) as u64)?;
        let batch = LayerBatch {
            seq_lens: &lens,
            query_start_loc: &loc,
            slot_mapping: &slots,
            pages: table.page_table(),
            shared_prefixes: &shared,
            expanded: cascade.map_or(&[][..], |cascade| &cascade.prefixes),
        };
        let q_nope = View::dense(&q_buffer, heads as u32, (nope + rope) as u32);
        let usual = wgpu_mla::softmax_scale(nope as u32, rope as u32, 1.0, 1.0)?;
        let softmax_scale = self.amplitudes.softmax_scale.unwrap_or(usual);
        let args = MlaLayerArgs {
            q_nope,
            q_pe: View { offset: nope as u64, ..q_nope },
            kv_c: View::dense(&kv_c, 1, latent as u32),
            k_pe: View::dense(&k_pe, 1, rope as u32),
            kv: cache,
            kv_b_proj: &self.weight_buffer,
            kv_b_scales: self.scales_buffer.as_ref(),
            cos_sin: &self.cos_sin_buffer,
            max_position: MAX_POSITION,
            out: View::dense(&out, heads as u32, value as u32),
            softmax_scale,
            q_scale: 1.0,
            k_scale: self.k_scale,
            out_scale: 1.0,
            expanded: cascade.map(|Cascade { arrays: [a, b, c], .. }| Expanded::dense(&spec, [a, b, c])),
            selection: wgpu_mla::Selection::All,
            guard: None,
        };
        if let Some(expanded) = args.expanded {
            let MlaLayerArgs { kv, k_scale, kv_b_proj, kv_b_scales, .. } = args.clone();
            let expand = MlaExpandArgs { kv, k_scale, kv_b_proj, kv_b_scales, expanded };
            self.expand(&seqs, batch.expanded, &expand)?;
        }
        self.layer.prepare(&mut self.step, (&batch, policy))?;
        let prefix_rows = if cascade.is_some() { PREFIX_ROWS } else { 0 };
        let room = LayerCapacity {
            tokens: MAX_TOKENS,
            decode_tokens: MAX_TOKENS,
            prefix_rows,
            positions: 0,
            listed_tokens: 0,
        };
        let binding = self.layer.bind(&args, room)?;
        self.runs.run(&self.layer, &self.step, &binding)?;

        let got = spec.dtype.decode_all(&backend.download(&out, out_bytes.next_multiple_of(4) as u64)?);
        let size = u64::from(self.slab_pages) * spec.kv.page_bytes(&spec.shape);
        let slabs = self.kv.iter().map(|slab| backend.download(slab, size.next_multiple_of(4)));
        let cache = cache_values(&spec.kv, &spec.shape, &slabs.collect::<Result<Vec<_>>>()?.concat());
        let mut want = Vec::new();
        for (i, (seq, positions)) in tokens.iter().enumerate() {
            let page_size = spec.kv.page_size as usize;
            let pages = self.pool.pages(*seq)?;
            let rows: Vec<f64> = (0..lens[i] as usize)
                .flat_map(|token| {
                    let slot = pages[token / page_size] as usize * page_size + token % page_size;
                    cache[slot * row_elems..][..row_elems]
                        .iter()
                        .map(|&x| f64::from(x) * f64::from(self.k_scale))
                })
                .collect();
            let queries =
                &q[loc[i] as usize * heads * (nope + rope)..loc[i + 1] as usize * heads * (nope + rope)];
            let q_nope: Vec<f64> = queries.chunks(nope + rope).flat_map(|row| row[..nope].to_vec()).collect();
            let q_pe: Vec<f64> = queries
                .chunks(nope + rope)
                .zip(0..)
                .flat_map(|(row, index)| {
                    let position = positions.start as usize + index / heads;
                    rotated(&self.cos_sin, spec.rope, &row[nope..], position)
                })
                .collect();
            want.extend(mla_layer(&LayerSequence {
                num_heads: heads,
                kv_lora_rank: latent,
                qk_rope_head_dim: rope,
                qk_nope_head_dim: nope,
                v_head_dim: value,
                q_nope: &q_nope,
                q_pe: &q_pe,
                rows: &rows,
                kv_b_proj: &self.weight,
                visible: &positions.clone().map(|position| position as usize + 1).collect::<Vec<_>>(),
                softmax_scale: softmax_scale.into(),
            }));
        }
        let tolerance = tolerance(&spec, self.layer.rounds_weights());
        Ok(StepOutput { got, want, tolerance })
    }

    /// Expands each prefix from the pages of its first sequence.
    fn expand(
        &self,
        seqs: &[SeqId],
        prefixes: &[ExpandedPrefix],
        args: &MlaExpandArgs<&B::Buffer>,
    ) -> Result<()> {
        let op = self.layer.device().compile(MlaExpand(*self.layer.op()))?;
        for ExpandedPrefix { sequences, tokens, first_row } in prefixes {
            // Sequences that are not in the batch are left for the layer to refuse.
            let Some(&first) = seqs.get(sequences[0] as usize) else { continue };
            let pages: Vec<i32> = self.pool.pages(first)?.iter().map(|&page| page as i32).collect();
            let mut step = op.step(())?;
            op.prepare(&mut step, ExpandBatch { pages: &pages, tokens: *tokens, first_row: *first_row })?;
            self.runs.run(&op, &step, &op.bind(args, step.used())?)?;
        }
        Ok(())
    }

    /// A run of several steps: prompts, a prompt in parts beside decodes, a fork that diverges. Gives the outputs of all steps.
    pub fn life(&mut self, policy: SplitPolicy) -> Result<Vec<StepOutput>> {
        let [a, b, c] = [(); 3].map(|()| self.pool.add());
        let mut steps = vec![self.step(&[(a, 37), (b, 1), (c, 20)], policy, None)?];
        steps.push(self.step(&[(b, 18), (a, 1), (c, 2)], policy, None)?);
        // They share pages. The last is partly full, and the first to write to it copies it.
        let d = self.pool.fork(a)?;
        steps.push(self.step(&[(a, 1), (d, 1), (c, 1), (b, 7)], policy, None)?);
        steps.push(self.step(&[(d, 5), (a, 1), (c, 0)], policy, None)?);
        steps.push(self.step(&[(a, 1), (c, 1), (d, 1)], policy, None)?);
        Ok(steps)
    }

    /// Prompts, then decodes over two prefixes that are kept expanded; then what is refused.
    pub fn cascade(&mut self) -> Result<Vec<(&'static str, StepOutput)>> {
        let [a, b, c] = [(); 3].map(|()| self.pool.add());
        let mut steps = vec![("prompts", self.step(&[(a, 40), (c, 9)], SplitPolicy::Auto, None)?)];
        steps.push(("more of them", self.step(&[(a, 21), (b, 19)], SplitPolicy::Auto, None)?));
        let (d, e, f) = (self.pool.fork(a)?, self.pool.fork(a)?, self.pool.fork(b)?);
        let bytes = self.layer.op().expanded_bytes(PREFIX_ROWS);
        let array = |bytes: u64| self.layer.device().buffer(bytes.next_multiple_of(4));
        let arrays = [array(bytes[0])?, array(bytes[1])?, array(bytes[2])?];
        let of = |sequences: &[u32], tokens, first_row| ExpandedPrefix {
            sequences: sequences.to_vec(),
            tokens,
            first_row,
        };
        let mut both = Cascade { arrays, prefixes: vec![of(&[0, 2, 1], 56, 24), of(&[3, 5], 16, 3)] };
        let requests = [(a, 1), (d, 2), (e, 1), (b, 1), (c, 1), (f, 1)];
        // Attended expanded on every device. With `Auto` cards attend so few sequences in absorbed form.
        steps.push(("two prefixes", self.step(&requests, SplitPolicy::FixedTokens(16), Some(&both))?));
        steps.push(("by cost", self.step(&requests, SplitPolicy::Auto, Some(&both))?));
        both.prefixes = vec![of(&[3, 0, 4], 56, 24)];
        let requests = [(a, 1), (b, 1), (c, 7), (d, 1), (e, 1)];
        steps.push(("beside a prompt", self.step(&requests, SplitPolicy::Auto, Some(&both))?));
        for (prefix, why) in [
            (of(&[0], 20, 0), "whole pages"),
            (of(&[0], 72, 0), "before its query tokens"),
            (of(&[7], 16, 0), "in the batch"),
            (of(&[0, 0], 16, 0), "in one expanded prefix only"),
            (of(&[0], 56, 64), "expanded.rows"),
        ] {
            both.prefixes = vec![prefix];
            match self.step(&[(a, 1)], SplitPolicy::Auto, Some(&both)) {
                Err(error) if error.to_string().contains(why) => {}
                Err(error) => return Err(error),
                Ok(_) => return Err(Error::LayoutMismatch { detail: "a wrong prefix was attended" }),
            }
        }
        Ok(steps)
    }
}

pub(super) fn uploaded<B: Backend>(backend: &B, bytes: &[u8]) -> Result<B::Buffer> {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(4), 0);
    let buffer = backend.buffer(padded.len() as u64)?;
    backend.upload(&buffer, 0, &padded)?;
    Ok(buffer)
}

/// A row at a position of a table of cosines and sines.
pub(super) fn rotated(cos_sin: &[f32], layout: RopeLayout, x: &[f64], position: usize) -> Vec<f64> {
    let rope = x.len();
    let table = &cos_sin[position * rope..][..rope];
    let mut y = vec![0.0; rope];
    for i in 0..rope / 2 {
        let (a, b) = match layout {
            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
            RopeLayout::HalfSplit => (i, i + rope / 2),
        };
        let (cos, sin) = (f64::from(table[i]), f64::from(table[rope / 2 + i]));
        y[a] = x[a] * cos - x[b] * sin;
        y[b] = x[b] * cos + x[a] * sin;
    }
    y
}

/// `rounds_weights`: see [`Compiled::rounds_weights`].
pub(super) fn tolerance(spec: &MlaLayer, rounds_weights: bool) -> Tolerance {
    match spec.dtype {
        Dtype::F32 if !rounds_weights => {
            Tolerance { abs: 0.0, rel: 0.0, row: Some((spec.v_head_dim as usize, 2e-5)), cos: 1e-9 }
        }
        // The tolerance of a decode that rounds its weights.
        dtype => Tolerance::decode(dtype, dtype, dtype, true, 1.0, 1),
    }
}
