//! The whole layer as a graph that is captured once and replayed for batch after batch.

use mla_support::Outcome;
use mla_support::close::{Tolerance, close};
use mla_support::graph::{captured, cuda};
use mla_support::paint::Rng;
use mla_support::suite::layer::{PREFIX_ROWS, spec as layer_spec};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::cuda::{Cuda, Graph};
use wgpu_mla::{
    Backend, Binding, Capacity, Compiled, Device, Dtype, ExpandBatch, Expanded, ExpandedPrefix, KvCopyPages,
    KvView, LayerBatch, LayerCapacity, LayerOptions, MlaExpand, MlaExpandArgs, MlaLayer, MlaLayerArgs,
    PagePool, RopeFrequencies, RopeLayout, SeqId, SplitPolicy, Step, View,
};

const TOKENS: u32 = 64;
const MAX_POSITION: u32 = 128;
const ROOM: LayerCapacity =
    LayerCapacity { tokens: TOKENS, decode_tokens: TOKENS, prefix_rows: PREFIX_ROWS, positions: 0 };
/// More than the decodes of any batch here, so that their tables never grow.
const DECODES: Capacity =
    Capacity { items: 1024, queries: 1024, pages: 1024, merges: 1024, merge_partials: 1024, partials: 1024 };

/// A layer that is bound once, to arrays that are refilled for each batch.
struct Bound<D: Backend> {
    layer: Compiled<MlaLayer, D>,
    step: Step<MlaLayer, D>,
    binding: Binding<MlaLayer, D>,
    expand: Compiled<MlaExpand, D>,
    expansion: Binding<MlaExpand, D>,
    /// Queries, latent rows and rotary keys of new tokens.
    inputs: [D::Buffer; 3],
    kv: D::Buffer,
    out: D::Buffer,
}

/// The inputs of each new token: queries, latent row, rotary key.
fn input_elems(spec: &MlaLayer) -> [usize; 3] {
    let head = spec.qk_nope_head_dim + spec.shape.qk_rope_head_dim;
    [spec.shape.num_heads * head, spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim]
        .map(|elems| elems as usize)
}

/// Random codes of a dtype.
fn draw(rng: &mut Rng, dtype: Dtype, count: usize, scale: f32) -> Vec<u8> {
    dtype.encode_all(&(0..count).map(|_| rng.randn() * scale).collect::<Vec<_>>())
}

impl<D: Backend> Bound<D> {
    fn new(device: &D, spec: &MlaLayer, weight: &[u8], k_scale: f32) -> Self {
        let filled = |bytes: &[u8]| {
            let buffer = device.buffer(bytes.len() as u64).expect("memory");
            device.upload(&buffer, 0, bytes).expect("uploaded");
            buffer
        };
        let rope = spec.shape.qk_rope_head_dim;
        let frequencies = RopeFrequencies::plain(rope, 10_000.0).expect("frequencies");
        let cos_sin = filled(bytemuck::cast_slice(&frequencies.cos_sin(MAX_POSITION).expect("a table")));
        let weight = filled(weight);
        let inputs =
            input_elems(spec).map(|elems| filled(&vec![0; TOKENS as usize * elems * spec.dtype.bytes()]));
        // Rows that were never written hold NaN.
        let elems = spec.kv.num_slots() as usize * spec.shape.row_elems() as usize;
        let kv = filled(&spec.kv.dtype.encode_all(&vec![f32::NAN; elems]));
        let arrays = spec.expanded_bytes(PREFIX_ROWS).map(|bytes| filled(&vec![0; bytes as usize]));
        let heads = spec.shape.num_heads;
        let out = filled(&vec![0; (TOKENS * heads * spec.v_head_dim) as usize * spec.dtype.bytes()]);

        let options = LayerOptions { capacity: ROOM, ..LayerOptions::default() };
        let layer = device.compile_with(*spec, &options).expect("a layer");
        let expand = device.compile(MlaExpand(*spec)).expect("an expansion");
        let q_nope = View::dense(&inputs[0], heads, spec.qk_nope_head_dim + rope);
        let args = MlaLayerArgs {
            q_nope,
            q_pe: View { offset: spec.qk_nope_head_dim.into(), ..q_nope },
            kv_c: View::dense(&inputs[1], 1, spec.shape.kv_lora_rank),
            k_pe: View::dense(&inputs[2], 1, rope),
            kv: KvView::dense(&kv, &spec.mla()),
            kv_b_proj: &weight,
            cos_sin: &cos_sin,
            max_position: MAX_POSITION,
            out: View::dense(&out, heads, spec.v_head_dim),
            softmax_scale: wgpu_mla::softmax_scale(spec.qk_nope_head_dim, rope, 1.0, 1.0),
            k_scale,
            expanded: Some(Expanded::dense(spec, arrays.each_ref())),
        };
        let MlaLayerArgs { kv: cache, kv_b_proj, .. } = args;
        let expanded = Expanded::dense(spec, arrays.each_ref());
        let expand_args = MlaExpandArgs { kv: cache, k_scale, kv_b_proj, expanded };
        Self {
            step: layer.step(DECODES).expect("a step"),
            binding: layer.bind(&args, ROOM).expect("binds"),
            layer,
            expansion: expand.bind(&expand_args, PREFIX_ROWS).expect("binds"),
            expand,
            inputs,
            kv,
            out,
        }
    }

