//! [`AnyBackend`]: it computes what the chosen backend does, and refuses buffers of another.

#[cfg(feature = "wgpu")]
use mla_support::Outcome;
use mla_support::paint::Make;
use wgpu_mla::any::{self, AnyBackend, Chosen};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{
    Binding, Compiled, Device, Dtype, Error, KvAppend, KvAppendArgs, KvCopyPages, KvView, MergeState,
    MergeStateArgs, MlaDecode, MlaDecodeArgs, MlaLayer, Rope, RopeAppend, RopeAppendArgs, RopeAppendBatch,
    RopeArgs, RopeLayout, Step, View,
};

fn best_is_here_and_says_why() {
    let spec = Make::default().build().spec;
    let best = AnyBackend::best(&spec);
    println!("{}: {}", best.name(), best.why());
    match best.chosen() {
        #[cfg(feature = "cuda")]
        Chosen::Cuda(_) => assert!(best.why().starts_with("CUDA"), "{}", best.why()),
        #[cfg(feature = "wgpu")]
        Chosen::Wgpu(_) => assert!(best.why().contains("not CUDA: "), "{}", best.why()),
        Chosen::Cpu(_) => {
            assert!(best.why().contains("not CUDA: ") && best.why().contains("not wgpu: "), "{}", best.why())
        }
        _ => unreachable!("there are three"),
    }
    for (built, feature) in [(cfg!(feature = "cuda"), "cuda"), (cfg!(feature = "wgpu"), "wgpu")] {
        let lacks = best.why().contains(&format!("built without the feature `{feature}`"));
        assert!(!(built && lacks), "{}", best.why());
    }
    assert_eq!(AnyBackend::from(Cpu::new()).why(), "the caller's choice");
}

/// It is `Send` and `Sync` where every backend is.
fn it_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<AnyBackend>();
    shared::<any::Buffer>();
    shared::<(Compiled<MlaDecode, AnyBackend>, Compiled<MlaLayer, AnyBackend>)>();
    shared::<(Step<MlaDecode, AnyBackend>, Step<MlaLayer, AnyBackend>)>();
    shared::<(Binding<MlaDecode, AnyBackend>, Binding<MlaLayer, AnyBackend>)>();
}

/// CUDA is taken where there is a card; without one, or without its driver, another backend, and `why` says so.
#[cfg(feature = "cuda")]
fn cuda_is_taken_where_there_is_a_card() {
    let make = Make { cache: Dtype::Bf16, query: Dtype::Bf16, ..Make::default() };
    let best = AnyBackend::best(&make.build().spec);
    match mla_support::cuda() {
        Ok(_) => {
            assert!(matches!(best.chosen(), Chosen::Cuda(_)), "{}", best.why());
            let buffer = best.buffer(64).expect("memory");
            assert!(matches!(buffer, any::Buffer::Cuda(_)), "{buffer:?}");
        }
        Err(_) => {
            assert!(!matches!(best.chosen(), Chosen::Cuda(_)));
            assert!(best.why().contains("not CUDA: no device: "), "{}", best.why());
        }
    }
}

/// Any adapter is taken before the CPU, one in software too.
#[cfg(feature = "wgpu")]
fn the_cpu_is_for_where_wgpu_finds_no_adapter() {
    let best = AnyBackend::best(&Make::default().build().spec);
    match (mla_support::gpu(), best.chosen()) {
        (Ok(gpu), Chosen::Wgpu(chosen)) => assert_eq!(chosen.describe(), gpu.describe()),
        (Ok(_), Chosen::Cpu(_)) => panic!("an adapter was passed over: {}", best.why()),
        (Err(_), Chosen::Wgpu(_)) => panic!("there is no adapter: {}", best.why()),
        _ => {}
    }
}

/// Buffers of other backends, as far as they can be made without a card.
fn foreign_buffers() -> Vec<any::Buffer> {
    Vec::from([
        #[cfg(feature = "wgpu")]
        {
            use wgpu_mla::wgpu::{BufferDescriptor, BufferUsages, Device};
            let (device, _) = Device::noop(&Default::default());
            let usage = BufferUsages::STORAGE;
            let about = BufferDescriptor { label: None, size: 1 << 20, usage, mapped_at_creation: false };
            any::Buffer::from(device.create_buffer(&about))
        },
        #[cfg(feature = "cuda")]
        {
            // SAFETY: it is refused, so that nothing looks there.
            any::Buffer::from(unsafe { wgpu_mla::cuda::Buffer::from_raw(1 << 32, 1 << 20) })
        },
    ])
}

fn must_refuse<T>(result: wgpu_mla::Result<T>) {
    match result {
        Ok(_) => panic!("a foreign buffer was taken"),
        Err(error) => {
            assert!(matches!(error, Error::OtherBackend { what: "buffer", here: "the CPU", .. }), "{error}");
            assert!(error.to_string().contains("copy by `download` and `upload`"), "{error}");
        }
    }
}

