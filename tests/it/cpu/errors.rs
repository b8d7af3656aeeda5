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
    let forced = cpu.compile_with(spec, &forced("sse9"));
    assert!(matches!(forced, Err(Error::VariantUnavailable { name, .. }) if name == "sse9"));
    assert!(matches!(
        cpu.compile(MlaDecode { out: Dtype::E4m3, ..spec }),
        Err(Error::DtypeUnsupported { .. })
    ));

    let mla = cpu.compile(spec).unwrap();
    let first = cpu.variants(&spec).into_iter().find(|variant| variant.lacks.is_none());
    assert_eq!(Some(mla.variant()), first.map(|variant| variant.name));
    let layer = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let error = |layer: MlaDecodeArgs<&Buffer>| mla.bind(&layer, 2).unwrap_err();
    assert!(mla.bind(&layer, 2).is_ok());
    assert!(matches!(
        error(MlaDecodeArgs { k_scale: f32::NAN, ..layer.clone() }),
        Error::Scale { what: "k_scale", .. }
    ));
    assert!(matches!(mla.bind(&layer, 100), Err(Error::BufferTooSmall { .. })));
    let aliased = MlaDecodeArgs { out: View { buffer: &q, ..layer.out }, ..layer.clone() };
    assert!(matches!(mla.bind(&aliased, 1), Err(Error::Aliased { a: "q_nope", b: "out" })));
    let aliased = MlaDecodeArgs { lse: View { buffer: &kv, ..layer.lse }, ..layer.clone() };
    assert!(matches!(error(aliased), Error::Aliased { a: "kv", b: "lse" }));
    let overlapping = MlaDecodeArgs { lse: View { buffer: &out, ..layer.lse }, ..layer.clone() };
    assert!(matches!(error(overlapping), Error::Aliased { a: "out", b: "lse" }));
    let disjoint = MlaDecodeArgs { lse: View { buffer: &out, offset: 2 * 2 * 256, ..layer.lse }, ..layer };
    assert!(mla.bind(&disjoint, 2).is_ok());
    assert!(matches!(
        mla.step(Capacity { partials: u32::MAX, ..Capacity::default() }),
        Err(Error::OutOfMemory { .. })
    ));
    let huge = Capacity { items: u32::MAX, ..Capacity::default() };
    assert!(matches!(mla.step(huge), Err(Error::Limit { what: "words of a step's tables", .. })));
}

fn errors_of_prepare_and_run() {
    let Small { cpu, q, kv, out, lse } = small();
    let spec = small_spec();
    let mla = cpu.compile(spec).unwrap();
    let layer = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let one = mla.bind(&layer, 1).unwrap();
    let tiling = mla.tiling();
    let plan = Plan::new(&spec, &tiling, &Batch::new(&[20, 3], &[0, 1, 2]), SplitPolicy::Auto).unwrap();
    let mut step = mla.step(Capacity::of(&plan)).unwrap();
    let mismatch = |done| assert!(matches!(done, Err(Error::LayoutMismatch { .. })));
    mismatch(mla.run(&step, &one));
    let table = PageTable::Dense { block_table: &[0, 1, 2, WILD], max_pages: 2 };
    mla.prepare(&mut step, (&plan, table)).unwrap();
    mismatch(mla.run(&step, &one));
    let two = mla.bind(&layer, 2).unwrap();
    mla.run(&step, &two).unwrap();

    let other_spec = MlaDecode { query: Dtype::F32, ..spec };
    let other = cpu.compile(other_spec).unwrap();
    mismatch(other.run(&step, &two));
    mismatch(other.prepare(&mut step, (&plan, table)));
    mla.prepare(&mut step, (&plan, table)).unwrap();
    mismatch(Cpu::with_threads(3).compile(spec).unwrap().run(&step, &two));

    assert!(matches!(mla.prepare(&mut step, (&plan, PageTable::Device)), Err(Error::Shape { .. })));
    let wild = PageTable::Dense { block_table: &[0, 9, 2, 0], max_pages: 2 };
    let error = mla.prepare(&mut step, (&plan, wild));
    assert!(matches!(error, Err(Error::PageOutOfRange { seq: 0, block: 1, page: 9, .. })));
    mismatch(mla.run(&step, &two));

    // A plan for more heads, another tiling or another page size, or one that was edited.
    let bad = |plan: &Plan, step: &mut Step<MlaDecode, Cpu>| {
        assert!(matches!(
            mla.prepare(step, (plan, table)),
            Err(Error::OtherSpec { .. } | Error::Shape { .. })
        ));
    };
    let more_heads = MlaDecode { shape: shape(9, 256, 32), ..spec };
    bad(
        &Plan::new(&more_heads, &tiling, &Batch::new(&[20, 3], &[0, 1, 2]), SplitPolicy::Auto).unwrap(),
        &mut step,
    );
    let tall = Tiling { rows_per_tile: 64, ..tiling };
    bad(&Plan::new(&spec, &tall, &Batch::new(&[40, 3], &[0, 40, 41]), SplitPolicy::Auto).unwrap(), &mut step);
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

/// A step is recorded after a prepare that went well, by the op that made it, with a binding of that op. Else the error says which of
/// them is missing.
fn refuses_steps_and_bindings<'a, O: Op>(
    op: O,
    options: &O::Options,
    input: impl Fn() -> O::Input<'a>,
    wrong: O::Input<'a>,
    args: &O::Args<&Buffer>,
) where
    Cpu: Kernel<O>,
{
    let refused = |done: Result<(), Error>, why: &str| {
        let error = done.unwrap_err();
        assert!(matches!(error, Error::LayoutMismatch { .. }), "{}: {error}", O::NAME);
        assert!(error.to_string().contains(why), "{}: {error}", O::NAME);
    };
    let cpu = Cpu::with_threads(2);
    let [own, same] = [(); 2].map(|()| cpu.compile_with(op, options).unwrap());
    let elsewhere = Cpu::with_threads(1).compile_with(op, options).unwrap();
    let mut step = own.step(O::Capacity::default()).unwrap();
    own.prepare(&mut step, input()).unwrap();
    let binding = own.bind(args, step.used()).unwrap();
    own.run(&step, &binding).unwrap();

    let fresh = own.step(O::Capacity::default()).unwrap();
    refused(own.run(&fresh, &binding), "was not prepared");
    refused(own.record_on(&mut (), &fresh, &binding), "was not prepared");
    for (other, is_here) in [(&same, true), (&elsewhere, false)] {
        refused(own.run(&step, &other.bind(args, step.used()).unwrap()), "made by another op");
        let mut foreign = other.step(O::Capacity::default()).unwrap();
        other.prepare(&mut foreign, input()).unwrap();
        if O::SHARES_STEPS && is_here {
            own.run(&foreign, &binding).unwrap();
            continue;
        }
        refused(own.run(&foreign, &binding), "made by another op");
        refused(own.prepare(&mut foreign, input()), "made by another op");
    }

    own.prepare(&mut step, wrong).unwrap_err();
    refused(own.run(&step, &binding), "its last prepare failed");
    own.prepare(&mut step, input()).unwrap();
    own.run(&step, &binding).unwrap();
}

