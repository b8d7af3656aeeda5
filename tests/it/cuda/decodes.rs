//! Decodes as graphs: new lengths, slots and page lists.

use super::uploaded;
use mla_support::Outcome;
use mla_support::close::{Tolerance, close};
use mla_support::graph::{captured, cuda};
use mla_support::paint::{Make, POISON, Problem, sequences};
use mla_support::suite::run::dense_table;
use wgpu_mla::cuda::{Buffer, Cuda};
use wgpu_mla::{
    Batch, Capacity, DecodeOptions, Device, Dtype, Error, KvAppend, KvAppendArgs, KvView, MlaDecodeArgs,
    PageTable, Plan, SplitPolicy, View,
};

/// The graph is captured with the first batch, and replayed with others that fit the step: longer and shorter sequences, more and fewer
/// splits.
fn a_captured_graph_replays_with_new_lengths() -> Outcome {
    let cuda = cuda()?;
    let batches: [&[(u32, u32)]; 4] =
        [&[(70, 1), (33, 1)], &[(150, 1), (90, 1)], &[(5, 1)], &[(0, 1), (149, 2)]];
    for cache in [Dtype::Bf16, Dtype::E4m3, Dtype::F32] {
        let problems =
            batches.map(|lens| Make { cache, sequences: sequences(lens), ..Make::default() }.build());
        let spec = problems[0].spec;
        let decode = cuda.compile(spec).expect("a decode");
        let plans = problems.each_ref().map(|problem| {
            let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
            Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(32)).expect("a plan")
        });
        let capacity = plans.iter().map(Capacity::of).fold(Capacity::default(), Capacity::max);
        let mut step = decode.step(capacity).expect("a step");
        let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
        let most = |bytes: fn(&Problem) -> usize| problems.iter().map(bytes).max().unwrap_or(0) as u64;
        let q = cuda.buffer(most(|problem| problem.q.len())).expect("memory");
        let kv = cuda.buffer(most(|problem| problem.kv.len())).expect("memory");
        let out = cuda.buffer(3 * (heads * latent * 4) as u64).expect("memory");
        let lse = cuda.buffer(3 * (heads * 4) as u64).expect("memory");
        let layer = MlaDecodeArgs {
            k_scale: problems[0].k_scale,
            ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, problems[0].softmax_scale)
        };
        let binding = decode.bind(&layer, 3).expect("a binding");

        let prepare = |step: &mut _, i: usize| {
            cuda.upload(&q, 0, &problems[i].q).expect("uploaded");
            cuda.upload(&kv, 0, &problems[i].kv).expect("uploaded");
            decode.prepare(step, (&plans[i], dense_table(&problems[i]))).expect("prepared");
        };
        prepare(&mut step, 0);
        let graph = captured(&cuda, || decode.record(&step, &binding));

        for turn in [0, 1, 2, 3, 0] {
            let problem = &problems[turn];
            prepare(&mut step, turn);
            assert_eq!(step.capacity(), capacity);
            graph.launch().expect("launched");
            check_decode(&cuda, problem, decode.rounds_weights(), [&out, &lse]);
        }
    }
    Ok(())
}

/// A graph keeps the memory alive that it uses: the step's tables and partial results, and the layer's buffers.
fn a_graph_outlives_what_it_was_captured_from() -> Outcome {
    let cuda = cuda()?;
    let problem = Make { sequences: sequences(&[(150, 1), (90, 2)]), ..Make::default() }.build();
    let spec = problem.spec;
    let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
    let [out, lse] = [latent, 1].map(|row| cuda.buffer((3 * heads * row * 4) as u64).expect("memory"));
    let (graph, rounds_weights) = {
        let decode = cuda.compile(spec).expect("a decode");
        let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
        let plan = Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(32)).expect("a plan");
        let mut step = decode.step(Capacity::of(&plan)).expect("a step");
        let (q, kv) = (uploaded(&cuda, &problem.q), uploaded(&cuda, &problem.kv));
        let layer = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, problem.softmax_scale);
        let binding = decode.bind(&layer, 3).expect("a binding");
        decode.prepare(&mut step, (&plan, dense_table(&problem))).expect("prepared");
        (captured(&cuda, || decode.record(&step, &binding)), decode.rounds_weights())
    };
    // Freed memory would be reused here.
    let others: Vec<_> = (0..64)
        .map(|_| {
            let other = cuda.buffer(problem.kv.len() as u64 / 4 * 4).expect("memory");
            cuda.upload(&other, 0, &vec![POISON; other.bytes() as usize]).expect("uploaded");
            other
        })
        .collect();
    graph.launch().expect("launched");
    check_decode(&cuda, &problem, rounds_weights, [&out, &lse]);
    drop(others);
    Ok(())
}