fn a_buffer_of_another_backend_is_refused_by_every_op() {
    let cpu = AnyBackend::from(Cpu::with_threads(1));
    let spec = Make::default().build().spec;
    let mla = cpu.compile(spec).expect("a decode");
    let own: [any::Buffer; 6] = std::array::from_fn(|_| cpu.buffer(1 << 20).expect("memory"));
    for foreign in &foreign_buffers() {
        must_refuse(cpu.upload(foreign, 0, &[0; 4]));
        must_refuse(cpu.download(foreign, 4));
        // Each place in turn.
        for place in 0..6 {
            let buffer = |at: usize| if at == place { foreign } else { &own[at] };
            let [a, b, c, d, e, f] = std::array::from_fn(buffer);
            let whole = MlaDecodeArgs::dense(&spec, a, b, c, d, 0.1);
            if place < 4 {
                must_refuse(mla.bind(&whole, 1));
            }
            let states = MergeStateArgs {
                prefix_output: View::dense(a, 1, 8),
                prefix_lse: View::dense(b, 1, 1),
                suffix_output: View::dense(c, 1, 8),
                suffix_lse: View::dense(d, 1, 1),
                output: View::dense(e, 1, 8),
                output_lse: Some(View::dense(f, 1, 1)),
                num_tokens: 1,
                num_heads: 1,
                output_scale: 1.0,
            };
            let of = MergeState { dtype: Dtype::F32, head_size: 8 };
            must_refuse(cpu.once(of, (), &states));
            if place < 3 {
                let kv = KvView::dense(c, &spec);
                let rows = KvAppendArgs {
                    kv_c: View::dense(a, 1, 8),
                    k_pe: View::dense(b, 1, 8),
                    kv,
                    k_scale: 1.0,
                    guard: None,
                };
                let of = KvAppend { shape: spec.shape, kv: spec.kv, input: Dtype::F32, guard: false };
                must_refuse(cpu.once(of, &[0], &rows));
            }
            let rope = RopeArgs {
                x: View::dense(a, 1, 64),
                y: View::dense(b, 1, 64),
                positions: c,
                cos_sin: d,
                max_position: 1,
                scale: 1.0,
            };
            let layout = RopeLayout::Interleaved;
            let of = Rope { dtype: Dtype::F32, num_heads: 1, rope_dim: 64, layout };
            if place < 4 {
                must_refuse(cpu.once(of, 0..1, &rope));
            }
            let args = RopeAppendArgs {
                q_pe: rope.x,
                q_pe_out: rope.y,
                layer: KvAppendArgs {
                    kv_c: View::dense(e, 1, 512),
                    k_pe: View::dense(e, 1, 64),
                    kv: KvView::dense(f, &spec),
                    k_scale: 1.0,
                    guard: None,
                },
                positions: c,
                cos_sin: d,
                max_position: 1,
                q_pe_scale: 1.0,
                q_scale: 1.0,
            };
            let append = KvAppend { shape: spec.shape, kv: spec.kv, input: Dtype::F32, guard: false };
            let of = RopeAppend { append, query: Dtype::F32, query_out: Dtype::F32, num_heads: 1, layout };
            must_refuse(cpu.once(of, RopeAppendBatch::slots(&[0]), &args));
        }
        let kv = KvView::dense(foreign, &spec);
        must_refuse(cpu.once(KvCopyPages { shape: spec.shape, kv: spec.kv }, &[], &kv));
    }
}

/// Also steps and bindings.
#[cfg(feature = "wgpu")]
fn what_another_backend_made_is_refused() -> Outcome {
    use wgpu_mla::{Batch, Capacity, DecodeOptions, PageTable, Plan, SplitPolicy};
    let gpu = mla_support::gpu()?;
    let (cpu, gpu) = (AnyBackend::from(Cpu::with_threads(1)), AnyBackend::from(gpu));
    let spec = Make::default().build().spec;
    let shared = DecodeOptions { variant: Some("shared".into()), ..DecodeOptions::default() };
    let (mla, foreign) =
        (cpu.compile(spec).expect("a decode"), gpu.compile_with(spec, &shared).expect("a decode"));
    let refused = |result: wgpu_mla::Result<()>| {
        let error = result.expect_err("what another backend made was taken");
        assert!(matches!(error, Error::LayoutMismatch { .. }), "{error}");
        assert!(error.to_string().contains("another device"), "{error}");
    };

    let plan =
        Plan::new(&spec, &mla.tiling(), &Batch::new(&[1], &[0, 1]), SplitPolicy::Auto).expect("a plan");
    let input = (&plan, PageTable::Dense { block_table: &[0], max_pages: 1 });
    let mut step = foreign.step(Capacity::of(&plan)).expect("a step");
    refused(mla.prepare(&mut step, input));

    let mut own = mla.step(Capacity::of(&plan)).expect("a step");
    mla.prepare(&mut own, input).expect("prepared");
    let [q, kv, out, lse] = std::array::from_fn(|_| gpu.buffer(2 << 20).expect("memory"));
    let layer = MlaDecodeArgs::dense(&spec, &q, &kv, &out, &lse, 0.1);
    let binding = foreign.bind(&layer, 1).expect("a binding");
    refused(mla.run(&step, &binding));
    refused(mla.run(&own, &binding));
    Ok(())
}

crate::tests![
    best_is_here_and_says_why,
    it_is_shared_between_threads,
    #[cfg(feature = "cuda")]
    cuda_is_taken_where_there_is_a_card,
    #[cfg(feature = "wgpu")]
    the_cpu_is_for_where_wgpu_finds_no_adapter,
    a_buffer_of_another_backend_is_refused_by_every_op,
    #[cfg(feature = "wgpu")]
    what_another_backend_made_is_refused,
];
