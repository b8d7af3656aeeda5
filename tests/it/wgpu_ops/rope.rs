//! `rope` and `rope_append`, one call at a time: ranges of tokens, steps that outgrow a binding, windows, refusals.

use super::*;
use wgpu_mla::{
    Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch, RopeAppendExtent, RopeArgs, RopeFrequencies,
    RopeLayout,
};

const SPEC: Rope = Rope { dtype: Dtype::F32, num_heads: 2, rope_dim: 8, layout: RopeLayout::Interleaved };
const ROW: usize = 16;

fn angles(rope_dim: u32) -> Vec<f32> {
    RopeFrequencies::plain(rope_dim, 1e4).expect("frequencies").cos_sin(100).expect("a table")
}

/// What the rotation of `SPEC` gives, up to rounding.
fn turned(x: &[f32], position: usize, angles: &[f32]) -> Vec<f32> {
    let row = &angles[position * 8..][..8];
    let pair = |(i, pair): (usize, &[f32])| {
        let (cos, sin) = (row[i % 4], row[4 + i % 4]);
        [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin]
    };
    x.chunks(2).enumerate().flat_map(pair).collect()
}

fn near(got: &[f32], want: &[f32]) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5)
}

fn a_binding_serves_steps_of_any_range() -> Outcome {
    let gpu = gpu()?;
    let mut random = Random(3);
    let x: Vec<f32> = (0..9 * ROW).map(|_| random.unit()).collect();
    let (table, positions) = (angles(8), [3i32, 99, 0, 17, 5, 5, 64, 1, 42]);
    let buffer = |words: &[u8]| upload(gpu, words);
    let (cos_sin, places) = (buffer(bytemuck::cast_slice(&table)), buffer(bytemuck::cast_slice(&positions)));
    let (input, output) = (buffer(bytemuck::cast_slice(&x)), buffer(&[0; 9 * ROW * 4]));
    let args = |x, y| RopeArgs {
        x: View::dense(x, 2, 8),
        y: View::dense(y, 2, 8),
        positions: &places,
        cos_sin: &cos_sin,
        max_position: 100,
        scale: 1.0,
    };
    let op = gpu.compile(SPEC).expect("compiles");
    let apart = op.bind(&args(&input, &output), 9).expect("binds");
    let in_place = op.bind(&args(&input, &input), 9).expect("binds in place");
    let row = |token: usize| turned(&x[token * ROW..][..ROW], positions[token] as usize, &table);

    let step = |tokens| {
        let mut step = op.step(0).expect("a step");
        op.prepare(&mut step, tokens).expect("prepares");
        step
    };
    let (middle, none) = (step(2..5), step(9..9));
    gpu.submit(|mut pass| {
        op.record_on(&mut pass, &none, &apart)?;
        op.record_on(&mut pass, &middle, &apart)?;
        op.record_on(&mut pass, &middle, &in_place)
    })
    .expect("runs");
    let read = |buffer| bytemuck::cast_slice::<u8, f32>(&download(gpu, buffer)).to_vec();
    for (got, before) in [(read(&output), vec![0.0; 9 * ROW]), (read(&input), x.clone())] {
        for token in 0..9 {
            let at = token * ROW..(token + 1) * ROW;
            let want = if (2..5).contains(&token) { row(token) } else { before[at.clone()].to_vec() };
            assert!(near(&got[at], &want), "token {token}");
        }
    }

    let past = step(7..10);
    assert!(matches!(op.run(&past, &in_place), Err(Error::LayoutMismatch { .. })));
    assert_eq!(read(&input)[7 * ROW..], x[7 * ROW..], "nothing ran");

    // A step that is prepared again between its record and the submit, for tokens that the binding has not: the commands keep theirs.
    for far in [1 << 20..(1 << 20) + 3, u32::MAX - 3..u32::MAX] {
        let mut again = step(8..9);
        gpu.submit(|mut pass| {
            op.record_on(&mut pass, &again, &apart)?;
            op.prepare(&mut again, far)
        })
        .expect("runs");
        let got = read(&output);
        assert_eq!(got[5 * ROW..8 * ROW], [0.0; 3 * ROW], "tokens of no step");
        assert!(near(&got[8 * ROW..], &row(8)));
    }
    #[allow(clippy::reversed_empty_ranges)]
    let error = op.prepare(&mut step(8..9), 9..8).expect_err("it ends before it begins");
    assert!(matches!(error, Error::Shape { what: "the end of a token range", got: 8, .. }), "{error}");
    Ok(())
}

