//! Weaker devices, lost devices, limits, and a device that only validates; [`layers`] has wrong arguments of a layer, [`made`] how devices
//! are made, [`shared`] arrays that are parts of one buffer.

mod foreign;
mod layers;
mod limits;
mod made;
mod shared;

use mla_support::paint::Make;
use mla_support::rig::{Rig, pages, plan, small};
use mla_support::suite::run::How;
use mla_support::suite::{Cases, Session, layer_rig, prefill};
use mla_support::{Ignored, Outcome};
use wgpu_mla::gpu::{Gpu, Setup, wanted};
use wgpu_mla::{
    Capacity, Caps, DecodeOptions, Device, Dtype, Error, HeadProject, KvAppend, KvAppendArgs, KvCopyPages,
    KvView, MergeState, MlaDecode, MlaDecodeArgs, RopeLayout, SplitPolicy, View, WeightFormat, WeightOrder,
    wgpu,
};

const FIXED: SplitPolicy = SplitPolicy::FixedTokens(32);

fn adapter(gpu: &Gpu) -> wgpu::Adapter {
    gpu.adapter().expect("of a device that this crate made").clone()
}

fn experimental() -> wgpu::ExperimentalFeatures {
    // SAFETY: this crate's shaders alone run on these devices.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// A device of its own, with features and limits changed from what `wanted` would ask for.
fn device(change: impl FnOnce(&mut wgpu::Features, &mut wgpu::Limits)) -> Result<Gpu, Ignored> {
    let adapter = adapter(&mla_support::gpu()?);
    let mut wanted = wanted(&adapter, experimental());
    change(&mut wanted.features, &mut wanted.limits);
    let made = Gpu::from_adapter(adapter, &wanted);
    Ok(pollster::block_on(made).expect("a weaker device"))
}

fn runs_right(rig: &Rig) {
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let step = rig.step(&loaded.problem, FIXED);
    rig.run(&step, &loaded);
    rig.check(&loaded, &loaded.problem);
}

fn spec() -> MlaDecode {
    small(&[(1, 1)]).spec
}

const PROJECT: HeadProject = HeadProject {
    input: Dtype::F16,
    weight: WeightFormat::Elements(Dtype::F16),
    output: Dtype::F16,
    num_heads: 2,
    k: 64,
    n: 64,
    order: WeightOrder::Kn,
    guard: false,
};

/// The device is one that was made without asking for any feature or limit.
fn a_default_device_works_and_says_what_it_lacks() -> Outcome {
    let defaults = |features: &mut wgpu::Features, limits: &mut wgpu::Limits| {
        (*features, *limits) = (wgpu::Features::empty(), wgpu::Limits::default());
    };
    let gpu = device(defaults)?;
    let rig = Rig::on(gpu, &spec());
    assert_eq!(rig.mla.variant(), "shared");
    assert!(
        rig.mla.why().contains("not subgroup: ") && rig.mla.why().contains("SUBGROUP"),
        "{}",
        rig.mla.why()
    );
    runs_right(&rig);

    let forced = |name: &str| DecodeOptions { variant: Some(name.into()), ..Default::default() };
    let error = rig.gpu.compile_with(spec(), &forced("subgroup")).expect_err("no subgroups");
    assert!(
        matches!(&error, Error::VariantUnavailable { name, why } if name == "subgroup" && why.contains("SUBGROUP")),
        "{error}"
    );
    let mla = rig.gpu.compile_with(spec(), &forced("shared")).expect("runs everywhere");
    assert!(mla.why().contains("forced"), "{}", mla.why());
    Ok(())
}

/// The same choice on a host's own device as on one that this crate makes.
fn a_hosts_device_gets_the_same_variant() -> Outcome {
    let made = mla_support::gpu()?;
    let hosts = Gpu::on(&adapter(&made), made.device(), made.queue());
    assert_eq!(hosts.caps(), made.caps());
    let choices = |gpu: &Gpu| {
        let mla = gpu.compile(spec()).expect("a decode");
        let project = gpu.compile(PROJECT).expect("a projection");
        [(mla.variant(), mla.why().to_owned()), (project.variant(), project.why().to_owned())]
    };
    assert_eq!(choices(&hosts), choices(&made));
    let unknown = Gpu::without_adapter(made.device(), made.queue(), &Setup::default());
    assert!(unknown.adapter().is_none());
    for (variant, why) in choices(&unknown) {
        assert!(!variant.starts_with("coop"), "{why}");
    }
    Ok(())
}

/// Only an adapter tells of cooperative matrices: where it was not given, that is the reason, and not that the card has none.
fn a_device_without_its_adapter_says_so() {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: wgpu::Backends::NOOP,
        backend_options: wgpu::BackendOptions {
            noop: wgpu::NoopBackendOptions { enable: true, ..Default::default() },
            ..Default::default()
        },
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let adapter = pollster::block_on(instance.request_adapter(&Default::default())).expect("needs no GPU");
    let without = wanted(&adapter, wgpu::ExperimentalFeatures::disabled());
    assert!(!without.features.intersects(wgpu::Features::all_experimental_mask()));
    let wanted = wanted(&adapter, experimental());
    assert!(wanted.features.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX));
    let gpu = pollster::block_on(Gpu::from_adapter(adapter, &wanted)).expect("a device");
    let why = |gpu: &Gpu| gpu.variants(&PROJECT).swap_remove(0).lacks.expect("it has no matrices");
    assert!(why(&gpu).contains("no cooperative matrices"), "{}", why(&gpu));
    let unknown = Gpu::without_adapter(gpu.device(), gpu.queue(), &Setup::default());
    assert!(why(&unknown).contains("adapter"), "{}", why(&unknown));
    let project = unknown.compile(PROJECT).expect("some variant runs");
    assert!(project.why().contains(&why(&unknown)), "{}", project.why());
}

