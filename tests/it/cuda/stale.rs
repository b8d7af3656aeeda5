//! Graphs refuse to launch once a step was prepared with what their kernels do not serve, and until they were captured again.

use super::decodes::check_decode;
use super::layers::{Model, spec_of, weights};
use super::uploaded;
use mla_support::Outcome;
use mla_support::graph::{captured, cuda};
use mla_support::paint::{Make, POISON, Problem, Rng, sequences};
use mla_support::suite::run::dense_table;
use wgpu_mla::cuda::{Cuda, Graph};
use wgpu_mla::{
    Batch, Capacity, Device, Dtype, Error, KvAppend, KvAppendArgs, KvSpec, KvView, LayerBatch, MlaDecodeArgs,
    MlaShape, PageTable, Plan, Result, Slabs, SplitPolicy, View,
};

fn refuses(graph: &Graph, why: &str) {
    let refused = graph.launch().expect_err("a graph that would give wrong results");
    assert!(matches!(refused, Error::LayoutMismatch { .. }), "{refused:?}");
    assert!(refused.to_string().contains(why), "{refused}, not {why}");
}

const AGAIN: &str = "capture the graph again";

fn a_decode_that_grew_needs_another_graph() -> Outcome {
    let cuda = cuda()?;
    let batches: [&[(u32, u32)]; 3] = [&[(70, 1), (33, 1)], &[(150, 1), (90, 1)], &[(149, 2), (60, 1)]];
    let problems = batches.map(|lens| Make { sequences: sequences(lens), ..Make::default() }.build());
    let spec = problems[0].spec;
    let decode = cuda.compile(spec).expect("a decode");
    let plans = problems.each_ref().map(|problem| {
        let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
        Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(32)).expect("a plan")
    });
    let most = |bytes: fn(&Problem) -> usize| problems.iter().map(bytes).max().unwrap_or(0) as u64;
    let rows = 3 * u64::from(spec.shape.num_heads);
    let bytes = [most(|problem| problem.q.len()), most(|problem| problem.kv.len())];
    let [q, kv] = bytes.map(|bytes| cuda.buffer(bytes).expect("memory"));
    let [out, lse] =
        [u64::from(spec.shape.kv_lora_rank), 1].map(|row| cuda.buffer(rows * row * 4).expect("memory"));
    let args = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, problems[0].softmax_scale);
    let binding = |room| decode.bind(&args, room).expect("a binding");
    let mut step = decode.step(Capacity::of(&plans[0])).expect("a step");
    let prepare = |step: &mut _, of: usize| {
        cuda.upload(&q, 0, &problems[of].q).expect("uploaded");
        cuda.upload(&kv, 0, &problems[of].kv).expect("uploaded");
        decode.prepare(step, (&plans[of], dense_table(&problems[of]))).expect("prepared");
    };
    let launches = |graph: &Graph, of: usize| {
        cuda.upload(&out, 0, &vec![POISON; out.bytes() as usize]).expect("uploaded");
        graph.launch().expect("launched");
        check_decode(&cuda, &problems[of], decode.rounds_weights(), [&out, &lse]);
    };

    prepare(&mut step, 0);
    let two = binding(2);
    let small = captured(&cuda, || decode.record(&step, &two));
    launches(&small, 0);
    prepare(&mut step, 1);
    refuses(&small, AGAIN);
    // The graph reads tables that the step no longer writes, also for a batch that would have fitted them.
    prepare(&mut step, 0);
    refuses(&small, AGAIN);
    let grown = captured(&cuda, || decode.record(&step, &two));
    launches(&grown, 0);
    prepare(&mut step, 1);
    launches(&grown, 1);

    // Three query tokens, over a binding with room for two.
    let capacity = Capacity::of(&plans[2]).max(step.capacity());
    let mut step = decode.step(capacity).expect("a step");
    prepare(&mut step, 1);
    let (for_two, three) = (captured(&cuda, || decode.record(&step, &two)), binding(3));
    let for_three = captured(&cuda, || decode.record(&step, &three));
    prepare(&mut step, 2);
    refuses(&for_two, "more query tokens");
    launches(&for_three, 2);
    prepare(&mut step, 0);
    launches(&for_two, 0);

    // After a prepare that failed.
    let wild = PageTable::Dense { block_table: &[-1; 64], max_pages: 32 };
    decode.prepare(&mut step, (&plans[0], wild)).expect_err("wild pages");
    refuses(&for_two, "its last prepare failed");
    prepare(&mut step, 1);
    launches(&for_two, 1);
    Ok(())
}

