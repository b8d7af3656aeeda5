//! What the small ops refuse.

use super::*;
use mla_support::Outcome;

fn every_refusal_names_its_cure() -> Outcome {
    let gpu = gpu()?;
    let device = &gpu.device;
    let kv = KvSpec { dtype: Dtype::F16, page_size: 4, num_pages: 2 };
    let spec = AppendSpec { shape: SHAPE, kv, input: Dtype::F32 };
    let mla = wgpu_mla::MlaSpec { shape: SHAPE, kv, query: Dtype::F32, out: Dtype::F32 };
    let append = KvAppend::new(&Pipelines::new(device), spec).expect("compiles");
    let (a, b) = (gpu.buffer(&[0; 8192]), gpu.buffer(&[0; 8192]));
    let no_storage = gpu.buffer_with(&[0; 8192], wgpu::BufferUsages::UNIFORM);
    let rows = |buffer, offset| View { buffer, offset, token_stride: 288, head_stride: 0 };
    let layer =
        || AppendLayer { kv_c: rows(&a, 0), k_pe: rows(&a, 256), kv: KvView::dense(&b, &mla), k_scale: 1.0 };

    let refused = |layer: AppendLayer<&wgpu::Buffer>| append.bind(device, &layer, 4).expect_err("refused");
    let error = refused(AppendLayer { kv: KvView::dense(&a, &mla), ..layer() });
    assert_eq!(error, Error::Aliased { a: "kv", b: "kv_c" });
    let error = refused(AppendLayer { kv: KvView::dense(&no_storage, &mla), ..layer() });
    assert_eq!(error, Error::BufferUsage { what: "kv", usage: "STORAGE" });
    let error = refused(AppendLayer { kv_c: rows(&no_storage, 0), ..layer() });
    assert_eq!(error, Error::BufferUsage { what: "kv_c", usage: "STORAGE" });
    for k_scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(refused(AppendLayer { k_scale, ..layer() }), Error::Scale { what: "k_scale", .. }));
    }
    let error = refused(AppendLayer { k_pe: rows(&a, 255), ..layer() });
    assert!(matches!(error, Error::Alignment { what: "k_pe", got: 255, .. }));
    assert!(matches!(
        append.bind(device, &layer(), 8),
        Err(Error::BufferTooSmall { what: "kv_c" | "k_pe", .. })
    ));

    let mut step = AppendStep::default();
    let mut prepare = |slots: &[i64]| append.prepare(device, &gpu.queue, &mut step, slots);
    assert!(matches!(prepare(&[0, 8]), Err(Error::SlotOutOfRange { index: 1, slot: 8, num_slots: 8 })));
    assert!(matches!(prepare(&[5, -1, 5]), Err(Error::SlotOverlap { first: 0, second: 2, slot: 5 })));
    prepare(&[0, 1, 2]).expect("fits");
    let binding = append.bind(device, &layer(), 2).expect("binds");
    assert!(matches!(append.check(&step, &binding), Err(Error::LayoutMismatch { .. })));
    // Recorded all the same it does nothing.
    gpu.submit(|encoder| append.record(encoder, &step, &binding));
    let nothing = append.bind(device, &layer(), 0).expect("room for no token");
    append.prepare(device, &gpu.queue, &mut step, &[]).expect("no token");
    gpu.submit(|encoder| append.record(encoder, &step, &nothing));

    let e4m3 = AppendSpec { input: Dtype::E4m3, ..spec };
    assert!(matches!(KvAppend::new(&Pipelines::new(device), e4m3), Err(Error::DtypeUnsupported { .. })));
    let odd = CopySpec { kv, row_elems: 6 };
    assert!(matches!(
        KvCopyPages::new(&Pipelines::new(device), odd),
        Err(Error::Shape { what: "row_elems", got: 6, .. })
    ));

    let copy = KvCopyPages::new(&Pipelines::new(device), CopySpec { kv, row_elems: 288 }).expect("compiles");
    let mut step = CopyStep::default();
    for copies in [&[(0, 2)][..], &[(0, 1), (1, 0)], &[(0, 0)]] {
        let error = copy.prepare(device, &gpu.queue, &mut step, copies).expect_err("refused");
        assert!(matches!(error, Error::CopyConflict { .. }), "{error}");
    }
    let error = copy.bind(device, &KvView::dense(&no_storage, &mla)).expect_err("refused");
    assert_eq!(error, Error::BufferUsage { what: "kv", usage: "STORAGE" });

    let spec = MergeStatesSpec { dtype: Dtype::Bf16, head_size: 8 };
    let merge = MergeAttnStates::new(&Pipelines::new(device), spec).expect("compiles");
    let (c, d, e) = (gpu.buffer(&[0; 256]), gpu.buffer(&[0; 256]), gpu.buffer(&[0; 256]));
    let heads = |buffer| View::dense(buffer, 2, 8);
    let args = |output, output_lse| MergeStates {
        prefix_output: heads(&c),
        prefix_lse: View { buffer: &c, offset: 0, token_stride: 1, head_stride: 2 },
        suffix_output: heads(&c),
        suffix_lse: View { buffer: &c, offset: 0, token_stride: 1, head_stride: 2 },
        output,
        output_lse: Some(View { buffer: output_lse, offset: 0, token_stride: 1, head_stride: 2 }),
        num_tokens: 2,
        num_heads: 2,
    };
    merge.bind(device, &args(heads(&d), &e)).expect("one buffer for every input");
    let error = merge.bind(device, &args(heads(&c), &e)).expect_err("refused");
    assert_eq!(error, Error::Aliased { a: "output", b: "prefix_output" });
    let error = merge.bind(device, &args(heads(&d), &d)).expect_err("refused");
    assert_eq!(error, Error::Aliased { a: "output", b: "output_lse" });
    let error = merge.bind(device, &args(View { head_stride: 7, ..heads(&d) }, &e)).expect_err("refused");
    assert!(matches!(error, Error::Shape { what: "output", .. }), "{error}");
    let error = merge.bind(device, &args(View { offset: 120, ..heads(&d) }, &e)).expect_err("refused");
    assert!(matches!(error, Error::BufferTooSmall { what: "output", .. }), "{error}");
    let e4m3 = MergeStatesSpec { dtype: Dtype::E4m3, ..spec };
    assert!(matches!(
        MergeAttnStates::new(&Pipelines::new(device), e4m3),
        Err(Error::DtypeUnsupported { .. })
    ));
    Ok(())
}

crate::tests![every_refusal_names_its_cure,];
