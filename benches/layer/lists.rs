//! A decode step of a layer that makes its own list, and of one that shares it, with each op that they differ by.

use serde_json::json;
use wgpu_mla::{
    Capacity, IndexFormat, IndexerAppend, IndexerAppendArgs, IndexerLogits, IndexerLogitsArgs,
    IndexerLogitsBatch, IndexerQuery, IndexerQueryArgs, IndexerQueryBatch, KvView, LayerIndexer,
    LayerOptions, Mask, MlaLayer, MlaLayerArgs, OwnSelection, RopeAppendBatch, RopeFrequencies, Selection,
    SplitPolicy, TopK, TopKArgs, TopKBatch, TopKPages, TopKSlots, View,
};

use super::problem::{DTYPE, Problem, Shape};
use crate::support::Result;
use crate::support::args::Args;
use crate::support::clock::Timing;
use crate::support::device::{Layers, Timed};
use crate::support::paint::Paint;
use crate::support::record::{micros, timing_fields};

/// DeepSeek-V3.2's.
const INDEX_HEADS: u32 = 64;
const INDEX_DIM: u32 = 128;
const FORMAT: IndexFormat = IndexFormat::DEEPSEEK_V32;
/// Index keys that are made at a time.
const FILL: u32 = 1 << 16;

/// A step whose sequences are longer than a list.
#[derive(Clone, Copy)]
pub struct ListShape {
    pub shape: Shape,
    pub topk: u32,
}

impl ListShape {
    pub fn name(&self) -> String {
        format!("{} topk {}", self.shape.name(), self.topk)
    }
}

/// What an indexer reads and writes, and the arrays between its ops.
struct Index<B> {
    indexer: LayerIndexer,
    k: B,
    q: B,
    weights: B,
    norm: [B; 2],
    cos_sin: B,
    cache: B,
    list: B,
    q_out: B,
    weights_out: B,
    scores: B,
    /// Steps have positions and lengths of their own.
    unread: B,
}

impl<B> Index<B> {
    fn new<D: Timed<Buffer = B>>(gpu: &D, problem: &Problem<B>, topk: u32) -> Result<Self> {
        let (tokens, len) = (problem.shape.tokens(), problem.shape.len);
        // Scores of all query tokens at once.
        let columns = len.next_multiple_of(64);
        let logits_bytes = u64::from(tokens) * u64::from(columns) * 4;
        let indexer = LayerIndexer {
            format: FORMAT,
            num_heads: INDEX_HEADS,
            input: DTYPE,
            max_seq_len: len,
            logits_bytes,
        };
        let painted = |dtype, rows: u32, elems: u32| {
            gpu.painted(&Paint::new(dtype), u64::from(rows) * u64::from(elems))
        };
        let filled = |value: f32| {
            let buffer = gpu.buffer(u64::from(INDEX_DIM) * 4)?;
            gpu.upload(&buffer, 0, bytemuck::cast_slice(&[value; INDEX_DIM as usize])).map(|()| buffer)
        };
        let angles = RopeFrequencies::plain(64, 1e4)?.cos_sin(len)?;
        let cos_sin = gpu.buffer(angles.len() as u64 * 4)?;
        gpu.upload(&cos_sin, 0, bytemuck::cast_slice(&angles))?;
        let heads = tokens * INDEX_HEADS;
        Ok(Self {
            indexer,
            k: painted(DTYPE, FILL.max(tokens), INDEX_DIM)?,
            q: painted(DTYPE, heads, INDEX_DIM)?,
            weights: painted(wgpu_mla::Dtype::F32, heads, 1)?,
            norm: [filled(1.0)?, filled(0.0)?],
            cos_sin,
            cache: gpu.buffer(u64::from(problem.copies) * indexer.index(&problem.spec).cache_bytes())?,
            list: gpu.buffer(u64::from(tokens * topk) * 4)?,
            q_out: gpu.buffer(u64::from(heads * INDEX_DIM))?,
            weights_out: gpu.buffer(u64::from(heads) * 4)?,
            scores: gpu.buffer(logits_bytes)?,
            unread: gpu.buffer(u64::from(FILL.max(tokens)) * 4)?,
        })
    }

    fn cache(&self, problem: &Problem<B>, copy: u32) -> KvView<&B> {
        self.indexer.index(&problem.spec).view_of_layer(&self.cache, copy)
    }

    fn append_args(&self, problem: &Problem<B>, copy: u32) -> IndexerAppendArgs<&B> {
        IndexerAppendArgs {
            k: View::dense(&self.k, 1, INDEX_DIM),
            norm_weight: &self.norm[0],
            norm_bias: &self.norm[1],
            norm_eps: 1e-6,
            positions: &self.unread,
            cos_sin: &self.cos_sin,
            max_position: problem.shape.len,
            cache: self.cache(problem, copy),
        }
    }

