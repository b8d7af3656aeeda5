//! What the small ops refuse.

use super::*;

fn every_refusal_names_its_cure() -> Outcome {
    let gpu = gpu()?;
    let kv = KvSpec { layout: Dtype::F16.into(), page_size: 4, num_pages: 2 };
    let spec = KvAppend { shape: SHAPE, kv, input: Dtype::F32, guard: false };
    let append = gpu.compile(spec).expect("compiles");
    let (a, b) = (upload(gpu, &[0; 8192]), upload(gpu, &[0; 8192]));
    let no_storage = without_storage(gpu);
    let rows = |buffer, offset| View { buffer, offset, token_stride: 288, head_stride: 0 };
    let layer = || KvAppendArgs {
        kv_c: rows(&a, 0),
        k_pe: rows(&a, 256),
        kv: KvView::dense(&b, &decode(kv)),
        k_scale: 1.0,
        guard: None,
    };

    let refused = |layer: KvAppendArgs<&wgpu::Buffer>| append.bind(&layer, 4).expect_err("refused");
    let error = refused(KvAppendArgs { kv: KvView::dense(&a, &decode(kv)), ..layer() });
    assert_eq!(error, Error::Aliased { a: "kv_c", b: "kv" });
    let error = refused(KvAppendArgs { kv: KvView::dense(&no_storage, &decode(kv)), ..layer() });
    assert_eq!(error, Error::BufferUsage { what: "kv", usage: "STORAGE" });
    let error = refused(KvAppendArgs { kv_c: rows(&no_storage, 0), ..layer() });
    assert_eq!(error, Error::BufferUsage { what: "kv_c", usage: "STORAGE" });
    for k_scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(refused(KvAppendArgs { k_scale, ..layer() }), Error::Scale { what: "k_scale", .. }));
    }
    let error = refused(KvAppendArgs { k_pe: rows(&a, 255), ..layer() });
    assert!(matches!(error, Error::Alignment { what: "k_pe", got: 255, .. }));
    assert!(matches!(append.bind(&layer(), 8), Err(Error::BufferTooSmall { what: "kv_c" | "k_pe", .. })));

    let mut step = append.step(0).expect("a step");
    let mut prepare = |slots: &[i64]| append.prepare(&mut step, slots);
    assert!(matches!(prepare(&[0, 8]), Err(Error::SlotOutOfRange { index: 1, slot: 8, num_slots: 8 })));
    assert!(matches!(prepare(&[5, -1, 5]), Err(Error::SlotOverlap { first: 0, second: 2, slot: 5 })));
    prepare(&[0, 1, 2]).expect("fits");
    let binding = append.bind(&layer(), 2).expect("binds");
    assert!(matches!(append.check(&step, &binding), Err(Error::LayoutMismatch { .. })));
    assert_eq!(append.run(&step, &binding), append.check(&step, &binding));
    let nothing = append.bind(&layer(), 0).expect("room for no token");
    append.prepare(&mut step, &[]).expect("no token");
    append.run(&step, &nothing).expect("runs");

    let e4m3 = KvAppend { input: Dtype::E4m3, ..spec };
    assert!(matches!(gpu.compile(e4m3), Err(Error::DtypeUnsupported { .. })));
    let half = MlaShape { kv_lora_rank: 128, qk_rope_head_dim: 16, ..SHAPE };
    let refused = gpu.compile(KvCopyPages { shape: half, kv });
    assert!(matches!(refused, Err(Error::Shape { what: "kv_lora_rank + qk_rope_head_dim", got: 144, .. })));

    let copy = gpu.compile(KvCopyPages { shape: SHAPE, kv }).expect("compiles");
    let mut step = copy.step(0).expect("a step");
    for copies in [&[(0, 2)][..], &[(0, 1), (1, 0)], &[(0, 0)]] {
        let error = copy.prepare(&mut step, copies).expect_err("refused");
        assert!(matches!(error, Error::CopyConflict { .. }), "{error}");
    }
    let error = copy.bind(&KvView::dense(&no_storage, &decode(kv)), ()).expect_err("refused");
    assert_eq!(error, Error::BufferUsage { what: "kv", usage: "STORAGE" });

    let spec = MergeState { dtype: Dtype::Bf16, head_size: 8 };
    let merge = gpu.compile(spec).expect("compiles");
    let (c, d, e) = (upload(gpu, &[0; 256]), upload(gpu, &[0; 256]), upload(gpu, &[0; 256]));
    let heads = |buffer| View::dense(buffer, 2, 8);
    let args = |output, output_lse| MergeStateArgs {
        prefix_output: heads(&c),
        prefix_lse: View { buffer: &c, offset: 0, token_stride: 1, head_stride: 2 },
        suffix_output: heads(&c),
        suffix_lse: View { buffer: &c, offset: 0, token_stride: 1, head_stride: 2 },
        output,
        output_lse: Some(View { buffer: output_lse, offset: 0, token_stride: 1, head_stride: 2 }),
        num_tokens: 2,
        num_heads: 2,
        output_scale: 1.0,
    };
    merge.bind(&args(heads(&d), &e), ()).expect("one buffer for every input");
    let error = merge.bind(&args(heads(&c), &e), ()).expect_err("refused");
    assert_eq!(error, Error::Aliased { a: "prefix_output", b: "output" });
    let error = merge.bind(&args(heads(&d), &d), ()).expect_err("refused");
    assert_eq!(error, Error::Aliased { a: "output", b: "output_lse" });
    let error = merge.bind(&args(View { head_stride: 7, ..heads(&d) }, &e), ()).expect_err("refused");
    assert!(matches!(error, Error::Shape { what: "output", .. }), "{error}");
    let error = merge.bind(&args(View { offset: 120, ..heads(&d) }, &e), ()).expect_err("refused");
    assert!(matches!(error, Error::BufferTooSmall { what: "output", .. }), "{error}");
    let e4m3 = MergeState { dtype: Dtype::E4m3, ..spec };
    assert!(matches!(gpu.compile(e4m3), Err(Error::DtypeUnsupported { .. })));
    Ok(())
}

crate::tests![every_refusal_names_its_cure,];
