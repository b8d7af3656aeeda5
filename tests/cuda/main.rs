//! What only the CUDA backend promises: an error without a driver, and graphs that replay with new lengths, slots and copies.

mod common;

use common::close::{Tolerance, close};
use common::graph::{captured, cuda};
use common::paint::{Make, POISON, Problem, Rng, sequences};
use common::suite::run::dense_table;
use wgpu_mla::cuda::ops::{
    CopySpec, HeadProject, KvAppend, KvCopyPages, MergeAttnStates, MlaPrefill, Rotate, RotateAppend,
};
use wgpu_mla::cuda::{Buffer, Cuda, Decode, Options};
use wgpu_mla::prefill::PrefillExtent;
use wgpu_mla::reference::{Expanded, State, copy_pages, merge_attn_states, mla_prefill};
use wgpu_mla::{
    AppendLayer, AppendSpec, Backend, Batch, Capacity, Dtype, Error, KvSpec, KvView, Layer, MergeStates,
    MergeStatesSpec, MlaShape, PageTable, Plan, Policy, Prefill, PrefillSequence, PrefillSpec, Project,
    ProjectSpec, Rope, RopeAppend, RopeAppendSpec, RopeLayout, RopeSpec, View, WeightOrder, WeightView,
};

/// A buffer of bytes, whole words.
fn uploaded(cuda: &Cuda, bytes: &[u8]) -> Buffer {
    let buffer = cuda.buffer(bytes.len() as u64).expect("memory");
    cuda.upload(&buffer, 0, bytes).expect("uploaded");
    buffer
}

#[test]
fn no_card_is_an_error_that_names_the_cure() {
    // There is none of that number, with a driver or without.
    let error = Cuda::new(1_000).expect_err("no machine has so many cards");
    assert!(matches!(error, Error::NoCuda { .. }), "{error:?}");
    assert!(error.to_string().contains("install NVIDIA's driver"), "{error}");
    println!("{error}");
}

/// Instead of a driver of long ago, a library that has nothing of one. This program runs itself with it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn a_driver_without_what_is_called_is_an_error_too() {
    use std::{path::Path, process::Command};
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a list of what is mapped");
    let other =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("libgcc_s"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-not-a-driver");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::copy(other.expect("every program has it"), folder.join("libcuda.so")).expect("a copy");

    let mut again = Command::new(std::env::current_exe().expect("a path"));
    again.args(["--exact", "no_card_is_an_error_that_names_the_cure", "--nocapture"]);
    let ran = again.env("LD_LIBRARY_PATH", folder).output().expect("it runs");
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{text}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(text.contains("no CUDA device: the driver's library has no cuInit; install"), "{text}");
}

/// The graph is captured with the first batch, and replayed with others that fit the step: longer and shorter sequences, more and fewer splits.
#[test]
fn a_captured_graph_replays_with_new_lengths() {
    let Some(cuda) = cuda() else { return };
    let batches: [&[(u32, u32)]; 4] =
        [&[(70, 1), (33, 1)], &[(150, 1), (90, 1)], &[(5, 1)], &[(0, 1), (149, 2)]];
    for cache in [Dtype::Bf16, Dtype::E4m3, Dtype::F32] {
        let problems =
            batches.map(|lens| Make { cache, sequences: sequences(lens), ..Make::default() }.build());
        let spec = problems[0].spec;
        let decode = cuda.decode(&spec, None).expect("a row");
        let plans = problems.each_ref().map(|problem| {
            let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
            Plan::new(&spec, &cuda.tiling(&decode), &batch, Policy::FixedTokens(32)).expect("a plan")
        });
        let capacity = plans.iter().map(Capacity::of).fold(Capacity::default(), Capacity::max);
        let mut step = cuda.step(&decode, capacity).expect("a step");
        let (heads, latent) = (spec.shape.num_heads as usize, spec.shape.kv_lora_rank as usize);
        let most = |bytes: fn(&common::paint::Problem) -> usize| {
            problems.iter().map(bytes).max().unwrap_or(0) as u64
        };
        let q = cuda.buffer(most(|problem| problem.q.len())).expect("memory");
        let kv = cuda.buffer(most(|problem| problem.kv.len())).expect("memory");
        let out = cuda.buffer(3 * (heads * latent * 4) as u64).expect("memory");
        let lse = cuda.buffer(3 * (heads * 4) as u64).expect("memory");
        let layer = Layer {
            k_scale: problems[0].k_scale,
            ..Layer::dense(&spec, &q, &kv, &out, &lse, problems[0].softmax_scale)
        };
        let binding = cuda.bind(&decode, 3, &layer).expect("a binding");

        let prepare = |step: &mut _, i: usize| {
            cuda.upload(&q, 0, &problems[i].q).expect("uploaded");
            cuda.upload(&kv, 0, &problems[i].kv).expect("uploaded");
            cuda.prepare(&decode, step, &plans[i], dense_table(&problems[i])).expect("prepared");
        };
        prepare(&mut step, 0);
        let graph = captured(&cuda, || decode.record(&step, &binding));

        for turn in [0, 1, 2, 3, 0] {
            let problem = &problems[turn];
            prepare(&mut step, turn);
            assert_eq!(step.capacity(), capacity);
            graph.launch().expect("launched");
            check_decode(&cuda, problem, cuda.rounds_weights(&decode), [&out, &lse]);
        }
    }
}