/// Each weaker set of capabilities, as a real device where one can be made.
fn every_downgrade_runs() -> Outcome {
    let shared = Rig::shared()?;
    let (mut ran, mut left_out) = (0, 0);
    for (name, weaker) in shared.gpu.caps().downgrades() {
        let made = device(|features, limits| weaken(&weaker, features, limits))?;
        let adapter = made.adapter().expect("it was made from one");
        let setup = Setup { no_better_than: Some(weaker), ..Setup::default() };
        let gpu = Gpu::with(adapter, made.device(), made.queue(), &setup);
        if (gpu.caps().min_subgroup_size, gpu.caps().kind) != (weaker.min_subgroup_size, weaker.kind) {
            println!("{name}: {:?} is no device with {weaker:?}", gpu.caps());
            left_out += 1;
            continue;
        }
        ran += 1;
        runs_right(&Rig::on(gpu, &spec()));
    }
    assert!(ran >= 8, "only {ran} devices");
    crate::harness::count("wgpu weaker devices", ran, left_out);
    Ok(())
}

/// The tiles that Intel's GPUs get, on a device whose subgroups do not vary.
fn intels_tiles_run() -> Outcome {
    let shared = mla_support::gpu()?;
    let intel = Caps { min_subgroup_size: 8, max_subgroup_size: 32, ..*shared.caps() };
    let setup = Setup { no_better_than: Some(intel), ..Setup::default() };
    let gpu = Gpu::with(&adapter(&shared), shared.device(), shared.queue(), &setup);
    if (gpu.caps().min_subgroup_size, gpu.caps().max_subgroup_size) != (8, 32) {
        return Err(Ignored("no subgroups of 8 lanes or more".into()));
    }
    let mut session = Session::new(&gpu);
    session.cases = Cases::Representative;
    for dims in [(512, 64), (256, 32)] {
        session.check(&Make { dims, ..Make::default() }.build(), &How { policy: FIXED, ..How::default() });
    }
    session.finish("Intel's tiles");
    prefill::prefill_shapes(&session);
    Ok(())
}

