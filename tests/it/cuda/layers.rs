//! All layers of a step as one graph that is captured once and replayed for batch after batch.

use mla_support::Outcome;
use mla_support::close::{Tolerance, close};
use mla_support::graph::{captured, cuda};
use mla_support::paint::Rng;
use mla_support::suite::layer_rig::{PREFIX_ROWS, spec as layer_spec};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::cuda::{Cuda, Graph};
use wgpu_mla::{
    Backend, Binding, Capacity, Compiled, Device, Dtype, ExpandBatch, Expanded, ExpandedPrefix, KvCopyPages,
    KvSpec, KvView, LayerBatch, LayerCapacity, LayerOptions, MlaExpand, MlaExpandArgs, MlaLayer,
    MlaLayerArgs, PagePool, RopeFrequencies, RopeLayout, SeqId, SplitPolicy, Step, View,
};

/// Layers of the model.
const LAYERS: usize = 3;
const TOKENS: u32 = 64;
const MAX_POSITION: u32 = 128;
const ROOM: LayerCapacity = LayerCapacity {
    tokens: TOKENS,
    decode_tokens: TOKENS,
    prefix_rows: PREFIX_ROWS,
    positions: 0,
    listed_tokens: 0,
};
/// More than the decodes of any batch here, so that their tables never grow.
const DECODES: Capacity =
    Capacity { items: 1024, queries: 1024, pages: 1024, merges: 1024, merge_partials: 1024, partials: 1024 };

/// A layer's encoded inputs: queries, latent rows and rotary keys of new tokens.
pub(super) type Inputs = [Vec<u8>; 3];

/// A model's layers and the step that they share.
pub(super) struct Model<D: Backend> {
    pub(super) layer: Compiled<MlaLayer, D>,
    pub(super) step: Step<MlaLayer, D>,
    expand: Compiled<MlaExpand, D>,
    pub(super) layers: Vec<Bound<D>>,
}

/// A layer that is bound once, to arrays that are refilled for each batch.
pub(super) struct Bound<D: Backend> {
    pub(super) binding: Binding<MlaLayer, D>,
    expansion: Binding<MlaExpand, D>,
    /// The buffers of [`Inputs`].
    inputs: [D::Buffer; 3],
    kv: D::Buffer,
    pub(super) out: D::Buffer,
}

/// The inputs of each new token: queries, latent row, rotary key.
pub(super) fn input_elems(spec: &MlaLayer) -> [usize; 3] {
    let head = spec.qk_nope_head_dim + spec.shape.qk_rope_head_dim;
    [spec.shape.num_heads * head, spec.shape.kv_lora_rank, spec.shape.qk_rope_head_dim]
        .map(|elems| elems as usize)
}

/// Random codes of a dtype.
pub(super) fn draw(rng: &mut Rng, dtype: Dtype, count: usize, scale: f32) -> Vec<u8> {
    dtype.encode_all(&(0..count).map(|_| rng.randn() * scale).collect::<Vec<_>>())
}

impl<D: Backend> Model<D> {
    /// A layer for each of `weights`, and a step with room for `decodes`.
    pub(super) fn new(
        device: &D,
        spec: &MlaLayer,
        weights: &[Vec<u8>],
        k_scale: f32,
        decodes: Capacity,
    ) -> Self {
        let options = LayerOptions { capacity: ROOM, ..LayerOptions::default() };
        let layer = device.compile_with(*spec, &options).expect("a layer");
        let expand = device.compile(MlaExpand(*spec)).expect("an expansion");
        let layers = weights.iter().map(|weight| Bound::new(&layer, &expand, weight, k_scale)).collect();
        Self { step: layer.step(decodes).expect("a step"), layer, expand, layers }
    }