fn a_rotation_in_place_binds_one_window() -> Outcome {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 16, ..wgpu::Limits::default() };
    let gpu = &open(limits)?;
    let (table, mut random) = (angles(8), Random(8));
    let x: Vec<f32> = (0..3 * ROW).map(|_| random.unit()).collect();
    let first = 50_000;
    let mut bytes = vec![0; 1 << 20];
    bytes[first * 4..][..x.len() * 4].copy_from_slice(bytemuck::cast_slice(&x));
    let (rows, cos_sin) = (upload(gpu, &bytes), upload(gpu, bytemuck::cast_slice(&table)));
    let places = upload(gpu, bytemuck::cast_slice(&[7i32, 0, 31]));
    let view = |offset: usize| View { offset: offset as u64, ..View::dense(&rows, 2, 8) };
    let op = gpu.compile(SPEC).expect("compiles");
    let args = |y: usize| RopeArgs {
        x: view(first),
        y: view(y),
        positions: &places,
        cos_sin: &cos_sin,
        max_position: 100,
        scale: 1.0,
    };
    let mut step = op.step(0).expect("a step");
    op.prepare(&mut step, 0..3).expect("prepares");
    let want: Vec<f32> = [7, 0, 31]
        .iter()
        .enumerate()
        .flat_map(|(token, &position)| turned(&x[token * ROW..][..ROW], position, &table))
        .collect();
    // In front of the input, behind it, then in place.
    for y in [first - 4096, first + 4096, first] {
        let binding = op.bind(&args(y), 3).expect("a window of 16 KB and the rows fits");
        op.run(&step, &binding).expect("runs");
        let got = download(gpu, &rows);
        assert!(near(&bytemuck::cast_slice(&got)[y..y + x.len()], &want), "at {y}");
    }
    let error = op.bind(&args(200_000), 3).expect_err("600 KB do not fit");
    assert!(matches!(error, Error::Limit { what: "y", limit: 0x10000, .. }), "{error}");
    Ok(())
}

fn a_rotated_append_never_leaves_its_binding() -> Outcome {
    let gpu = gpu()?;
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 8, num_pages: 5 };
    let append = KvAppend { shape: SHAPE, kv, input: Dtype::F32, guard: false };
    let layout = RopeLayout::HalfSplit;
    let spec = RopeAppend { append, query: Dtype::Bf16, query_out: Dtype::Bf16, num_heads: 3, layout };
    let rows = upload(gpu, bytemuck::cast_slice(&[1f32; 40 * 288]));
    let (cache, q) = (upload(gpu, &[0; 40 * 288 * 4]), upload(gpu, &[0x3F; 2 * 3 * 32 * 2]));
    let q_out = upload(gpu, &[0; 2 * 3 * 32 * 2 + 64]);
    let (places, cos_sin) = (upload(gpu, &[0; 8]), upload(gpu, bytemuck::cast_slice(&angles(32))));
    let view = |offset| View { buffer: &rows, offset, token_stride: 288, head_stride: 0 };
    let args = |places, q_pe| RopeAppendArgs {
        q_pe: View::dense(q_pe, 3, 32),
        q_pe_out: View::dense(&q_out, 3, 32),
        layer: KvAppendArgs {
            kv_c: view(0),
            k_pe: view(256),
            kv: KvView::dense(&cache, &decode(kv)),
            k_scale: 1.0,
            guard: None,
        },
        positions: places,
        cos_sin: &cos_sin,
        max_position: 100,
        q_pe_scale: 1.0,
        q_scale: 1.0,
    };
    let op = gpu.compile(spec).expect("compiles");
    let binding = op.bind(&args(&places, &q), RopeAppendExtent::of(2)).expect("binds");
    let mut step = op.step(0).expect("a step");
    op.prepare(&mut step, RopeAppendBatch::slots(&[30, -1])).expect("prepares");
    op.run(&step, &binding).expect("runs");
    // At position 0 nothing turns.
    let ones = |bytes: &[u8]| bytemuck::cast_slice(bytes).iter().filter(|x: &&f32| **x == 1.0).count();
    let got = download(gpu, &cache);
    assert_eq!((ones(&got[30 * 288 * 4..31 * 288 * 4]), ones(&got)), (288, 288), "one row");
    let got = download(gpu, &q_out);
    assert!(got[..384].iter().all(|byte| *byte == 0x3F), "queries of skipped tokens too");
    assert!(got[384..].iter().all(|byte| *byte == 0), "and no more");

    op.prepare(&mut step, RopeAppendBatch::slots(&[30, 31])).expect("prepares");
    gpu.submit(|mut pass| {
        op.record_on(&mut pass, &step, &binding)?;
        // Before the submit: what was recorded keeps its table.
        let slots: Vec<i64> = (0..40).collect();
        op.prepare(&mut step, RopeAppendBatch::slots(&slots))
    })
    .expect("runs");
    let got = download(gpu, &cache);
    assert_eq!(
        (ones(&got[30 * 288 * 4..32 * 288 * 4]), ones(&got)),
        (576, 576),
        "the two tokens of the first"
    );
    assert!(download(gpu, &q_out)[384..].iter().all(|byte| *byte == 0));

    assert!(matches!(op.run(&step, &binding), Err(Error::LayoutMismatch { .. })));
    let nothing = op.bind(&args(&places, &q), RopeAppendExtent::of(0)).expect("room for no token");
    op.prepare(&mut step, RopeAppendBatch::slots(&[])).expect("no token");
    op.run(&step, &nothing).expect("runs");

    let no_storage = without_storage(gpu);
    for (args, what) in [(args(&no_storage, &q), "positions"), (args(&places, &no_storage), "q_pe")] {
        let error = op.bind(&args, RopeAppendExtent::of(2)).expect_err("refused");
        assert_eq!(error, Error::BufferUsage { what, usage: "STORAGE" });
    }
    Ok(())
}

crate::tests![
    a_binding_serves_steps_of_any_range,
    a_rotation_in_place_binds_one_window,
    a_rotated_append_never_leaves_its_binding,
];