fn weaken(to: &Caps, features: &mut wgpu::Features, limits: &mut wgpu::Limits) {
    for (feature, kept) in [
        (wgpu::Features::SUBGROUP, to.subgroups),
        (wgpu::Features::SHADER_F16, to.shader_f16),
        (wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX, to.cooperative_tile > 0),
    ] {
        if !kept {
            features.remove(feature);
        }
    }
    limits.max_compute_workgroup_storage_size = to.workgroup_memory_bytes;
    limits.max_compute_invocations_per_workgroup = to.max_invocations;
    limits.max_compute_workgroup_size_x = to.max_invocations;
    limits.max_storage_buffers_per_shader_stage = to.max_storage_buffers;
    limits.max_storage_buffer_binding_size = to.max_binding_bytes;
    limits.max_buffer_size = to.max_buffer_bytes;
    limits.max_compute_workgroups_per_dimension = to.max_workgroups;
}

/// A grid of few workgroups a dimension is folded in two.
fn a_folded_grid() -> Outcome {
    let gpu = device(|_, limits| limits.max_compute_workgroups_per_dimension = 24)?;
    let rig = Rig::on(gpu, &spec());
    let loaded = rig.load(small(&[(300, 1), (90, 2)]));
    let step = rig.step(&loaded.problem, SplitPolicy::FixedTokens(16));
    rig.run(&step, &loaded);
    rig.check(&loaded, &loaded.problem);
    // 576 workgroups in all.
    let error = rig.mla.step(Capacity { items: 577, ..Capacity::default() }).expect_err("too many");
    assert!(
        matches!(error, Error::Limit { what: "workgroups of a step", need: 577, limit: 576, .. }),
        "{error}"
    );
    let few = Capacity { merges: 97, ..Capacity::default() };
    let error = rig.mla.step(few).expect_err("97 tokens of 6 heads");
    assert!(matches!(error, Error::Limit { what: "workgroups of a step", need: 582, .. }), "{error}");
    Ok(())
}

/// Every call on a lost device is an error, and recording is still not a panic.
fn a_lost_device() -> Outcome {
    let gpu = device(|_, _| ())?;
    let rig = Rig::on(gpu, &spec());
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let [step, mut again] = [(); 2].map(|()| rig.step(&loaded.problem, FIXED));
    let mut before = rig.encoder();
    rig.mla.record(&mut before, &step, &loaded.binding).expect("recorded");

    rig.gpu.device().destroy();

    let lost = |what: &str, error: Option<Error>| {
        assert!(matches!(error, Some(Error::DeviceLost { .. })), "{what}: {error:?}");
    };
    // Before the callback is called.
    lost("check_lost", rig.gpu.check_lost().err());
    lost("run", rig.mla.run(&step, &loaded.binding).err());
    lost("upload", rig.gpu.upload(&loaded.q, 0, &[0; 4]).err());
    lost("buffer", rig.gpu.buffer(16).err());
    lost("compiled before", rig.gpu.compile(spec()).err());
    lost("compile", rig.gpu.compile(MlaDecode { out: Dtype::F16, ..spec() }).err());
    lost("step", rig.mla.step(Capacity::default()).err());
    let mut prepare = |problem| {
        let plan = plan(&rig.mla, problem, FIXED);
        rig.mla.prepare(&mut again, (&plan, pages(problem))).err()
    };
    lost("prepare", prepare(&loaded.problem));
    lost("prepare that grows", prepare(&small(&[(400, 30)])));
    let layer = MlaDecodeArgs::dense(rig.mla.op(), &loaded.q, &loaded.kv, &loaded.out, &loaded.lse, 0.1);
    lost("bind", rig.mla.bind(&layer, 3).err());

    let mut after = rig.encoder();
    rig.mla.record(&mut before, &step, &loaded.binding).expect("recorded");
    rig.mla.record(&mut after, &step, &loaded.binding).expect("recorded");
    rig.mla.record_slice(&mut after, &step, &loaded.binding, 0).expect("recorded");
    rig.submit(before);
    rig.submit(after);
    // The callback was called before this.
    rig.gpu.device().poll(wgpu::PollType::Poll).ok();
    lost("buffer", rig.gpu.buffer(16).err());
    lost("run", rig.mla.run(&step, &loaded.binding).err());
    lost("check_lost", rig.gpu.check_lost().err());
    Ok(())
}