    /// What a batch needs before the captured layers: page copies of forks, and expanded prefixes.
    pub(super) fn prepare(
        &mut self,
        inputs: &[Inputs],
        copies: &[(u32, u32)],
        (batch, policy): (&LayerBatch<'_>, SplitPolicy),
        prefix_pages: &[Vec<i32>],
    ) {
        let (device, spec) = (self.layer.device().clone(), *self.layer.op());
        let copy = KvCopyPages { shape: spec.shape, kv: spec.kv };
        for (bound, inputs) in self.layers.iter().zip(inputs) {
            device.once(copy, copies, &KvView::dense(&bound.kv, &spec.mla())).expect("copied");
            for (buffer, bytes) in bound.inputs.iter().zip(inputs) {
                device.upload(buffer, 0, bytes).expect("uploaded");
            }
            for (&ExpandedPrefix { tokens, first_row, .. }, pages) in batch.expanded.iter().zip(prefix_pages)
            {
                let mut step = self.expand.step(()).expect("a step");
                self.expand.prepare(&mut step, ExpandBatch { pages, tokens, first_row }).expect("prepared");
                self.expand.run(&step, &bound.expansion).expect("expanded");
            }
        }
        self.layer.prepare(&mut self.step, (batch, policy)).expect("prepared");
    }

    fn run(&self) {
        self.layers.iter().for_each(|bound| self.layer.run(&self.step, &bound.binding).expect("runs"));
    }

    fn forget_outputs(&self) {
        for bound in &self.layers {
            let poison = vec![0xFF; D::size(&bound.out) as usize];
            self.layer.device().upload(&bound.out, 0, &poison).expect("uploaded");
        }
    }

    /// Each layer's output of so many tokens, and its cache.
    fn read(&self, tokens: usize) -> Vec<[Vec<f32>; 2]> {
        let spec = self.layer.op();
        let row = (spec.shape.num_heads * spec.v_head_dim) as usize;
        let cache = spec.kv.num_slots() as usize * spec.shape.row_elems() as usize;
        let read = |bound: &Bound<D>| {
            [(&bound.out, spec.dtype, tokens * row), (&bound.kv, spec.kv.dtype(), cache)].map(
                |(buffer, dtype, elems)| {
                    let bytes = (elems * dtype.bytes()) as u64;
                    dtype.decode_all(&self.layer.device().download(buffer, bytes).expect("read"))
                },
            )
        };
        self.layers.iter().map(read).collect()
    }
}

impl Model<Cuda> {
    /// All layers as one graph.
    pub(super) fn captured(&self) -> Graph {
        captured(self.layer.device(), || {
            self.layers.iter().try_for_each(|bound| self.layer.record(&self.step, &bound.binding))
        })
    }
}

impl<D: Backend> Bound<D> {
    fn new(
        layer: &Compiled<MlaLayer, D>,
        expand: &Compiled<MlaExpand, D>,
        weight: &[u8],
        k_scale: f32,
    ) -> Self {
        let (device, spec) = (layer.device(), layer.op());
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
        let kv = filled(&spec.kv.dtype().encode_all(&vec![f32::NAN; elems]));
        let arrays = spec.expanded_bytes(PREFIX_ROWS).map(|bytes| filled(&vec![0; bytes as usize]));
        let heads = spec.shape.num_heads;
        let out = filled(&vec![0; (TOKENS * heads * spec.v_head_dim) as usize * spec.dtype.bytes()]);

        let q_nope = View::dense(&inputs[0], heads, spec.qk_nope_head_dim + rope);
        let args = MlaLayerArgs {
            q_nope,
            q_pe: View { offset: spec.qk_nope_head_dim.into(), ..q_nope },
            kv_c: View::dense(&inputs[1], 1, spec.shape.kv_lora_rank),
            k_pe: View::dense(&inputs[2], 1, rope),
            kv: KvView::dense(&kv, &spec.mla()),
            kv_b_proj: &weight,
            kv_b_scales: None,
            cos_sin: &cos_sin,
            max_position: MAX_POSITION,
            out: View::dense(&out, heads, spec.v_head_dim),
            softmax_scale: wgpu_mla::softmax_scale(spec.qk_nope_head_dim, rope, 1.0, 1.0).expect("a scale"),
            q_scale: 1.0,
            k_scale,
            out_scale: 1.0,
            expanded: Some(Expanded::dense(spec, arrays.each_ref())),
            selection: wgpu_mla::Selection::All,
            guard: None,
        };
        let MlaLayerArgs { kv: cache, kv_b_proj, kv_b_scales, .. } = args.clone();
        let expanded = Expanded::dense(spec, arrays.each_ref());
        let expand_args = MlaExpandArgs { kv: cache, k_scale, kv_b_proj, kv_b_scales, expanded };
        Self {
            binding: layer.bind(&args, ROOM).expect("binds"),
            expansion: expand.bind(&expand_args, PREFIX_ROWS).expect("binds"),
            inputs,
            kv,
            out,
        }
    }
}

/// The same model on the card, as a graph, and on the host in f32, so that the host adds no error of its own.
struct Both {
    card: Model<Cuda>,
    host: Model<Cpu>,
    policy: SplitPolicy,
    pool: PagePool,
    rng: Rng,
    /// The graph, and the step's generation that it was captured in.
    graph: Option<(u64, Graph)>,
    /// Outputs of all batches, of the card and of the host.
    all: (Vec<f32>, Vec<f64>),
}

impl Both {
    /// One batch: so many new tokens of each sequence. `replays`: whether the previous batch's graph is replayed.
    fn step(&mut self, name: &str, replays: bool, requests: &[(SeqId, u32)], prefixes: &[ExpandedPrefix]) {
        let spec = *self.card.layer.op();
        let name = format!("{} over {}, {:?}, {name}", spec.dtype, spec.kv.dtype(), self.policy);
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
        let inputs: Vec<Inputs> = (0..LAYERS)
            .map(|_| {
                let [q, kv_c, k_pe] = input_elems(&spec).map(|elems| tokens * elems);
                [(q, 0.7), (kv_c, 0.3), (k_pe, 0.5)]
                    .map(|(elems, scale)| draw(&mut self.rng, spec.dtype, elems, scale))
            })
            .collect();

        let Self { card, host, graph, policy, .. } = self;
        let to_f32 = |bytes: &Vec<u8>| Dtype::F32.encode_all(&spec.dtype.decode_all(bytes));
        let exact: Vec<Inputs> = inputs.iter().map(|inputs| inputs.each_ref().map(to_f32)).collect();
        host.prepare(&exact, &append.copies, (&batch, *policy), &prefix_pages);
        host.run();
        card.prepare(&inputs, &append.copies, (&batch, *policy), &prefix_pages);
        let generation = card.step.generation();
        let serves = graph.as_ref().is_some_and(|(captured_in, _)| *captured_in == generation);
        assert_eq!(serves, replays, "{name}: whether the graph still serves");
        if !serves {
            if let Some((_, stale)) = graph {
                let refused = stale.launch().expect_err("a graph of another generation");
                assert!(refused.to_string().contains("capture the graph again"), "{name}: {refused}");
            }
            *graph = Some((generation, card.captured()));
        }
        graph.as_ref().expect("captured").1.launch().expect("launched");

        let got = card.read(tokens);
        // What is launched without a graph gives the same bits.
        card.forget_outputs();
        card.run();
        assert_eq!(bits(&card.read(tokens)), bits(&got), "{name}: the graph's bits, and those without it");
        // Rotated elements may be rounded to a neighbour.
        let step = match spec.kv.dtype() {
            Dtype::F32 | Dtype::F16 => 1.0 / 1024.0,
            Dtype::Bf16 | Dtype::E4m3 => 1.0 / 8.0,
        };
        for (layer, ([_, got], [_, want])) in got.iter().zip(host.read(tokens)).enumerate() {
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                let is_close =
                    (got - want).abs() <= step * want.abs() + 1e-6 || (got.is_nan() && want.is_nan());
                assert!(is_close, "{name}: element {at} of layer {layer}'s cache is {got}, not {want}");
            }
        }
        // The host attends exactly the card's cache.
        for (bound, [_, cache]) in host.layers.iter().zip(&got) {
            let codes = spec.kv.dtype().encode_all(cache);
            host.layer.device().upload(&bound.kv, 0, &codes).expect("uploaded");
        }
        let attended = LayerBatch { slot_mapping: &vec![-1; tokens], ..batch };
        host.prepare(&exact, &[], (&attended, *policy), &prefix_pages);
        host.run();
        let tolerance = match spec.dtype {
            Dtype::F32 if !card.layer.rounds_weights() => {
                Tolerance { abs: 0.0, rel: 0.0, row: Some((spec.v_head_dim as usize, 2e-5)), cos: 1e-9 }
            }
            // Values reach 2. Each of the layer's ops rounds to bf16, so the cosine of so few elements is at its limit: it is taken over
            // all batches.
            Dtype::Bf16 => Tolerance {
                cos: f64::INFINITY,
                ..Tolerance::decode(Dtype::Bf16, Dtype::Bf16, Dtype::Bf16, true, 2.0, 1)
            },
            dtype => Tolerance::decode(dtype, dtype, dtype, true, 1.0, 1),
        };
        for (layer, ([got, _], [want, _])) in got.iter().zip(host.read(tokens)).enumerate() {
            let want: Vec<f64> = want.into_iter().map(f64::from).collect();
            assert!(want.iter().all(|x| x.is_finite()), "{name}");
            close(&format!("{name}, layer {layer}"), got, &want, &tolerance).into_result().expect("right");
            self.all.0.extend(got);
            self.all.1.extend(want);
        }
    }
}