    /// What a batch needs before the captured layer: page copies of forks, and expanded prefixes.
    fn prepare(
        &mut self,
        inputs: &[Vec<u8>; 3],
        copies: &[(u32, u32)],
        batch: &LayerBatch<'_>,
        prefix_pages: &[Vec<i32>],
    ) {
        let (device, spec) = (self.layer.device().clone(), *self.layer.op());
        let copy = KvCopyPages { kv: spec.kv, row_elems: spec.shape.row_elems() };
        device.once(copy, copies, &KvView::dense(&self.kv, &spec.mla())).expect("copied");
        for (buffer, bytes) in self.inputs.iter().zip(inputs) {
            device.upload(buffer, 0, bytes).expect("uploaded");
        }
        for (&ExpandedPrefix { tokens, first_row, .. }, pages) in batch.expanded.iter().zip(prefix_pages) {
            let mut step = self.expand.step(()).expect("a step");
            self.expand.prepare(&mut step, ExpandBatch { pages, tokens, first_row }).expect("prepared");
            self.expand.run(&step, &self.expansion).expect("expanded");
        }
        self.layer.prepare(&mut self.step, (batch, SplitPolicy::Auto)).expect("prepared");
    }

    /// The output of so many tokens, and the cache.
    fn read(&self, tokens: usize) -> [Vec<f32>; 2] {
        let spec = self.layer.op();
        let row = (spec.shape.num_heads * spec.v_head_dim) as usize;
        let cache = spec.kv.num_slots() as usize * spec.shape.row_elems() as usize;
        [(&self.out, spec.dtype, tokens * row), (&self.kv, spec.kv.dtype, cache)].map(
            |(buffer, dtype, elems)| {
                let bytes = (elems * dtype.bytes()) as u64;
                dtype.decode_all(&self.layer.device().download(buffer, bytes).expect("read"))
            },
        )
    }
}

/// The same layer on the card, as a graph, and on the host in f32, so that the host adds no error of its own.
struct Both {
    card: Bound<Cuda>,
    host: Bound<Cpu>,
    pool: PagePool,
    rng: Rng,
    /// The graph, and the step's generation that it was captured in.
    graph: Option<(u64, Graph)>,
}