/// A host's own device tells as soon, and calls the host's own callback.
fn a_hosts_lost_device() -> Outcome {
    let made = device(|_, _| ())?;
    let rig = Rig::on(Gpu::on(&adapter(&made), made.device(), made.queue()), &spec());
    let told = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let note = told.clone();
    made.device()
        .set_device_lost_callback(move |_, _| note.store(true, std::sync::atomic::Ordering::Relaxed));
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let step = rig.step(&loaded.problem, FIXED);
    rig.mla.run(&step, &loaded.binding).expect("runs");
    assert_eq!(rig.gpu.check_lost(), Ok(()));

    made.device().destroy();

    for (what, error) in [
        ("check_lost", rig.gpu.check_lost().err()),
        ("run", rig.mla.run(&step, &loaded.binding).err()),
        ("upload", rig.gpu.upload(&loaded.q, 0, &[0; 4]).err()),
        ("buffer", rig.gpu.buffer(16).err()),
    ] {
        assert!(matches!(error, Some(Error::DeviceLost { .. })), "{what}: {error:?}");
    }
    made.device().poll(wgpu::PollType::wait_indefinitely()).ok();
    assert!(told.load(std::sync::atomic::Ordering::Relaxed), "the host's callback is still in place");
    Ok(())
}

/// The small ops on a lost device, by the calls that make something.
fn small_ops_on_a_lost_device() -> Outcome {
    let gpu = device(|_, _| ())?;
    let spec = spec();
    let append_spec = KvAppend { shape: spec.shape, kv: spec.kv, input: Dtype::F32, guard: false };
    let copy_spec = KvCopyPages { shape: spec.shape, kv: spec.kv };
    let append = gpu.compile(append_spec).expect("compiles");
    let copy = gpu.compile(copy_spec).expect("compiles");
    let [rows, cache] =
        [4096, spec.kv.num_slots() * 288 * 2].map(|bytes| gpu.buffer(bytes).expect("a buffer"));

    gpu.device().destroy();

    let lost = |what: &str, error: Option<Error>| {
        assert!(matches!(error, Some(Error::DeviceLost { .. })), "{what}: {error:?}");
    };
    lost("compile append", gpu.compile(append_spec).err());
    lost("compile copy", gpu.compile(copy_spec).err());
    lost("compile merge", gpu.compile(MergeState { dtype: Dtype::F32, head_size: 64 }).err());
    let append_step = append.step(0).and_then(|mut step| append.prepare(&mut step, &[0, 1]));
    lost("prepare append", append_step.err());
    let copy_step = copy.step(0).and_then(|mut step| copy.prepare(&mut step, &[(0, 1)]));
    lost("prepare copy", copy_step.err());
    let kv = KvView::dense(&cache, &spec);
    let layer = KvAppendArgs {
        kv_c: View::dense(&rows, 1, 256),
        k_pe: View { offset: 512, ..View::dense(&rows, 1, 32) },
        kv: kv.clone(),
        k_scale: 1.0,
        guard: None,
    };
    lost("bind append", append.bind(&layer, 2).err());
    lost("bind copy", copy.bind(&kv, ()).err());
    Ok(())
}

/// Sizes beyond any device are refused before anything is allocated.
fn absurd_capacities() -> Outcome {
    let rig = Rig::shared()?;
    let all = |n| Capacity { items: n, queries: n, pages: n, merges: n, merge_partials: n, partials: n };
    for capacity in [
        Capacity { items: u32::MAX, ..Capacity::default() },
        Capacity { queries: u32::MAX, ..Capacity::default() },
        Capacity { pages: u32::MAX, ..Capacity::default() },
        Capacity { merges: u32::MAX, ..Capacity::default() },
        Capacity { merge_partials: u32::MAX, ..Capacity::default() },
        Capacity { partials: u32::MAX, ..Capacity::default() },
        Capacity { pages: 1 << 30, ..Capacity::default() },
        all(u32::MAX),
        all(1 << 29),
    ] {
        let error = rig.mla.step(capacity).expect_err("absurd");
        assert!(matches!(error, Error::Limit { .. }), "{capacity:?}: {error}");
    }
    Ok(())
}