/// Captured before there was room for any token, so that the graph has no kernel for it.
fn an_append_that_grew_needs_another_graph() -> Outcome {
    let cuda = cuda()?;
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 };
    let append = cuda.compile(KvAppend { shape, kv, input: Dtype::F32, guard: false }).expect("an append");
    let rows = uploaded(&cuda, &Dtype::F32.encode_all(&[2.0; 2 * 288]));
    let cache = uploaded(&cuda, &[0; 8 * 288 * 4]);
    let args = KvAppendArgs {
        kv_c: View { buffer: &rows, offset: 0, token_stride: 288, head_stride: 0 },
        k_pe: View { buffer: &rows, offset: 256, token_stride: 288, head_stride: 0 },
        kv: KvView {
            buffer: &cache,
            offset: 0,
            block_stride: 4 * 288 * 4,
            layer_stride: 0,
            layer: 0,
            slabs: Slabs::ONE,
        },
        k_scale: 1.0,
        guard: None,
    };
    let binding = append.bind(&args, 2).expect("binds");
    let mut slots = append.step(0).expect("a step");
    append.prepare(&mut slots, &[]).expect("prepared");
    // Something else in the graph, which is not empty for it.
    let mut one = append.step(1).expect("a step");
    append.prepare(&mut one, &[7]).expect("prepared");
    let record = |slots: &_| append.record(slots, &binding).and_then(|()| append.record(&one, &binding));
    let graph = captured(&cuda, || record(&slots));
    graph.launch().expect("launched");
    append.prepare(&mut slots, &[3, 0]).expect("prepared");
    refuses(&graph, AGAIN);
    let graph = captured(&cuda, || record(&slots));
    graph.launch().expect("launched");
    let got = Dtype::F32.decode_all(&cuda.download(&cache, 8 * 288 * 4).expect("read"));
    for (slot, row) in got.chunks(288).enumerate() {
        let want = if [0, 3, 7].contains(&slot) { 2.0 } else { 0.0 };
        assert!(row.iter().all(|&x| x == want), "slot {slot}: {}", row[0]);
    }
    Ok(())
}

/// A batch of a model: tokens in the cache and new ones of each sequence. None is appended.
fn prepare(model: &mut Model<Cuda>, sequences: &[(i32, i32)]) -> Result<()> {
    let block_table: Vec<i32> = (0..sequences.len() as i32 * 16).collect();
    let seq_lens: Vec<i32> = sequences.iter().map(|&(len, _)| len).collect();
    let mut query_start_loc = vec![0];
    query_start_loc.extend(sequences.iter().scan(0, |end, &(_, new)| {
        *end += new;
        Some(*end)
    }));
    let batch = LayerBatch {
        seq_lens: &seq_lens,
        query_start_loc: &query_start_loc,
        slot_mapping: &vec![-1; query_start_loc[sequences.len()] as usize],
        pages: PageTable::Dense { block_table: &block_table, max_pages: 16 },
        shared_prefixes: &[],
        expanded: &[],
    };
    model.layer.prepare(&mut model.step, (&batch, SplitPolicy::FixedTokens(16)))
}

fn layers_of_another_generation_need_another_graph() -> Outcome {
    let cuda = cuda()?;
    let spec = spec_of(Dtype::F16, Dtype::F16);
    let (weights, k_scale) = weights(&mut Rng(5), &spec);
    // Tables grow as they are needed.
    let mut model = Model::new(&cuda, &spec, &weights, k_scale, Capacity::default());
    let mut generations = Vec::new();
    for (name, batch) in [
        ("decodes", &[(40, 1), (9, 2)][..]),
        // After a batch of the same form, so that nothing but the tables' room is another.
        ("more decodes, whose tables grow", &[(40, 1), (100, 2), (120, 1), (64, 1)]),
        ("a prompt", &[(30, 12)]),
        ("decodes and a prompt", &[(40, 1), (9, 2), (30, 12)]),
        ("chunks of a prompt", &[(100, 9)]),
    ] {
        prepare(&mut model, batch).expect(name);
        let (generation, graph) = (model.step.generation(), model.captured());
        graph.launch().expect(name);
        for (older, stale) in &generations {
            assert!(generation > *older, "{name}");
            refuses(stale, AGAIN);
        }
        prepare(&mut model, &[(40, 1), (129, 1)]).expect_err("past its pages");
        refuses(&graph, "its last prepare failed");
        prepare(&mut model, batch).expect(name);
        assert_eq!(model.step.generation(), generation, "{name}");
        graph.launch().expect(name);
        generations.push((generation, graph));
    }
    Ok(())
}

crate::tests![
    a_decode_that_grew_needs_another_graph,
    an_append_that_grew_needs_another_graph,
    layers_of_another_generation_need_another_graph,
];
