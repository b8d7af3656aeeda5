//! What is refused.

use super::*;

fn errors_of_buffers() {
    let cpu = Cpu::with_threads(1);
    for bytes in [u64::MAX, u64::MAX / 4, 1 << 60] {
        assert!(matches!(cpu.buffer(bytes), Err(Error::OutOfMemory { .. })));
    }
    let buffer = cpu.buffer(10).unwrap();
    assert_eq!(buffer.bytes(), 12);
    assert_eq!(cpu.download(&buffer, 12).unwrap(), [0; 12]);
    cpu.upload(&buffer, 4, &[1, 2, 3, 4]).unwrap();
    assert_eq!(cpu.download(&buffer, 8).unwrap(), [0, 0, 0, 0, 1, 2, 3, 4]);
    assert!(matches!(cpu.upload(&buffer, 2, &[0; 4]), Err(Error::Alignment { .. })));
    assert!(matches!(cpu.upload(&buffer, 0, &[0; 3]), Err(Error::Alignment { .. })));
    assert!(matches!(cpu.upload(&buffer, 12, &[0; 4]), Err(Error::BufferTooSmall { end: 16, size: 12, .. })));
    assert!(matches!(cpu.upload(&buffer, u64::MAX - 3, &[0; 4]), Err(Error::BufferTooSmall { .. })));
    assert!(matches!(cpu.download(&buffer, 16), Err(Error::BufferTooSmall { .. })));
    assert!(matches!(cpu.download(&buffer, 6), Err(Error::Alignment { .. })));
}

fn errors_of_decode_and_bind() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = small_spec();
    let forced = cpu.decode(&spec, Some("sse9"));
    assert!(matches!(forced, Err(Error::VariantUnavailable { name, .. }) if name == "sse9"));
    assert!(matches!(
        cpu.decode(&MlaSpec { out: Dtype::E4m3, ..spec }, None),
        Err(Error::DtypeUnsupported { .. })
    ));

    let mla = cpu.decode(&spec, None).unwrap();
    assert_eq!(mla.variant(), cpu.variants(&spec)[0]);
    let layer = Layer::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let error = |layer: Layer<&Buffer>| cpu.bind(&mla, 2, &layer).unwrap_err();
    assert!(cpu.bind(&mla, 2, &layer).is_ok());
    assert!(matches!(error(Layer { k_scale: f32::NAN, ..layer }), Error::Scale { what: "k_scale", .. }));
    assert!(matches!(cpu.bind(&mla, 100, &layer), Err(Error::BufferTooSmall { .. })));
    let aliased = Layer { out: View { buffer: &q, ..layer.out }, ..layer };
    assert!(matches!(cpu.bind(&mla, 1, &aliased), Err(Error::Aliased { a: "q_nope", b: "out" })));
    let aliased = Layer { lse: View { buffer: &kv, ..layer.lse }, ..layer };
    assert!(matches!(error(aliased), Error::Aliased { a: "kv", b: "lse" }));
    let overlapping = Layer { lse: View { buffer: &out, ..layer.lse }, ..layer };
    assert!(matches!(error(overlapping), Error::Aliased { a: "out", b: "lse" }));
    let disjoint = Layer { lse: View { buffer: &out, offset: 2 * 2 * 256, ..layer.lse }, ..layer };
    assert!(cpu.bind(&mla, 2, &disjoint).is_ok());
    assert!(matches!(
        cpu.step(&mla, Capacity { slots: u32::MAX, ..Capacity::default() }),
        Err(Error::OutOfMemory { .. })
    ));
    let huge = Capacity { items: u32::MAX, ..Capacity::default() };
    assert!(matches!(cpu.step(&mla, huge), Err(Error::OutOfMemory { .. })));
}

fn errors_of_prepare_and_run() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = small_spec();
    let mla = cpu.decode(&spec, None).unwrap();
    let layer = Layer::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let one = cpu.bind(&mla, 1, &layer).unwrap();
    let tiling = cpu.tiling(&mla);
    let plan = Plan::new(&spec, &tiling, &Batch::new(&[20, 3], &[0, 1, 2]), Policy::Auto).unwrap();
    let mut step = cpu.step(&mla, Capacity::of(&plan)).unwrap();
    let mismatch = |done| assert!(matches!(done, Err(Error::LayoutMismatch { .. })));
    mismatch(cpu.run(&mla, &step, &one));
    let table = PageTable::Dense { block_table: &[0, 1, 2, WILD], max_pages: 2 };
    cpu.prepare(&mla, &mut step, &plan, table).unwrap();
    mismatch(cpu.run(&mla, &step, &one));
    let two = cpu.bind(&mla, 2, &layer).unwrap();
    cpu.run(&mla, &step, &two).unwrap();

    let other_spec = MlaSpec { query: Dtype::F32, ..spec };
    let other = cpu.decode(&other_spec, None).unwrap();
    mismatch(cpu.run(&other, &step, &two));
    mismatch(cpu.prepare(&other, &mut step, &plan, table));
    cpu.prepare(&mla, &mut step, &plan, table).unwrap();
    mismatch(Cpu::with_threads(3).run(&mla, &step, &two));

    assert!(matches!(cpu.prepare(&mla, &mut step, &plan, PageTable::Device), Err(Error::Shape { .. })));
    let wild = PageTable::Dense { block_table: &[0, 9, 2, 0], max_pages: 2 };
    let error = cpu.prepare(&mla, &mut step, &plan, wild);
    assert!(matches!(error, Err(Error::PageOutOfRange { seq: 0, block: 1, page: 9, .. })));
    mismatch(cpu.run(&mla, &step, &two));

    // A plan for more heads, another tiling or another page size, or one that someone has edited.
    let bad = |plan: &Plan, step: &mut wgpu_mla::cpu::Step| {
        assert!(matches!(cpu.prepare(&mla, step, plan, table), Err(Error::Shape { .. })));
    };
    let more_heads = MlaSpec { shape: shape(9, 256, 32), ..spec };
    bad(
        &Plan::new(&more_heads, &tiling, &Batch::new(&[20, 3], &[0, 1, 2]), Policy::Auto).unwrap(),
        &mut step,
    );
    let tall = plan::Tiling { rows_per_tile: 64, ..tiling };
    bad(&Plan::new(&spec, &tall, &Batch::new(&[40, 3], &[0, 40, 41]), Policy::Auto).unwrap(), &mut step);
    let mut edited = plan.clone();
    edited.queries[1].token = 2;
    bad(&edited, &mut step);
    let mut edited = plan.clone();
    edited.items[0].page_begin = 1000;
    bad(&edited, &mut step);
    let mut edited = plan.clone();
    edited.page_begin.pop();
    bad(&edited, &mut step);
}

crate::tests![errors_of_buffers, errors_of_decode_and_bind, errors_of_prepare_and_run,];