/// A step that would have to grow past a limit keeps its buffers: what was recorded runs, and a batch that fits is prepared again.
fn growth_past_a_limit() -> Outcome {
    let small_bindings = |_: &mut wgpu::Features, limits: &mut wgpu::Limits| {
        limits.max_storage_buffer_binding_size = 1 << 20;
    };
    let gpu = device(small_bindings)?;
    let rig = Rig::on(gpu, &spec());
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let mut step = rig.step(&loaded.problem, FIXED);
    let before = step.capacity();
    let mut encoder = rig.encoder();
    rig.mla.record(&mut encoder, &step, &loaded.binding).expect("recorded");
    let large = small(&[(500, 3)]);
    let plan = plan(&rig.mla, &large, SplitPolicy::FixedTokens(1));
    let refused = rig.mla.prepare(&mut step, (&plan, pages(&large)));
    assert!(matches!(refused, Err(Error::Limit { what: "a step's partial results", .. })), "{refused:?}");
    rig.submit(encoder);
    rig.check(&loaded, &loaded.problem);
    rig.prepare(&mut step, &loaded.problem, FIXED);
    assert_eq!(step.capacity(), before);
    rig.poison(&loaded);
    rig.run(&step, &loaded);
    rig.check(&loaded, &loaded.problem);
    Ok(())
}

/// Everything but the numbers works without a GPU.
fn a_device_that_computes_nothing() {
    let (device, queue) = wgpu::Device::noop(&wgpu::DeviceDescriptor::default());
    let problem = small(&[(37, 1), (90, 2)]);
    let rig = Rig::on(Gpu::without_adapter(&device, &queue, &Setup::default()), &problem.spec);
    let loaded = rig.load(problem);
    let step = rig.step(&loaded.problem, FIXED);
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    rig.run(&step, &loaded);
    assert_eq!(pollster::block_on(scope.pop()).map(|error| error.to_string()), None);
}

/// In one buffer it is refused with the cure; in slabs as large as the limit it decodes, and so does a layer.
fn a_pool_larger_than_a_binding() -> Outcome {
    let gpu = device(|_, limits| limits.max_storage_buffer_binding_size = 128 << 10)?;
    let problem = small(&[(37, 1), (90, 2), (600, 1)]);
    let spec = &problem.spec;
    let slab_pages = spec.slab_pages(gpu.largest_binding());
    assert!(spec.kv.num_slabs(slab_pages).expect("slabs") >= 4, "slabs of {slab_pages} pages");
    let session = Session::new(&gpu);
    // Without splits, as partial results have to fit a binding too.
    let whole = How { policy: SplitPolicy::OneSplit, ..How::default() };
    let error = session.run_decode(&problem, &whole).expect_err("larger than a binding");
    assert!(error.contains("cut the pool into slabs"), "{error}");
    session.check(&problem, &How { slab_pages, ..whole });
    session.finish("slabs of a small limit");

    let layer = layer_rig::spec(Dtype::F16, Dtype::E4m3, RopeLayout::Interleaved, 24);
    let rig = layer_rig::Rig::in_slabs(&gpu, (layer, 11), 0, layer_rig::Submitted, 3).expect("a layer");
    let steps = { rig }.life(SplitPolicy::OneSplit).expect("runs");
    steps.iter().for_each(|step| step.check().expect("right"));
    Ok(())
}

crate::tests![
    (in foreign, layers, limits, made, shared)
    a_default_device_works_and_says_what_it_lacks,
    a_hosts_device_gets_the_same_variant,
    a_device_without_its_adapter_says_so,
    every_downgrade_runs,
    intels_tiles_run,
    a_folded_grid,
    a_lost_device,
    a_hosts_lost_device,
    small_ops_on_a_lost_device,
    absurd_capacities,
    growth_past_a_limit,
    a_pool_larger_than_a_binding,
    a_device_that_computes_nothing,
];