fn check_decode(cuda: &Cuda, problem: &Problem, rounds_weights: bool, [out, lse]: [&Buffer; 2]) {
    let spec = &problem.spec;
    let latent = spec.shape.kv_lora_rank as usize;
    let rows = problem.total_q() * spec.shape.num_heads as usize;
    let got =
        |buffer, elems: usize| Dtype::F32.decode_all(&cuda.download(buffer, elems as u64 * 4).expect("read"));
    let (want_out, want_lse) = problem.expected();
    let largest = problem.largest_latent();
    let tolerance = Tolerance::decode(spec.kv.dtype, spec.query, spec.out, rounds_weights, largest, latent);
    close(&problem.name, &got(out, rows * latent), &want_out, &tolerance).into_result().expect("right");
    close(&problem.name, &got(lse, rows), &want_lse, &Tolerance::lse()).into_result().expect("right");
}

/// In a graph, so that a list which the card wrote is all that differs between replays.
#[test]
fn page_lists_written_on_the_card() {
    let Some(cuda) = cuda() else { return };
    for (cache, row) in [(Dtype::Bf16, None), (Dtype::E4m3, None), (Dtype::F32, Some("simple"))] {
        let mut problem =
            Make { cache, sequences: sequences(&[(37, 1), (90, 2)]), ..Make::default() }.build();
        // A pool without poison: whatever page is read, the output is finite.
        let elements = problem.kv.chunks_exact_mut(cache.bytes());
        elements.filter(|code| code.iter().all(|&byte| byte == POISON)).for_each(|code| code.fill(0));
        let spec = problem.spec;
        let options = Options { device_page_list: true, variant: row.map(str::to_owned), query_tokens: 1 };
        let decode = Decode::new(&cuda, &spec, &options).expect("a row");
        let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
        let plan = Plan::new(&spec, &decode.tiling(), &batch, Policy::FixedTokens(32)).expect("a plan");
        let mut step = decode.step(Capacity::of(&plan)).expect("a step");
        let (q, kv) = (uploaded(&cuda, &problem.q), uploaded(&cuda, &problem.kv));
        let rows = problem.total_q() * spec.shape.num_heads as usize;
        let out = cuda.buffer((rows * spec.shape.kv_lora_rank as usize * 4) as u64).expect("memory");
        let lse = cuda.buffer(rows as u64 * 4).expect("memory");
        let layer = Layer {
            k_scale: problem.k_scale,
            ..Layer::dense(&spec, &q, &kv, &out, &lse, problem.softmax_scale)
        };
        let binding = decode.bind(problem.total_q() as u32, &layer).expect("a binding");
        let graph = captured(&cuda, || decode.record(&step, &binding));
        decode.prepare(&mut step, &plan, PageTable::Device).expect("prepared");

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
        decode.prepare(&mut step, &plan, dense_table(&problem)).expect("prepared");
        graph.launch().expect("launched");
        check_decode(&cuda, &problem, decode.rounds_weights(), [&out, &lse]);
    }
    let spec = Make::default().build().spec;
    let decode = Decode::new(&cuda, &spec, &Options::default()).expect("a row");
    let mut step = decode.step(Capacity::default()).expect("a step");
    let refused = step.page_list().map(|_| ());
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    let plan = Plan::new(&spec, &decode.tiling(), &Batch::new(&[], &[0]), Policy::Auto).expect("a plan");
    let refused = decode.prepare(&mut step, &plan, PageTable::Device);
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
}

