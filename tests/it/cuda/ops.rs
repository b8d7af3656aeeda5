//! The small ops as graphs: new slots, ranges, tokens, lists and states.

use super::uploaded;
use mla_support::Outcome;
use mla_support::cache::shape_of_row;
use mla_support::close::{Tolerance, close};
use mla_support::graph::{captured, cuda};
use mla_support::paint::{POISON, Rng};
use mla_support::reference::{Expanded, State, copy_pages, merge_state, mla_prefill};
use wgpu_mla::cuda::Buffer;
use wgpu_mla::{
    Device, Dtype, Error, HeadProject, HeadProjectArgs, KvAppend, KvAppendArgs, KvCopyPages, KvSpec, KvView,
    MergeState, MergeStateArgs, MlaPrefill, MlaPrefillArgs, MlaShape, PrefillExtent, PrefillSequence, Rope,
    RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent, RopeArgs, RopeLayout, Slabs, View,
    WeightOrder, WeightView,
};

/// One graph of both ops; each replay has other slots, as many tokens as fit, and another range of queries to rotate in place.
fn captured_rotations_replay_with_new_slots_and_ranges() -> Outcome {
    let cuda = cuda()?;
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 };
    let append = KvAppend { shape, kv, input: Dtype::F32, guard: false };
    let layout = RopeLayout::HalfSplit;
    let spec = RopeAppend { append, query: Dtype::F32, query_out: Dtype::F32, num_heads: 2, layout };
    let of = Rope { dtype: Dtype::F32, num_heads: 2, rope_dim: 32, layout };
    let (fused, rotate) = (cuda.compile(spec).expect("loads"), cuda.compile(of).expect("loads"));
    // All but the first pair of a row are 0, and each call rotates it by a quarter turn.
    let row = |x: f32| [&[x][..], &[0.0; 31]].concat();
    let queries = Dtype::F32.encode_all(&row(3.0).repeat(4 * 2));
    let (q, q_out) = (uploaded(&cuda, &queries), uploaded(&cuda, &queries));
    let rows = uploaded(&cuda, &Dtype::F32.encode_all(&[vec![2.0; 256], row(7.0)].concat().repeat(4)));
    let quarter = [vec![0.0; 16], vec![1.0; 16]].concat();
    let (cos_sin, places) = (uploaded(&cuda, &Dtype::F32.encode_all(&quarter)), uploaded(&cuda, &[0xFF; 16]));
    let cache = uploaded(&cuda, &vec![0; 8 * 288 * 4]);
    let view = |offset| View { buffer: &rows, offset, token_stride: 288, head_stride: 0 };
    let kv_view = KvView {
        buffer: &cache,
        offset: 0,
        block_stride: 4 * 288 * 4,
        layer_stride: 0,
        layer: 0,
        slabs: Slabs::ONE,
    };
    let args = RopeAppendArgs {
        q_pe: View::dense(&q, 2, 32),
        q_pe_out: View::dense(&q_out, 2, 32),
        layer: KvAppendArgs { kv_c: view(0), k_pe: view(256), kv: kv_view, k_scale: 1.0, guard: None },
        positions: &places,
        cos_sin: &cos_sin,
        max_position: 1,
        q_pe_scale: 1.0,
        q_scale: 1.0,
    };
    let again = RopeArgs {
        x: View::dense(&q_out, 2, 32),
        y: View::dense(&q_out, 2, 32),
        positions: &places,
        cos_sin: &cos_sin,
        max_position: 1,
        scale: 1.0,
    };
    let (mut slots, mut range) = (fused.step(4).expect("a step"), rotate.step(4).expect("a step"));
    let (layer, in_place) =
        (fused.bind(&args, RopeAppendExtent::of(4)).expect("binds"), rotate.bind(&again, 4).expect("binds"));
    fused.prepare(&mut slots, RopeAppendBatch::slots(&[])).expect("prepared");
    rotate.prepare(&mut range, 0..0).expect("prepared");
    // The grids are those of the capacities.
    let graph = captured(&cuda, || {
        fused.record(&slots, &layer)?;
        rotate.record(&range, &in_place)
    });
    let turned = [&[0.0; 16][..], &[1.0], &[0.0; 15]].concat();
    for (slot_mapping, tokens) in
        [(&[5, 0, -1, 7][..], 1..3), (&[3], 0..1), (&[], 0..0), (&[1, 2, 6], 2..4), (&[4, -1, 2], 0..4)]
    {
        cuda.upload(&q_out, 0, &queries).expect("uploaded");
        cuda.upload(&cache, 0, &vec![0; 8 * 288 * 4]).expect("cleared");
        fused.prepare(&mut slots, RopeAppendBatch::slots(slot_mapping)).expect("prepared");
        rotate.prepare(&mut range, tokens.clone()).expect("prepared");
        graph.launch().expect("launched");
        let read = |buffer, bytes| Dtype::F32.decode_all(&cuda.download(buffer, bytes).expect("read"));
        // By no quarter, one, or two.
        let quarters = [row(3.0), turned.iter().map(|x| 3.0 * x).collect(), row(-3.0)];
        for (at, got) in read(&q_out, 4 * 2 * 32 * 4).chunks(32).enumerate() {
            let token = at as u32 / 2;
            let fused = usize::from(at / 2 < slot_mapping.len());
            let turns = fused + usize::from(tokens.contains(&token));
            assert_eq!(got, quarters[turns], "token {token} of {slot_mapping:?}, {tokens:?}");
        }
        let key: Vec<f32> = turned.iter().map(|x| 7.0 * x).collect();
        for (slot, got) in read(&cache, 8 * 288 * 4).chunks(288).enumerate() {
            let is_written = slot_mapping.contains(&(slot as i64));
            let want = if is_written { [vec![2.0; 256], key.clone()].concat() } else { vec![0.0; 288] };
            assert_eq!(got, want, "slot {slot} of {slot_mapping:?}");
        }
    }
    Ok(())
}