impl Both {
    /// One batch: so many new tokens of each sequence. `replays`: whether the previous batch's graph is replayed.
    fn step(&mut self, name: &str, replays: bool, requests: &[(SeqId, u32)], prefixes: &[ExpandedPrefix]) {
        let spec = *self.card.layer.op();
        let name = format!("{} over {}, {name}", spec.dtype, spec.kv.dtype);
        let append = self.pool.append_batch(requests).expect("pages");
        let seqs: Vec<SeqId> = requests.iter().map(|&(seq, _)| seq).collect();
        let mut query_start_loc = vec![0];
        query_start_loc.extend(requests.iter().scan(0, |end, &(_, count)| {
            *end += count as i32;
            Some(*end)
        }));
        let tokens = query_start_loc[requests.len()] as usize;
        let pages = self.pool.block_table(&seqs, -1).expect("a table");
        let batch = LayerBatch {
            seq_lens: &self.pool.seq_lens(&seqs).expect("lengths"),
            query_start_loc: &query_start_loc,
            slot_mapping: &self.pool.slot_mapping(&append.tokens).expect("slots"),
            pages: pages.page_table(),
            shared_prefixes: &self.pool.shared_prefixes(&seqs).expect("prefixes"),
            expanded: prefixes,
        };
        let prefix_pages: Vec<Vec<i32>> = prefixes
            .iter()
            .map(|prefix| {
                let pages = self.pool.pages(seqs[prefix.sequences[0] as usize]).expect("a sequence");
                pages.iter().map(|&page| page as i32).collect()
            })
            .collect();
        let mut scales = [0.7, 0.3, 0.5].into_iter();
        let inputs = input_elems(&spec)
            .map(|elems| draw(&mut self.rng, spec.dtype, tokens * elems, scales.next().unwrap_or_default()));

        let Self { card, host, graph, .. } = self;
        let exact = inputs.each_ref().map(|bytes| Dtype::F32.encode_all(&spec.dtype.decode_all(bytes)));
        host.prepare(&exact, &append.copies, &batch, &prefix_pages);
        host.layer.run(&host.step, &host.binding).expect("runs");
        card.prepare(&inputs, &append.copies, &batch, &prefix_pages);
        let generation = card.step.generation();
        let serves = graph.as_ref().is_some_and(|(captured_in, _)| *captured_in == generation);
        assert_eq!(serves, replays, "{name}: whether the graph still serves");
        if !serves {
            let device = card.layer.device();
            *graph = Some((generation, captured(device, || card.layer.record(&card.step, &card.binding))));
        }
        graph.as_ref().expect("captured").1.launch().expect("launched");

        let ([got, got_cache], [_, want_cache]) = (card.read(tokens), host.read(tokens));
        // Rotated elements may be rounded to a neighbour.
        let step = match spec.kv.dtype {
            Dtype::F32 | Dtype::F16 => 1.0 / 1024.0,
            Dtype::Bf16 | Dtype::E4m3 => 1.0 / 8.0,
        };
        for (at, (got, want)) in got_cache.iter().zip(&want_cache).enumerate() {
            let is_close = (got - want).abs() <= step * want.abs() + 1e-6 || (got.is_nan() && want.is_nan());
            assert!(is_close, "{name}: element {at} of the cache is {got}, not {want}");
        }
        // The host attends exactly the card's cache.
        host.layer.device().upload(&host.kv, 0, &spec.kv.dtype.encode_all(&got_cache)).expect("uploaded");
        let attended = LayerBatch { slot_mapping: &vec![-1; tokens], ..batch };
        host.prepare(&exact, &[], &attended, &prefix_pages);
        host.layer.run(&host.step, &host.binding).expect("runs");
        let [want, _] = host.read(tokens);
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        let tolerance = match spec.dtype {
            Dtype::F32 if !card.layer.rounds_weights() => {
                Tolerance { abs: 0.0, rel: 0.0, row: Some((spec.v_head_dim as usize, 2e-5)), cos: 1e-9 }
            }
            dtype => Tolerance::decode(dtype, dtype, dtype, true, 1.0, 1),
        };
        assert!(want.iter().all(|x| x.is_finite()), "{name}");
        close(&name, &got, &want, &tolerance).into_result().expect("right");
    }
}