pub(super) fn check_decode(cuda: &Cuda, problem: &Problem, rounds_weights: bool, [out, lse]: [&Buffer; 2]) {
    let spec = &problem.spec;
    let latent = spec.shape.kv_lora_rank as usize;
    let rows = problem.total_q() * spec.shape.num_heads as usize;
    let got =
        |buffer, elems: usize| Dtype::F32.decode_all(&cuda.download(buffer, elems as u64 * 4).expect("read"));
    let (want_out, want_lse) = problem.expected();
    let largest = problem.largest_latent();
    let tolerance = Tolerance::decode(spec.kv.dtype(), spec.query, spec.out, rounds_weights, largest, latent);
    close(&problem.name, &got(out, rows * latent), &want_out, &tolerance).into_result().expect("right");
    close(&problem.name, &got(lse, rows), &want_lse, &Tolerance::lse()).into_result().expect("right");
}

/// In a graph, so that replays differ in the card's page list only.
fn page_lists_written_on_the_card() -> Outcome {
    let cuda = cuda()?;
    for (cache, variant) in [(Dtype::Bf16, None), (Dtype::E4m3, None), (Dtype::F32, Some("simple"))] {
        let mut problem =
            Make { cache, sequences: sequences(&[(37, 1), (90, 2)]), ..Make::default() }.build();
        // A pool without poison: whatever page is read, the output is finite.
        let elements = problem.kv.chunks_exact_mut(cache.bytes());
        elements.filter(|code| code.iter().all(|&byte| byte == POISON)).for_each(|code| code.fill(0));
        let spec = problem.spec;
        let variant = variant.map(str::to_owned);
        let options = DecodeOptions { variant, device_page_list: true, ..DecodeOptions::default() };
        let decode = cuda.compile_with(spec, &options).expect("a decode");
        let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
        let plan = Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(32)).expect("a plan");
        let mut step = decode.step(Capacity::of(&plan)).expect("a step");
        let (q, kv) = (uploaded(&cuda, &problem.q), uploaded(&cuda, &problem.kv));
        let rows = problem.total_q() * spec.shape.num_heads as usize;
        let out = cuda.buffer((rows * spec.shape.kv_lora_rank as usize * 4) as u64).expect("memory");
        let lse = cuda.buffer(rows as u64 * 4).expect("memory");
        let layer = MlaDecodeArgs {
            k_scale: problem.k_scale,
            ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, problem.softmax_scale)
        };
        let binding = decode.bind(&layer, problem.total_q() as u32).expect("a binding");
        decode.prepare(&mut step, (&plan, PageTable::Device)).expect("prepared");
        let graph = captured(&cuda, || decode.record(&step, &binding));

        let list = step.page_list().expect("a list of the card");
        assert!(list.bytes() >= u64::from(step.capacity().pages) * 4);
        for wild in [u32::MAX, spec.kv.num_pages, 1 << 31] {
            let words = vec![wild; list.bytes() as usize / 4];
            cuda.upload(&list, 0, bytemuck::cast_slice(&words)).expect("uploaded");
            graph.launch().expect("launched");
            let got = Dtype::F32.decode_all(&cuda.download(&out, out.bytes()).expect("read"));
            assert!(got.iter().all(|x| x.is_finite()), "page {wild:#x}");
        }
        for (seq, &len) in problem.seq_lens.iter().enumerate() {
            let used = (len as usize).div_ceil(spec.kv.page_size as usize);
            let pages = &problem.block_table[seq * problem.max_pages..][..used];
            let at = u64::from(plan.page_begin[seq]) * 4;
            cuda.upload(&list, at, bytemuck::cast_slice(pages)).expect("uploaded");
        }
        graph.launch().expect("launched");
        check_decode(&cuda, &problem, decode.rounds_weights(), [&out, &lse]);

        // The host's lists are uploaded again, over whatever the card wrote.
        cuda.upload(&list, 0, &vec![0; list.bytes() as usize]).expect("uploaded");
        decode.prepare(&mut step, (&plan, dense_table(&problem))).expect("prepared");
        graph.launch().expect("launched");
        check_decode(&cuda, &problem, decode.rounds_weights(), [&out, &lse]);
    }
    let spec = Make::default().build().spec;
    let decode = cuda.compile(spec).expect("a decode");
    let mut step = decode.step(Capacity::default()).expect("a step");
    let refused = step.page_list().map(|_| ());
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    let plan = Plan::new(&spec, &decode.tiling(), &Batch::new(&[], &[0]), SplitPolicy::Auto).expect("a plan");
    let refused = decode.prepare(&mut step, (&plan, PageTable::Device));
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    Ok(())
}