fn steps_and_bindings_of_others_are_refused() {
    let cpu = Cpu::with_threads(1);
    let buffers: [Buffer; 10] = std::array::from_fn(|_| cpu.buffer(1 << 20).unwrap());
    let [a, b, c, d, ..] = &buffers;
    let one = OpOptions::default();

    let spec = small_spec();
    let tiling = cpu.compile(spec).unwrap().tiling();
    let plan = Plan::new(&spec, &tiling, &Batch::new(&[20], &[0, 1]), SplitPolicy::Auto).unwrap();
    let pages = |block_table| (&plan, PageTable::Dense { block_table, max_pages: 2 });
    let layer = MlaDecodeArgs::dense(&spec, a, b, c, d, 0.1);
    refuses_steps_and_bindings(spec, &DecodeOptions::default(), || pages(&[0, 1]), pages(&[0, WILD]), &layer);

    let append = KvAppend { shape: spec.shape, kv: spec.kv, input: Dtype::F16, guard: false };
    let kv = KvView::dense(c, &spec);
    let rows = KvAppendArgs {
        kv_c: View::dense(a, 1, 256),
        k_pe: View::dense(b, 1, 32),
        kv: kv.clone(),
        k_scale: 1.0,
        guard: None,
    };
    refuses_steps_and_bindings(append, &one, || &[3, 5], &[3, 3], &rows);

    let copy = KvCopyPages { shape: spec.shape, kv: spec.kv };
    refuses_steps_and_bindings(copy, &one, || &[(0, 1)], &[(0, 4)], &kv);

    let rope = Rope { dtype: Dtype::F32, num_heads: 2, rope_dim: 32, layout: RopeLayout::Interleaved };
    let (x, y) = (View::dense(a, 2, 32), View::dense(b, 2, 32));
    let rotated = RopeArgs { x, y, positions: c, cos_sin: d, max_position: 1, scale: 1.0 };
    #[allow(clippy::reversed_empty_ranges)] // What is wrong with it.
    refuses_steps_and_bindings(rope, &one, || 1..3, 3..1, &rotated);

    let spec = mla_support::suite::layer_rig::spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 64);
    let capacity = LayerCapacity { tokens: 16, decode_tokens: 16, ..LayerCapacity::default() };
    let batch = LayerBatch {
        seq_lens: &[20, 30],
        query_start_loc: &[0, 1, 11],
        slot_mapping: &[-1; 11],
        pages: PageTable::Dense { block_table: &[0, 1, 2, 3, 4, 5, 6, 7], max_pages: 4 },
        shared_prefixes: &[],
        expanded: &[],
    };
    let short = LayerBatch { slot_mapping: &[-1; 10], ..batch };
    refuses_steps_and_bindings(
        spec,
        &LayerOptions { capacity, ..LayerOptions::default() },
        || (&batch, SplitPolicy::Auto),
        (&short, SplitPolicy::Auto),
        &layer_args(&spec, &buffers),
    );
}

crate::tests![
    errors_of_buffers,
    errors_of_decode_and_bind,
    errors_of_prepare_and_run,
    steps_and_bindings_of_others_are_refused,
];