    fn own(&self, problem: &Problem<B>, copy: u32, topk: u32) -> OwnSelection<&B> {
        OwnSelection {
            k: View::dense(&self.k, 1, INDEX_DIM),
            q: View::dense(&self.q, INDEX_HEADS, INDEX_DIM),
            weights: View::dense(&self.weights, INDEX_HEADS, 1),
            norm_weight: &self.norm[0],
            norm_bias: &self.norm[1],
            norm_eps: 1e-6,
            cos_sin: &self.cos_sin,
            max_position: problem.shape.len,
            cache: self.cache(problem, copy),
            weight_scale: weight_scale(),
            indices: View::dense(&self.list, topk, 1),
        }
    }

    /// Index keys in every slot of the pool, of each layer that is rotated.
    fn fill<D: Timed<Buffer = B>>(&self, gpu: &D, problem: &Problem<B>) -> Result<()> {
        let append = gpu.compile(IndexerAppend { index: self.indexer.index(&problem.spec), input: DTYPE })?;
        let slots = problem.spec.kv.num_slots() as u32;
        let mut step = append.step(FILL)?;
        for begin in (0..slots).step_by(FILL as usize) {
            let end = slots.min(begin.saturating_add(FILL));
            let slot_mapping: Vec<i64> = (begin..end).map(i64::from).collect();
            // The same keys at other positions are other keys.
            let positions: Vec<i32> =
                (begin..end).map(|slot| ((slot + slot / FILL * 37) % problem.shape.len) as i32).collect();
            append.prepare(
                &mut step,
                RopeAppendBatch { slot_mapping: &slot_mapping, positions: Some(&positions) },
            )?;
            for copy in 0..problem.copies {
                append.run(&step, &append.bind(&self.append_args(problem, copy), step.used())?)?;
            }
        }
        Ok(())
    }
}

fn weight_scale() -> f32 {
    ((INDEX_HEADS * INDEX_DIM) as f32).sqrt().recip()
}

/// The ops of a list, each by itself.
struct Ops<D: Timed> {
    append: Layers<IndexerAppend, D>,
    query: Layers<IndexerQuery, D>,
    logits: Layers<IndexerLogits, D>,
    top_k: Layers<TopK, D>,
}

impl<D: Timed> Ops<D> {
    fn new(gpu: &D, problem: &Problem<D::Buffer>, index: &Index<D::Buffer>, topk: u32) -> Result<Self> {
        let (tokens, batch) = (problem.shape.tokens(), &problem.batch);
        let (pool, columns) = (index.indexer.index(&problem.spec), problem.shape.len.next_multiple_of(64));
        let num_heads = INDEX_HEADS;
        let copies = || 0..problem.copies;
        let positions = Some(&batch.positions[..]);
        let append = gpu.compile(IndexerAppend { index: pool, input: DTYPE })?;
        let slots = RopeAppendBatch { slot_mapping: &batch.slot_mapping, positions };
        let append =
            Layers::new(append, tokens, slots, copies().map(|copy| index.append_args(problem, copy)))?;

        let query = gpu.compile(IndexerQuery { format: FORMAT, num_heads, input: DTYPE })?;
        let [q, weights] = [(&index.q_out, INDEX_DIM), (&index.weights_out, 1)]
            .map(|(buffer, dim)| View::dense(buffer, num_heads, dim));
        let queries = copies().map(|_| IndexerQueryArgs {
            q: View::dense(&index.q, num_heads, INDEX_DIM),
            weights: View::dense(&index.weights, num_heads, 1),
            q_out: q,
            weights_out: weights,
            positions: &index.unread,
            cos_sin: &index.cos_sin,
            max_position: problem.shape.len,
            weight_scale: weight_scale(),
        });
        let query = Layers::new(query, tokens, IndexerQueryBatch { tokens: 0..tokens, positions }, queries)?;

        let logits = View::dense(&index.scores, 1, columns);
        let scores = IndexerLogitsBatch {
            pages: batch.pages(),
            seq_lens: &batch.seq_lens,
            query_start_loc: batch.query_start_loc(),
            mask: Mask::Causal,
            tokens: 0..tokens,
            fill: 0,
        };
        let scored = copies().map(|copy| {
            let cache = index.cache(problem, copy);
            IndexerLogitsArgs { q, weights, cache, logits }
        });
        let op = gpu.compile(IndexerLogits { index: pool, num_heads, query: FORMAT.dtype })?;
        let scored = Layers::new(op, Default::default(), scores, scored)?;

        let slots = Some(TopKSlots { page_size: pool.page_size, num_pages: pool.num_pages });
        let lengths: Vec<i32> = batch.positions.iter().map(|position| position + 1).collect();
        let pages =
            TopKPages { pages: batch.pages(), query_start_loc: batch.query_start_loc(), first_token: 0 };
        let rows = TopKBatch { pages: Some(pages), ..TopKBatch::of(&lengths) };
        let indices = View::dense(&index.list, topk, 1);
        let chosen =
            copies().map(|_| TopKArgs { logits, columns, lengths: &index.unread, indices, values: None });
        let top_k = gpu.compile(TopK { k: topk, slots })?;
        let top_k = Layers::new(top_k, Default::default(), rows, chosen)?;
        Ok(Self { append, query, logits: scored, top_k })
    }