/// One graph of both ops: queries are twice `x`, and then attend. Each replay has other tokens and sequences.
fn captured_projections_and_prefills_replay_with_new_tokens() -> Outcome {
    let cuda = cuda()?;
    let (tokens, keys, heads) = (80, 90, 2);
    let dims = [16u32, 8, 24];
    let [nope, rope, value] = dims.map(|dim| dim as usize);
    let f32s = Dtype::F32;
    let to_queries = HeadProject {
        input: f32s,
        weight: f32s.into(),
        output: f32s,
        num_heads: heads,
        k: dims[0],
        n: dims[0],
        order: WeightOrder::Kn,
        guard: false,
    };
    let attention = MlaPrefill {
        num_heads: heads,
        qk_nope_head_dim: dims[0],
        qk_rope_head_dim: dims[1],
        v_head_dim: dims[2],
        dtype: f32s,
        out: f32s,
    };
    let project = cuda.compile(to_queries).expect("loads");
    let prefill = cuda.compile(attention).expect("loads");
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
    let projected = HeadProjectArgs {
        x: View::dense(&x, heads, dims[0]),
        weight: WeightView {
            buffer: &weight,
            offset: 0,
            head_stride: (nope * nope) as u64,
            row_stride: nope as u64,
            scales: None,
        },
        y: View::dense(&q, heads, dims[0]),
        scale: 1.0,
        out_scale: 1.0,
        saturates: false,
        guard: None,
    };
    let attended = MlaPrefillArgs {
        q_nope: View::dense(&q, heads, dims[0]),
        q_pe: View::dense(&q_pe_buffer, heads, dims[1]),
        k_nope: View::dense(&k_nope_buffer, heads, dims[0]),
        k_pe: View { head_stride: 0, ..View::dense(&k_pe_buffer, 1, dims[1]) },
        v: View::dense(&v_buffer, heads, dims[2]),
        out: View::dense(&out, heads, dims[2]),
        lse: View::dense(&lse, heads, 1),
        softmax_scale: 0.2,
        v_scale: 1.0,
    };
    let max = PrefillExtent { tokens: tokens as u32, keys: keys as u32, rows: tokens as u32 };
    let (to_queries, layer) = (
        project.bind(&projected, tokens as u32).expect("binds"),
        prefill.bind(&attended, max).expect("binds"),
    );
    let (mut range, mut list) =
        (project.step(tokens as u32).expect("a step"), prefill.step(8).expect("a step"));
    // Captured with an empty step: the grids are those of the capacities.
    project.prepare(&mut range, 0..0).expect("prepared");
    prefill.prepare(&mut list, &[]).expect("prepared");
    let graph = captured(&cuda, || {
        project.record(&range, &to_queries)?;
        prefill.record(&list, &layer)
    });

    let all = PrefillSequence::full(2, 2, 10, 77);
    let long = [PrefillSequence::causal(0, 70, 0, 70), PrefillSequence::causal(70, 3, 70, 8)];
    for (projects, sequences) in [
        (0..5, &[PrefillSequence::causal(0, 5, 0, 9)][..]),
        (0..73, &long),
        (0..0, &[]),
        (2..4, &[all]),
        (0..80, &[PrefillSequence::causal(0, 80, 0, 90)]),
    ] {
        for (buffer, bytes) in [(&q, &queries), (&out, &outs), (&lse, &lses)] {
            cuda.upload(buffer, 0, bytes).expect("uploaded");
        }
        project.prepare(&mut range, projects.clone()).expect("prepared");
        prefill.prepare(&mut list, sequences).expect("prepared");
        assert_eq!((range.capacity(), list.capacity()), (tokens as u32, 8));
        graph.launch().expect("launched");

        let read = |buffer, bytes: &[u8]| cuda.download(buffer, bytes.len() as u64).expect("read");
        let (mut want_q, mut rest, mut rest_lse) = (queries.clone(), read(&out, &outs), read(&lse, &lses));
        let some = projects.start as usize * h * nope..projects.end as usize * h * nope;
        want_q[some.start * 4..some.end * 4].copy_from_slice(&f32s.encode_all(&q_nope[some]));
        assert!(read(&q, &queries) == want_q, "queries {projects:?}");
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
    project.prepare(&mut range, 1..tokens as u32 + 1).expect("prepared");
    let refused = project.record(&range, &to_queries);
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    prefill.prepare(&mut list, &[PrefillSequence::causal(0, 1, 90, 1)]).expect("prepared");
    let refused = prefill.record(&list, &layer);
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    Ok(())
}

fn captured_copies_replay_with_a_new_list() -> Outcome {
    let cuda = cuda()?;
    let lists: [&[(u32, u32)]; 4] = [&[(0, 3)], &[(1, 4), (2, 5), (1, 0)], &[], &[(5, 0), (4, 1)]];
    for (dtype, page_size, row_elems) in [(Dtype::Bf16, 16, 576), (Dtype::E4m3, 1, 288)] {
        let kv = KvSpec { layout: dtype.into(), page_size, num_pages: 6 };
        let copy = cuda.compile(KvCopyPages { shape: shape_of_row(row_elems as usize), kv }).expect("a copy");
        let page_bytes = page_size as usize * row_elems as usize * dtype.bytes();
        let mut rng = Rng(7);
        let mut cache: Vec<u8> = (0..6 * page_bytes).map(|_| rng.next() as u8).collect();
        // With a gap behind each page.
        let stride = page_bytes + 8 * dtype.bytes();
        let block_stride = stride as u64;
        let spread = |cache: &[u8]| -> Vec<u8> {
            let page = |page: &[u8]| [page, &vec![POISON; stride - page.len()]].concat();
            cache.chunks(page_bytes).flat_map(page).collect()
        };
        let buffer = uploaded(&cuda, &spread(&cache));
        let view =
            KvView { buffer: &buffer, offset: 0, block_stride, layer_stride: 0, layer: 0, slabs: Slabs::ONE };
        let mut step = copy.step(3).expect("a step");
        let binding = copy.bind(&view, ()).expect("a binding");
        copy.prepare(&mut step, &[]).expect("prepared");
        let graph = captured(&cuda, || copy.record(&step, &binding));
        for list in lists {
            copy.prepare(&mut step, list).expect("prepared");
            assert_eq!(step.capacity(), 3);
            graph.launch().expect("launched");
            copy_pages(&mut cache, page_bytes, list);
            let want = spread(&cache);
            let got = cuda.download(&buffer, want.len() as u64).expect("read");
            assert!(got == want, "{dtype} {list:?}");
        }
    }
    Ok(())
}

fn a_captured_merge_replays_with_new_states() -> Outcome {
    let cuda = cuda()?;
    let (tokens, heads) = (5, 3);
    for (head_size, dtype) in [(128, Dtype::Bf16), (33, Dtype::F32)] {
        let merge = cuda.compile(MergeState { dtype, head_size }).expect("a merge");
        let (rows, width) = (tokens * heads, head_size as usize);
        let buffer = |bytes: usize| cuda.buffer(bytes as u64).expect("memory");
        let [prefix, suffix, output] = [(); 3].map(|()| buffer(rows * width * dtype.bytes()));
        let [prefix_lse, suffix_lse, output_lse] = [(); 3].map(|()| buffer(rows * 4));
        let state = |buffer| View::dense(buffer, heads as u32, head_size);
        // [heads, tokens], as vLLM has them.
        let lse = |buffer| View { buffer, offset: 0, token_stride: 1, head_stride: tokens as u64 };
        let args = MergeStateArgs {
            prefix_output: state(&prefix),
            prefix_lse: lse(&prefix_lse),
            suffix_output: state(&suffix),
            suffix_lse: lse(&suffix_lse),
            output: state(&output),
            output_lse: Some(lse(&output_lse)),
            num_tokens: tokens as u32,
            num_heads: heads as u32,
            output_scale: 1.0,
        };
        let binding = merge.bind(&args, ()).expect("a binding");
        let step = merge.step(()).expect("a step");
        let graph = captured(&cuda, || merge.record(&step, &binding));
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
            let (want, want_lse) = merge_state(a, b, heads, width);
            let got = cuda.download(&output, (rows * width * dtype.bytes()) as u64).expect("read");
            let got_lse = cuda.download(&output_lse, rows as u64 * 4).expect("read");
            let tolerance = Tolerance::merge(dtype);
            close("output", &dtype.decode_all(&got), &want, &tolerance).into_result().expect("right");
            let got_lse = Dtype::F32.decode_all(&got_lse);
            close("output_lse", &got_lse, &want_lse, &Tolerance::merge_lse()).into_result().expect("right");
        }
    }
    Ok(())
}

crate::tests![
    captured_rotations_replay_with_new_slots_and_ranges,
    captured_projections_and_prefills_replay_with_new_tokens,
    captured_copies_replay_with_a_new_list,
    a_captured_merge_replays_with_new_states,
];