fn bits(read: &[[Vec<f32>; 2]]) -> Vec<u32> {
    read.iter().flatten().flatten().map(|x| x.to_bits()).collect()
}

/// Weights for each layer, and the cache's scale.
pub(super) fn weights(rng: &mut Rng, spec: &MlaLayer) -> (Vec<Vec<u8>>, f32) {
    let rows = (spec.shape.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)) as usize;
    let count = rows * spec.shape.kv_lora_rank as usize;
    let weights = (0..LAYERS).map(|_| draw(rng, spec.weight, count, 1.0 / 16.0)).collect();
    (weights, if spec.kv.dtype() == Dtype::E4m3 { 1.0 / 128.0 } else { 1.0 })
}

/// A small layer in a pool that holds every sequence here.
pub(super) fn spec_of(dtype: Dtype, cache: Dtype) -> MlaLayer {
    let spec = layer_spec(dtype, cache, RopeLayout::Interleaved, 64);
    MlaLayer { kv: KvSpec { num_pages: 80, ..spec.kv }, ..spec }
}

/// Lengths, pages and slots change with every batch; runs of decodes, chunks of prompts and whether prefixes are attended only
/// where the graph is captured again.
fn captured_layers_replay_with_new_batches() -> Outcome {
    let cuda = cuda()?;
    for (dtype, cache) in [(Dtype::F32, Dtype::F16), (Dtype::F16, Dtype::E4m3), (Dtype::Bf16, Dtype::Bf16)] {
        let spec = spec_of(dtype, cache);
        let mut rng = Rng(21);
        let (weights, k_scale) = weights(&mut rng, &spec);
        let exact = spec_of(Dtype::F32, cache);
        let to_f32 = |weight: &Vec<u8>| Dtype::F32.encode_all(&spec.weight.decode_all(weight));
        let exact_weights: Vec<_> = weights.iter().map(to_f32).collect();
        let mut both = Both {
            card: Model::new(&cuda, &spec, &weights, k_scale, DECODES),
            host: Model::new(&Cpu::new(), &exact, &exact_weights, k_scale, DECODES),
            policy: SplitPolicy::Auto,
            pool: PagePool::new(spec.kv).expect("a pool"),
            rng,
            graph: None,
            all: Default::default(),
        };
        let [a, b, c, d, e, f] = [(); 6].map(|()| both.pool.add());
        both.step("prompts", false, &[(a, 42), (c, 9)], &[]);
        both.step("other prompts", true, &[(b, 20), (d, 7)], &[]);
        both.step("one prompt", true, &[(a, 3)], &[]);

        both.step("decodes", false, &[(a, 1), (b, 1), (c, 1), (d, 1)], &[]);
        both.step("fewer decodes", true, &[(b, 2), (c, 1)], &[]);
        both.step("more decodes", true, &[(d, 1), (a, 2), (c, 2), (b, 2)], &[]);
        // Each sequence gets over the end of a page, and the first over those of splits; the batch has 1 to 4 of them.
        for turn in 0..20 {
            both.policy = if turn % 3 == 0 { SplitPolicy::Auto } else { SplitPolicy::FixedTokens(16) };
            let all = [(a, 1), (b, 1), (c, 1), (d, 1)];
            both.step("grows", true, &all[..[4, 1, 3, 2, 4][turn % 5]], &[]);
        }
        both.policy = SplitPolicy::Auto;

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
        // With `Auto` so few sequences would be attended in absorbed form.
        both.policy = SplitPolicy::FixedTokens(16);
        let two = [of(&[0, 1, 2], 40, 24), of(&[3, 4], 16, 3)];
        both.step("two prefixes", false, &[(a, 1), (g, 1), (h, 2), (b, 1), (i, 1), (c, 1)], &two);
        let requests = [(b, 1), (c, 2), (i, 1), (h, 1)];
        both.step("one prefix elsewhere", true, &requests, &[of(&[0, 2], 24, 40)]);
        both.step("a prefix of other sequences", true, &[(d, 1), (g, 2), (a, 1)], &[of(&[1, 2], 32, 0)]);

        let requests = [(g, 1), (a, 1), (f, 5)];
        both.step("a prefix beside a prompt", false, &requests, &[of(&[0, 1], 40, 8)]);
        let requests = [(b, 2), (i, 1), (c, 1), (f, 6)];
        both.step("another beside another", true, &requests, &[of(&[0, 1], 16, 0)]);

        both.policy = SplitPolicy::Auto;
        let few = [of(&[0, 1], 40, 8)];
        both.step("a prefix that costs less in absorbed form", false, &[(g, 1), (a, 1)], &few);

        // More keys than the workspace holds: chunks, whose results are merged.
        both.step("chunks", false, &[(c, 1), (e, 57)], &[]);
        both.step("other chunks", true, &[(h, 2), (d, 1), (b, 18)], &[]);

        let any = Tolerance { abs: f64::INFINITY, ..Tolerance::decode(dtype, dtype, dtype, true, 1.0, 1) };
        let (got, want) = &both.all;
        close(&format!("{dtype} over {cache}, all batches"), got, want, &any).into_result().expect("right");
    }
    Ok(())
}

crate::tests![captured_layers_replay_with_new_batches];