    /// Runs each op of the first layer, in the layer's order.
    fn run_first(&self) -> Result<()> {
        self.append.run_first()?;
        self.query.run_first()?;
        self.logits.run_first()?;
        Ok(self.top_k.run_first()?)
    }

    fn time(&self, gpu: &D, replays: usize) -> Result<[(&'static str, Timing); 4]> {
        Ok([
            ("indexer_append", gpu.time(replays, |r, call| self.append.record(r, call))?),
            ("indexer_query", gpu.time(replays, |r, call| self.query.record(r, call))?),
            ("indexer_logits", gpu.time(replays, |r, call| self.logits.record(r, call))?),
            ("top_k", gpu.time(replays, |r, call| self.top_k.record(r, call))?),
        ])
    }
}

/// The layers that are rotated, with these selections.
fn layers<'a, D: Timed>(
    gpu: &D,
    problem: &'a Problem<D::Buffer>,
    options: &LayerOptions,
    selections: impl Iterator<Item = Selection<&'a D::Buffer>>,
) -> Result<Layers<MlaLayer, D>>
where
    D::Buffer: 'a,
{
    let op = gpu.compile_with(problem.spec, options)?;
    let with = |(copy, selection)| MlaLayerArgs { selection, ..problem.args(copy) };
    let batch = problem.batch.of_layer();
    Ok(Layers::new(op, Capacity::default(), (&batch, SplitPolicy::Auto), (0..).zip(selections).map(with))?)
}

pub const HEADER: &str = "| workload | own list: us | shared list: us | own / shared | us of the ops of a list (share of the layer) | sum: us |\n|---|---|---|---|---|---|";

/// Prints a line, and gives its record.
pub fn time<D: Timed>(gpu: &D, shape: &ListShape, args: &Args) -> Result<serde_json::Value> {
    let ListShape { shape: of, topk } = *shape;
    let problem = Problem::new(gpu, of)?;
    let index = Index::new(gpu, &problem, topk)?;
    index.fill(gpu, &problem)?;
    let options = LayerOptions {
        capacity: problem.capacity(),
        topk,
        indexer: Some(index.indexer),
        ..LayerOptions::default()
    };
    let selections = (0..problem.copies).map(|copy| Selection::Own(index.own(&problem, copy, topk)));
    let own = layers(gpu, &problem, &options, selections)?;
    let selections = (0..problem.copies).map(|_| Selection::Shared(View::dense(&index.list, topk, 1)));
    let shared = layers(gpu, &problem, &options, selections)?;
    let variant = own.op.why().to_owned();

    let list_bytes = u64::from(of.tokens() * topk) * 4;
    own.run_first()?;
    let list = gpu.download(&index.list, list_bytes)?;
    let out = gpu.download(&problem.out, problem.out_bytes())?;
    if !problem.is_finite(&out) || list.chunks(4).any(|entry| entry == [0xFF; 4]) {
        return Err("the output is not finite, or a list is not full".into());
    }
    shared.run_first()?;
    if gpu.download(&problem.out, problem.out_bytes())? != out {
        return Err("the layer that shares the list writes another output".into());
    }
    gpu.upload(&index.list, 0, &vec![0xFF; list_bytes as usize])?;
    let ops = Ops::new(gpu, &problem, &index, topk)?;
    ops.run_first()?;
    if gpu.download(&index.list, list_bytes)? != list {
        return Err("the ops one by one make another list".into());
    }

    let replays = args.replays().min(if gpu.is_software() { 9 } else { usize::MAX });
    let whole = gpu.time(replays, |recorder, call| own.record(recorder, call))?;
    let rest = gpu.time(replays, |recorder, call| shared.record(recorder, call))?;
    let parts = ops.time(gpu, replays)?;
    let us = |seconds: f64| seconds * 1e6;
    let shares = parts.iter().map(|(name, part)| {
        format!("{name} {} ({:.0} %)", micros(us(part.median)), 100.0 * part.median / whole.median)
    });
    let sum: f64 = rest.median + parts.iter().map(|(_, part)| part.median).sum::<f64>();
    println!(
        "| {} | {} | {} | {:.2} | {} | {} |",
        shape.name(),
        micros(us(whole.median)),
        micros(us(rest.median)),
        whole.median / rest.median,
        shares.collect::<Vec<_>>().join(", "),
        micros(us(sum)),
    );
    let parts: serde_json::Map<String, serde_json::Value> =
        parts.iter().map(|(name, part)| ((*name).to_owned(), json!(us(part.median)))).collect();
    let mut record = json!({
        "workload": shape.name(), "variant": variant, "ops_us": parts, "shared_list_us": us(rest.median),
        "own_over_shared": whole.median / rest.median,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&whole));
    }
    Ok(record)
}