/// What a step appends: the last tokens of each sequence, in the order of the batch.
struct Tail {
    slot_mapping: Vec<i64>,
    /// `[tokens, L]` and `[tokens, R]`, encoded.
    kv_c: Vec<u8>,
    k_pe: Vec<u8>,
}

impl Tail {
    /// Takes up to `tokens` tokens of each sequence out of a problem's cache, and leaves poison. Behind each sequence's is one to skip.
    fn cut(problem: &mut Problem, input: Dtype, tokens: u32) -> Self {
        let (spec, page_size) = (problem.spec, problem.spec.kv.page_size as usize);
        let latent = spec.shape.kv_lora_rank as usize;
        let row_bytes = spec.shape.row_elems() as usize * spec.kv.dtype.bytes();
        let mut tail = Self { slot_mapping: Vec::new(), kv_c: Vec::new(), k_pe: Vec::new() };
        let poison = vec![POISON; spec.shape.row_elems() as usize * input.bytes()];
        for seq in 0..problem.seq_lens.len() {
            let len = problem.seq_lens[seq] as usize;
            for token in len.saturating_sub(tokens as usize)..len {
                let page = problem.block_table[seq * problem.max_pages + token / page_size] as usize;
                let slot = page * page_size + token % page_size;
                let row = &mut problem.kv[slot * row_bytes..][..row_bytes];
                // Codes come back from their values: equal dtypes are copied, and an e4m3 quotient is exact.
                let values = spec.kv.dtype.decode_all(row).into_iter().map(|x| x * problem.k_scale);
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
#[test]
fn a_captured_append_and_decode_replay_with_new_slots_and_lengths() {
    let Some(cuda) = cuda() else { return };
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
        let decode = cuda.decode(&spec, None).expect("a row");
        let plans = cut.each_ref().map(|(problem, ..)| {
            let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
            Plan::new(&spec, &cuda.tiling(&decode), &batch, Policy::FixedTokens(32)).expect("a plan")
        });
        let capacity = plans.iter().map(Capacity::of).fold(Capacity::default(), Capacity::max);
        let mut step = cuda.step(&decode, capacity).expect("a step");
        let append =
            KvAppend::new(&cuda, AppendSpec { shape: spec.shape, kv: spec.kv, input }).expect("append");
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
        let layer =
            Layer { k_scale: first.k_scale, ..Layer::dense(&spec, &q, &kv, &out, &lse, first.softmax_scale) };
        let new_rows = AppendLayer {
            kv_c: View::dense(&kv_c, 1, spec.shape.kv_lora_rank),
            k_pe: View::dense(&k_pe, 1, spec.shape.qk_rope_head_dim),
            kv: KvView::dense(&kv, &spec),
            k_scale: first.k_scale,
        };
        let binding = cuda.bind(&decode, 3, &layer).expect("a binding");
        let appends = append.bind(&new_rows, most).expect("a binding");
        // Captured before anything is prepared: the grids are those of the capacities.
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
            cuda.prepare(&decode, &mut step, &plans[turn], dense_table(whole)).expect("prepared");
            assert_eq!((slots.max_tokens(), step.capacity()), (most, capacity));
            graph.launch().expect("launched");
            let cache = cuda.download(&kv, whole.kv.len() as u64).expect("read");
            assert!(cache == whole.kv, "{cache}, turn {turn}: the cache", cache = spec.kv.dtype);
            check_decode(&cuda, whole, cuda.rounds_weights(&decode), [&out, &lse]);
        }

        // What does not fit the binding is refused before anything is launched.
        append.prepare(&mut slots, &vec![-1; most as usize + 1]).expect("prepared");
        let refused = append.record(&slots, &appends);
        assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
        // A slot that is wrong is found before the step changes.
        let wrong = append.prepare(&mut slots, &[0, spec.kv.num_slots() as i64]);
        assert!(matches!(wrong, Err(Error::SlotOutOfRange { index: 1, .. })), "{wrong:?}");
        assert_eq!(slots.num_tokens(), most + 1);
    }
}

/// One graph of both ops; each replay has other slots, as many tokens as fit, and another range of queries to rotate in place.
#[test]
fn captured_rotations_replay_with_new_slots_and_ranges() {
    let Some(cuda) = cuda() else { return };
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { dtype: Dtype::F32, page_size: 4, num_pages: 2 };
    let append = AppendSpec { shape, kv, input: Dtype::F32 };
    let layout = RopeLayout::HalfSplit;
    let spec = RopeAppendSpec { append, query: Dtype::F32, num_heads: 2, layout };
    let of = RopeSpec { dtype: Dtype::F32, num_heads: 2, rope_dim: 32, layout };
    let (fused, rotate) =
        (RotateAppend::new(&cuda, spec).expect("loads"), Rotate::new(&cuda, of).expect("loads"));
    // Nothing but the first pair of a row is not 0, and each call turns it by a quarter.
    let row = |x: f32| [&[x][..], &[0.0; 31]].concat();
    let queries = Dtype::F32.encode_all(&row(3.0).repeat(4 * 2));
    let (q, q_out) = (uploaded(&cuda, &queries), uploaded(&cuda, &queries));
    let rows = uploaded(&cuda, &Dtype::F32.encode_all(&[vec![2.0; 256], row(7.0)].concat().repeat(4)));
    let quarter = [vec![0.0; 16], vec![1.0; 16]].concat();
    let (cos_sin, places) = (uploaded(&cuda, &Dtype::F32.encode_all(&quarter)), uploaded(&cuda, &[0xFF; 16]));
    let cache = uploaded(&cuda, &vec![0; 8 * 288 * 4]);
    let view = |offset| View { buffer: &rows, offset, token_stride: 288, head_stride: 0 };
    let kv_view = KvView { buffer: &cache, offset: 0, block_stride: 4 * 288, layer_stride: 0, layer: 0 };
    let args = RopeAppend {
        q_pe: View::dense(&q, 2, 32),
        q_pe_out: View::dense(&q_out, 2, 32),
        layer: AppendLayer { kv_c: view(0), k_pe: view(256), kv: kv_view, k_scale: 1.0 },
        positions: &places,
        cos_sin: &cos_sin,
        max_position: 1,
    };
    let again = Rope {
        x: View::dense(&q_out, 2, 32),
        y: View::dense(&q_out, 2, 32),
        positions: &places,
        cos_sin: &cos_sin,
        max_position: 1,
        num_tokens: 4,
    };
    let (mut slots, mut range) = (fused.step(4).expect("a step"), rotate.step(4).expect("a step"));
    let (layer, in_place) = (fused.bind(&args, 4).expect("binds"), rotate.bind(&again).expect("binds"));
    let graph = captured(&cuda, || {
        fused.record(&slots, &layer)?;
        rotate.record(&range, &in_place)
    });
    let turned = [&[0.0; 16][..], &[1.0], &[0.0; 15]].concat();
    for (slot_mapping, first, count) in
        [(&[5, 0, -1, 7][..], 1, 2), (&[3], 0, 1), (&[], 0, 0), (&[1, 2, 6], 2, 2), (&[4, -1, 2], 0, 4)]
    {
        cuda.upload(&q_out, 0, &queries).expect("uploaded");
        cuda.upload(&cache, 0, &vec![0; 8 * 288 * 4]).expect("cleared");
        fused.prepare(&mut slots, slot_mapping).expect("prepared");
        rotate.prepare(&mut range, first, count).expect("prepared");
        graph.launch().expect("launched");
        let read = |buffer, bytes| Dtype::F32.decode_all(&cuda.download(buffer, bytes).expect("read"));
        // By no quarter, one, or two.
        let quarters = [row(3.0), turned.iter().map(|x| 3.0 * x).collect(), row(-3.0)];
        for (at, got) in read(&q_out, 4 * 2 * 32 * 4).chunks(32).enumerate() {
            let token = at as u32 / 2;
            let fused = usize::from(at / 2 < slot_mapping.len());
            let turns = fused + usize::from((first..first + count).contains(&token));
            assert_eq!(got, quarters[turns], "token {token} of {slot_mapping:?}, from {first} {count}");
        }
        let key: Vec<f32> = turned.iter().map(|x| 7.0 * x).collect();
        for (slot, got) in read(&cache, 8 * 288 * 4).chunks(288).enumerate() {
            let is_written = slot_mapping.contains(&(slot as i64));
            let want = if is_written { [vec![2.0; 256], key.clone()].concat() } else { vec![0.0; 288] };
            assert_eq!(got, want, "slot {slot} of {slot_mapping:?}");
        }
    }
}

/// One graph of both ops: queries are twice `x`, and then attend. Each replay has other tokens and sequences.
#[test]
fn captured_projections_and_prefills_replay_with_new_tokens() {
    let Some(cuda) = cuda() else { return };
    let (tokens, keys, heads) = (80, 90, 2);
    let dims = [16u32, 8, 24];
    let [nope, rope, value] = dims.map(|dim| dim as usize);
    let f32s = Dtype::F32;
    let to_queries = ProjectSpec {
        input: f32s,
        weight: f32s,
        output: f32s,
        num_heads: heads,
        k: dims[0],
        n: dims[0],
        order: WeightOrder::Kn,
    };
    let attention = PrefillSpec {
        num_heads: heads,
        qk_nope_head_dim: dims[0],
        qk_rope_head_dim: dims[1],
        v_head_dim: dims[2],
        dtype: f32s,
        out: f32s,
    };
    let project = HeadProject::new(&cuda, to_queries).expect("loads");
    let prefill = MlaPrefill::new(&cuda, attention).expect("loads");
    let mut rng = Rng(3);
    let mut draw = |count: usize| (0..count).map(|_| rng.randn()).collect::<Vec<f32>>();
    let h = heads as usize;
    let (x, q_pe) = (draw(tokens * h * nope), draw(tokens * h * rope));
    let (k_nope, k_pe, v) = (draw(keys * h * nope), draw(keys * rope), draw(keys * h * value));
    let weight: Vec<f32> =
        (0..h * nope * nope).map(|i| if i / nope % nope == i % nope { 2.0 } else { 0.0 }).collect();
    let q_nope: Vec<f32> = x.iter().map(|x| 2.0 * x).collect();
    let [x, weight, q_pe_buffer, k_nope_buffer, k_pe_buffer, v_buffer] =
        [&x, &weight, &q_pe, &k_nope, &k_pe, &v].map(|array| uploaded(&cuda, &f32s.encode_all(array)));
    let poison = |rows: usize| vec![POISON; rows * 4];
    let (queries, outs, lses) = (poison(tokens * h * nope), poison(tokens * h * value), poison(tokens * h));
    let [q, out, lse] = [&queries, &outs, &lses].map(|bytes| uploaded(&cuda, bytes));
    let projected = Project {
        x: View::dense(&x, heads, dims[0]),
        weight: WeightView {
            buffer: &weight,
            offset: 0,
            head_stride: (nope * nope) as u64,
            row_stride: nope as u64,
        },
        y: View::dense(&q, heads, dims[0]),
        num_tokens: tokens as u32,
    };
    let attended = Prefill {
        q_nope: View::dense(&q, heads, dims[0]),
        q_pe: View::dense(&q_pe_buffer, heads, dims[1]),
        k_nope: View::dense(&k_nope_buffer, heads, dims[0]),
        k_pe: View { head_stride: 0, ..View::dense(&k_pe_buffer, 1, dims[1]) },
        v: View::dense(&v_buffer, heads, dims[2]),
        out: View::dense(&out, heads, dims[2]),
        lse: View::dense(&lse, heads, 1),
        softmax_scale: 0.2,
    };
    let max = PrefillExtent { tokens: tokens as u32, keys: keys as u32, rows: tokens as u32 };
    let (to_queries, layer) =
        (project.bind(&projected).expect("binds"), prefill.bind(&attended, max).expect("binds"));
    let (mut range, mut list) =
        (project.step(tokens as u32).expect("a step"), prefill.step(8).expect("a step"));
    // Captured before anything is prepared: the grids are those of the capacities.
    let graph = captured(&cuda, || {
        project.record(&range, &to_queries)?;
        prefill.record(&list, &layer)
    });

    let all = PrefillSequence::all(2, 2, 10, 77);
    let long = [PrefillSequence::causal(0, 70, 0, 70), PrefillSequence::causal(70, 3, 70, 8)];
    for (first, count, sequences) in [
        (0, 5, &[PrefillSequence::causal(0, 5, 0, 9)][..]),
        (0, 73, &long),
        (0, 0, &[]),
        (2, 2, &[all]),
        (0, 80, &[PrefillSequence::causal(0, 80, 0, 90)]),
    ] {
        for (buffer, bytes) in [(&q, &queries), (&out, &outs), (&lse, &lses)] {
            cuda.upload(buffer, 0, bytes).expect("uploaded");
        }
        project.prepare(&mut range, first, count).expect("prepared");
        prefill.prepare(&mut list, sequences).expect("prepared");
        assert_eq!((range.max_tokens(), list.max_tiles()), (tokens as u32, 8));
        graph.launch().expect("launched");

        let read = |buffer, bytes: &[u8]| cuda.download(buffer, bytes.len() as u64).expect("read");
        let (mut want_q, mut rest, mut rest_lse) = (queries.clone(), read(&out, &outs), read(&lse, &lses));
        let some = first as usize * h * nope..(first + count) as usize * h * nope;
        want_q[some.start * 4..some.end * 4].copy_from_slice(&f32s.encode_all(&q_nope[some]));
        assert!(read(&q, &queries) == want_q, "queries {first} {count}");
        let arrays = Expanded {
            num_heads: h,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            v_head_dim: value,
            q_nope: &q_nope,
            q_pe: &q_pe,
            k_nope: &k_nope,
            k_pe: &k_pe,
            v: &v,
            softmax_scale: 0.2f32.into(),
        };
        let (mut got, mut want, mut got_lse, mut want_lse) = (vec![], vec![], vec![], vec![]);
        for (token, head, row, row_lse) in mla_prefill(&arrays, sequences) {
            let at = token * h + head;
            let (row_bytes, lse_bytes) = (at * value * 4..(at + 1) * value * 4, at * 4..(at + 1) * 4);
            got.extend(f32s.decode_all(&rest[row_bytes.clone()]));
            got_lse.extend(f32s.decode_all(&rest_lse[lse_bytes.clone()]));
            rest[row_bytes].fill(POISON);
            rest_lse[lse_bytes].fill(POISON);
            want.extend(row);
            want_lse.push(row_lse);
        }
        assert!(rest == outs && rest_lse == lses, "what is in no sequence was written");
        let tolerance = Tolerance::decode(f32s, f32s, f32s, false, 1.0, value);
        close("out", &got, &want, &tolerance).into_result().expect("right");
        close("lse", &got_lse, &want_lse, &Tolerance::lse()).into_result().expect("right");
    }

    // What does not fit the bindings is refused before anything is launched.
    project.prepare(&mut range, 1, tokens as u32).expect("prepared");
    let refused = project.record(&range, &to_queries);
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    prefill.prepare(&mut list, &[PrefillSequence::causal(0, 1, 90, 1)]).expect("prepared");
    let refused = prefill.record(&list, &layer);
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
}

#[test]
fn captured_copies_replay_with_a_new_list() {
    let Some(cuda) = cuda() else { return };
    let lists: [&[(u32, u32)]; 4] = [&[(0, 3)], &[(1, 4), (2, 5), (1, 0)], &[], &[(5, 0), (4, 1)]];
    for (dtype, page_size, row_elems) in [(Dtype::Bf16, 16, 576), (Dtype::E4m3, 1, 36)] {
        let kv = KvSpec { dtype, page_size, num_pages: 6 };
        let copy = KvCopyPages::new(&cuda, CopySpec { kv, row_elems }).expect("a copy");
        let page_bytes = page_size as usize * row_elems as usize * dtype.bytes();
        let mut rng = Rng(7);
        let mut cache: Vec<u8> = (0..6 * page_bytes).map(|_| rng.next() as u8).collect();
        // Strides are multiples of 8 elements: a page of 36 bytes lies in one of 40.
        let block_stride = u64::from(page_size * row_elems).next_multiple_of(8);
        let stride = block_stride as usize * dtype.bytes();
        let spread = |cache: &[u8]| -> Vec<u8> {
            let page = |page: &[u8]| [page, &vec![POISON; stride - page.len()]].concat();
            cache.chunks(page_bytes).flat_map(page).collect()
        };
        let buffer = uploaded(&cuda, &spread(&cache));
        let view = KvView { buffer: &buffer, offset: 0, block_stride, layer_stride: 0, layer: 0 };
        let mut step = copy.step(3).expect("a step");
        let binding = copy.bind(&view).expect("a binding");
        let graph = captured(&cuda, || copy.record(&step, &binding));
        for list in lists {
            copy.prepare(&mut step, list).expect("prepared");
            assert_eq!((step.max_copies(), step.num_copies()), (3, list.len() as u32));
            graph.launch().expect("launched");
            copy_pages(&mut cache, page_bytes, list);
            let want = spread(&cache);
            let got = cuda.download(&buffer, want.len() as u64).expect("read");
            assert!(got == want, "{dtype} {list:?}");
        }
    }
}

#[test]
fn a_captured_merge_replays_with_new_states() {
    let Some(cuda) = cuda() else { return };
    let (tokens, heads) = (5, 3);
    for (head_size, dtype) in [(128, Dtype::Bf16), (33, Dtype::F32)] {
        let merge = MergeAttnStates::new(&cuda, MergeStatesSpec { dtype, head_size }).expect("a merge");
        let (rows, width) = (tokens * heads, head_size as usize);
        let buffer = |bytes: usize| cuda.buffer(bytes as u64).expect("memory");
        let [prefix, suffix, output] = [(); 3].map(|()| buffer(rows * width * dtype.bytes()));
        let [prefix_lse, suffix_lse, output_lse] = [(); 3].map(|()| buffer(rows * 4));
        let state = |buffer| View::dense(buffer, heads as u32, head_size);
        // [heads, tokens], as vLLM has them.
        let lse = |buffer| View { buffer, offset: 0, token_stride: 1, head_stride: tokens as u64 };
        let args = MergeStates {
            prefix_output: state(&prefix),
            prefix_lse: lse(&prefix_lse),
            suffix_output: state(&suffix),
            suffix_lse: lse(&suffix_lse),
            output: state(&output),
            output_lse: Some(lse(&output_lse)),
            num_tokens: tokens as u32,
            num_heads: heads as u32,
        };
        let binding = merge.bind(&args).expect("a binding");
        let graph = captured(&cuda, || merge.record(&binding));
        for seed in [1, 2] {
            let mut rng = Rng(seed);
            let mut side = |to: &Buffer, to_lse: &Buffer| {
                let codes = dtype.encode_all(&(0..rows * width).map(|_| rng.randn()).collect::<Vec<_>>());
                let lse: Vec<f32> = (0..rows).map(|_| rng.randn()).collect();
                cuda.upload(to, 0, &codes).expect("uploaded");
                cuda.upload(to_lse, 0, &Dtype::F32.encode_all(&lse)).expect("uploaded");
                (dtype.decode_all(&codes), lse)
            };
            let sides = [side(&prefix, &prefix_lse), side(&suffix, &suffix_lse)];
            graph.launch().expect("launched");
            let [a, b] = sides.each_ref().map(|(output, lse)| State { output, lse });
            let (want, want_lse) = merge_attn_states(a, b, heads, width);
            let got = cuda.download(&output, (rows * width * dtype.bytes()) as u64).expect("read");
            let got_lse = cuda.download(&output_lse, rows as u64 * 4).expect("read");
            let tolerance = Tolerance::merge(dtype);
            close("output", &dtype.decode_all(&got), &want, &tolerance).into_result().expect("right");
            let got_lse = Dtype::F32.decode_all(&got_lse);
            close("output_lse", &got_lse, &want_lse, &Tolerance::merge_lse()).into_result().expect("right");
        }
    }
}