/// Lengths, pages and slots change with every batch; runs of decodes, chunks of prompts and whether prefixes are attended only
/// where the graph is captured again.
fn captured_layers_replay_with_new_batches() -> Outcome {
    let cuda = cuda()?;
    for (dtype, cache) in [(Dtype::F32, Dtype::F16), (Dtype::F16, Dtype::E4m3), (Dtype::Bf16, Dtype::Bf16)] {
        let spec = layer_spec(dtype, cache, RopeLayout::Interleaved, 64);
        let mut rng = Rng(21);
        let rows = (spec.shape.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)) as usize;
        let weight = draw(&mut rng, spec.weight, rows * spec.shape.kv_lora_rank as usize, 1.0 / 16.0);
        let k_scale = if cache == Dtype::E4m3 { 1.0 / 128.0 } else { 1.0 };
        let exact = layer_spec(Dtype::F32, cache, spec.rope, 64);
        let exact_weight = Dtype::F32.encode_all(&spec.weight.decode_all(&weight));
        let mut both = Both {
            card: Bound::new(&cuda, &spec, &weight, k_scale),
            host: Bound::new(&Cpu::new(), &exact, &exact_weight, k_scale),
            pool: PagePool::new(spec.kv).expect("a pool"),
            rng,
            graph: None,
        };
        let [a, b, c, d, e, f] = [(); 6].map(|()| both.pool.add());
        both.step("prompts", false, &[(a, 42), (c, 9)], &[]);
        both.step("other prompts", true, &[(b, 20), (d, 7)], &[]);
        both.step("one prompt", true, &[(a, 3)], &[]);

        both.step("decodes", false, &[(a, 1), (b, 1), (c, 1), (d, 1)], &[]);
        both.step("fewer decodes", true, &[(b, 2), (c, 1)], &[]);
        both.step("more decodes", true, &[(d, 1), (a, 2), (c, 2), (b, 2)], &[]);

        both.step("decodes and a prompt", false, &[(a, 1), (b, 1), (e, 12)], &[]);
        both.step("decodes and another prompt", true, &[(c, 2), (f, 10)], &[]);
        both.step("decodes and a longer sequence", true, &[(e, 1), (f, 2), (d, 1), (b, 5)], &[]);

        // Forks share pages. The last is partly full, and the first to write to it copies it.
        let [g, h, i] = [a, a, b].map(|seq| both.pool.fork(seq).expect("a fork"));
        let of = |sequences: &[u32], tokens, first_row| ExpandedPrefix {
            sequences: sequences.to_vec(),
            tokens,
            first_row,
        };
        let two = [of(&[0, 1, 2], 40, 24), of(&[3, 4], 16, 3)];
        both.step("two prefixes", false, &[(a, 1), (g, 1), (h, 2), (b, 1), (i, 1), (c, 1)], &two);
        let requests = [(b, 1), (c, 2), (i, 1), (h, 1)];
        both.step("one prefix elsewhere", true, &requests, &[of(&[0, 2], 24, 40)]);
        both.step("a prefix of other sequences", true, &[(d, 1), (g, 2), (a, 1)], &[of(&[1, 2], 32, 0)]);

        let requests = [(g, 1), (a, 1), (f, 4)];
        both.step("a prefix beside a prompt", false, &requests, &[of(&[0, 1], 40, 8)]);
        let requests = [(b, 2), (i, 1), (c, 1), (d, 6)];
        both.step("another beside another", true, &requests, &[of(&[0, 1], 16, 0)]);

        // More keys than the workspace holds: chunks, whose results are merged.
        both.step("chunks", false, &[(c, 1), (e, 57)], &[]);
        both.step("other chunks", true, &[(h, 2), (d, 1), (b, 34)], &[]);
    }
    Ok(())
}

crate::tests![captured_layers_replay_with_new_batches];