/// What a step appends: the last tokens of each sequence, in the order of the batch.
struct Tail {
    slot_mapping: Vec<i64>,
    /// `[tokens, L]` and `[tokens, R]`, encoded.
    kv_c: Vec<u8>,
    k_pe: Vec<u8>,
}

impl Tail {
    /// Takes up to `tokens` tokens of each sequence out of a problem's cache, and leaves poison. After each sequence's is one to skip.
    fn cut(problem: &mut Problem, input: Dtype, tokens: u32) -> Self {
        let (spec, page_size) = (problem.spec, problem.spec.kv.page_size as usize);
        let latent = spec.shape.kv_lora_rank as usize;
        let row_bytes = spec.shape.row_elems() as usize * spec.kv.dtype().bytes();
        let mut tail = Self { slot_mapping: Vec::new(), kv_c: Vec::new(), k_pe: Vec::new() };
        let poison = vec![POISON; spec.shape.row_elems() as usize * input.bytes()];
        for seq in 0..problem.seq_lens.len() {
            let len = problem.seq_lens[seq] as usize;
            for token in len.saturating_sub(tokens as usize)..len {
                let page = problem.block_table[seq * problem.max_pages + token / page_size] as usize;
                let slot = page * page_size + token % page_size;
                let row = &mut problem.kv[slot * row_bytes..][..row_bytes];
                // Codes come back from their values: equal dtypes are copied, and an e4m3 quotient is exact.
                let values = spec.kv.dtype().decode_all(row).into_iter().map(|x| x * problem.k_scale);
                let codes = input.encode_all(&values.collect::<Vec<_>>());
                tail.push(slot as i64, &codes, latent * input.bytes());
                row.fill(POISON);
            }
            tail.push(-1, &poison, latent * input.bytes());
        }
        tail
    }

    fn push(&mut self, slot: i64, codes: &[u8], latent_bytes: usize) {
        self.slot_mapping.push(slot);
        self.kv_c.extend_from_slice(&codes[..latent_bytes]);
        self.k_pe.extend_from_slice(&codes[latent_bytes..]);
    }
}

/// A layer's part of a step in one graph. Each replay appends another number of tokens, to other slots, and attends other lengths.
fn a_captured_append_and_decode_replay_with_new_slots_and_lengths() -> Outcome {
    let cuda = cuda()?;
    let batches: [(&[(u32, u32)], u32); 4] =
        [(&[(70, 1), (33, 1)], 1), (&[(150, 1), (90, 1)], 3), (&[(5, 1)], 0), (&[(0, 1), (149, 2)], 2)];
    for (cache, input) in [(Dtype::Bf16, Dtype::Bf16), (Dtype::E4m3, Dtype::F32), (Dtype::F32, Dtype::F32)] {
        let cut = batches.map(|(lens, tokens)| {
            let whole = Make { cache, sequences: sequences(lens), ..Make::default() }.build();
            let mut before = whole.clone();
            let tail = Tail::cut(&mut before, input, tokens);
            (whole, before, tail)
        });
        let first = &cut[0].0;
        let spec = first.spec;
        let decode = cuda.compile(spec).expect("a decode");
        let plans = cut.each_ref().map(|(problem, ..)| {
            let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
            Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::FixedTokens(32)).expect("a plan")
        });
        let capacity = plans.iter().map(Capacity::of).fold(Capacity::default(), Capacity::max);
        let mut step = decode.step(capacity).expect("a step");
        let append = cuda
            .compile(KvAppend { shape: spec.shape, kv: spec.kv, input, guard: false })
            .expect("an append");
        let most = cut.iter().map(|(.., tail)| tail.slot_mapping.len()).max().unwrap_or(0) as u32;
        let mut slots = append.step(most).expect("a step");

        let elems = |dim: u32| u64::from(most * dim) * input.bytes() as u64;
        let kv_c = cuda.buffer(elems(spec.shape.kv_lora_rank)).expect("memory");
        let k_pe = cuda.buffer(elems(spec.shape.qk_rope_head_dim)).expect("memory");
        let q = cuda.buffer(cut.iter().map(|(p, ..)| p.q.len()).max().unwrap_or(0) as u64).expect("memory");
        let kv = cuda.buffer(first.kv.len() as u64).expect("memory");
        let rows = 3 * u64::from(spec.shape.num_heads);
        let out = cuda.buffer(rows * u64::from(spec.shape.kv_lora_rank) * 4).expect("memory");
        let lse = cuda.buffer(rows * 4).expect("memory");
        let layer = MlaDecodeArgs {
            k_scale: first.k_scale,
            ..MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, first.softmax_scale)
        };
        let new_rows = KvAppendArgs {
            kv_c: View::dense(&kv_c, 1, spec.shape.kv_lora_rank),
            k_pe: View::dense(&k_pe, 1, spec.shape.qk_rope_head_dim),
            kv: KvView::dense(&kv, &spec),
            k_scale: first.k_scale,
            guard: None,
        };
        let binding = decode.bind(&layer, 3).expect("a binding");
        let appends = append.bind(&new_rows, most).expect("a binding");
        // Captured with an empty step: the grids are those of the capacities.
        let none =
            Plan::new(&spec, &decode.tiling(), &Batch::new(&[], &[0]), SplitPolicy::Auto).expect("a plan");
        let no_pages = PageTable::Dense { block_table: &[], max_pages: 0 };
        append.prepare(&mut slots, &[]).expect("prepared");
        decode.prepare(&mut step, (&none, no_pages)).expect("prepared");
        let graph = captured(&cuda, || {
            append.record(&slots, &appends)?;
            decode.record(&step, &binding)
        });

        for turn in [0, 1, 2, 3, 1] {
            let (whole, before, tail) = &cut[turn];
            for (buffer, bytes) in
                [(&q, &before.q), (&kv, &before.kv), (&kv_c, &tail.kv_c), (&k_pe, &tail.k_pe)]
            {
                cuda.upload(buffer, 0, bytes).expect("uploaded");
            }
            append.prepare(&mut slots, &tail.slot_mapping).expect("prepared");
            decode.prepare(&mut step, (&plans[turn], dense_table(whole))).expect("prepared");
            assert_eq!((slots.capacity(), step.capacity()), (most, capacity));
            graph.launch().expect("launched");
            let cache = cuda.download(&kv, whole.kv.len() as u64).expect("read");
            assert!(cache == whole.kv, "{cache}, turn {turn}: the cache", cache = spec.kv.dtype());
            check_decode(&cuda, whole, decode.rounds_weights(), [&out, &lse]);
        }

        // What does not fit the binding is refused before anything is launched.
        append.prepare(&mut slots, &vec![-1; most as usize + 1]).expect("prepared");
        let refused = append.record(&slots, &appends);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        assert_eq!(slots.used(), most + 1);
        // So is a step with a slot that is wrong, until it is prepared again.
        let wrong = append.prepare(&mut slots, &[0, spec.kv.num_slots() as i64]);
        assert!(matches!(wrong, Err(Error::SlotOutOfRange { index: 1, .. })), "{wrong:?}");
        let refused = append.record(&slots, &appends);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        append.prepare(&mut slots, &[0]).expect("prepared");
        append.record(&slots, &appends).expect("launched");
    }
    Ok(())
}

crate::tests![
    a_captured_graph_replays_with_new_lengths,
    a_graph_outlives_what_it_was_captured_from,
    page_lists_written_on_the_card,
    a_captured_append_and_decode_replay_with_new_slots_and_lengths,
];
