//! Recording on wgpu: when a step's contents change, slices, the host's pass.

use mla_support::Outcome;
use mla_support::paint::POISON;
use mla_support::rig::{Loaded, Rig, pages, plan, shortened, small};
use wgpu_mla::gpu::{Gpu, MAX_SLICES, Setup, SliceBudget};
use wgpu_mla::{
    Binding, Capacity, Compiled, Device, Dtype, Error, MlaDecode, MlaDecodeArgs, Plan, Rope, RopeArgs,
    RopeLayout, SplitPolicy, Step, View, wgpu,
};

const FIXED: SplitPolicy = SplitPolicy::FixedTokens(32);

/// Preparing a second step must not disturb a first one that is recorded and not yet submitted.
fn two_steps_in_one_submit() -> Outcome {
    let rig = Rig::shared()?;
    let first = rig.load(small(&[(37, 1), (90, 2)]));
    let second = rig.load(small(&[(5, 1), (0, 1), (71, 3)]));
    let mut encoder = rig.encoder();
    let first_step = rig.step(&first.problem, FIXED);
    rig.mla.record(&mut encoder, &first_step, &first.binding).expect("recorded");
    let second_step = rig.step(&second.problem, FIXED);
    rig.mla.record(&mut encoder, &second_step, &second.binding).expect("recorded");
    rig.submit(encoder);
    rig.check(&first, &first.problem);
    rig.check(&second, &second.problem);
    Ok(())
}

/// A step that is prepared again before the submit: the commands run with what they were recorded with.
fn recorded_commands_keep_their_tables() -> Outcome {
    let rig = Rig::shared()?;
    let long = rig.load(small(&[(90, 1), (150, 2)]));
    let short = shortened(&long.problem, &[33, 2]);
    let room = Capacity::of(&plan(&rig.mla, &long.problem, FIXED));
    let mut step = rig.mla.step(room).expect("a step");
    rig.prepare(&mut step, &short, FIXED);
    let mut encoder = rig.encoder();
    rig.mla.record(&mut encoder, &step, &long.binding).expect("recorded");
    rig.prepare(&mut step, &long.problem, FIXED);
    assert_eq!(step.capacity(), room, "the grid that was recorded");
    rig.submit(encoder);
    rig.check(&long, &short);
    rig.run(&step, &long);
    rig.check(&long, &long.problem);
    // The short batch again: items that were in use must not run.
    rig.prepare(&mut step, &short, FIXED);
    rig.run(&step, &long);
    rig.check(&long, &short);
    // The step is prepared more often than its buffers have regions.
    let mut encoder = rig.encoder();
    for _ in 0..20 {
        rig.prepare(&mut step, &long.problem, FIXED);
        rig.mla.record(&mut encoder, &step, &long.binding).expect("recorded");
        rig.prepare(&mut step, &short, FIXED);
        rig.mla.record(&mut encoder, &step, &long.binding).expect("recorded");
    }
    rig.submit(encoder);
    rig.check(&long, &short);
    Ok(())
}

/// A step that is prepared for more query tokens than its binding has, after it was recorded.
fn a_later_prepare_stays_out_of_what_was_recorded() -> Outcome {
    let rig = Rig::shared()?;
    let wide = rig.load(small(&[(90, 1), (150, 2)]));
    let narrow = small(&[(90, 1), (150, 0)]);
    let layer = MlaDecodeArgs::dense(rig.mla.op(), &wide.q, &wide.kv, &wide.out, &wide.lse, 1.0);
    let binding = rig.mla.bind(&layer, 1).expect("a binding of one token");
    for policy in [FIXED, SplitPolicy::OneSplit] {
        let room = Capacity::of(&plan(&rig.mla, &wide.problem, policy));
        let mut step = rig.mla.step(room).expect("a step");
        rig.prepare(&mut step, &narrow, policy);
        let mut encoder = rig.encoder();
        rig.mla.record(&mut encoder, &step, &binding).expect("recorded");
        rig.prepare(&mut step, &wide.problem, policy);
        rig.submit(encoder);
        for bytes in rig.bits(&wide) {
            let (bound, rest) = bytes.split_at(bytes.len() / 3);
            assert!(bound.iter().any(|&byte| byte != POISON), "it ran");
            assert!(rest.iter().all(|&byte| byte == POISON), "written past the binding");
        }
    }
    Ok(())
}

/// A plan's fields are public: indices that would lead a kernel out of its buffers are refused.
fn a_changed_plan_is_refused() -> Outcome {
    let rig = Rig::shared()?;
    let good = rig.load(small(&[(37, 1), (90, 2)]));
    let mut step = rig.step(&good.problem, FIXED);
    type Change = (&'static str, fn(&mut Plan));
    let changes: [Change; 13] = [
        ("first_row", |plan| plan.items[0].first_row = 1 << 30),
        ("no rows", |plan| plan.items[0].num_rows = 0),
        ("rows past the tile", |plan| plan.items[0].num_rows = 1000),
        ("page_begin", |plan| plan.items[0].page_begin = 1 << 30),
        ("kv_end", |plan| plan.items[0].kv_end = u32::MAX),
        ("kv_begin", |plan| plan.items[0].kv_begin = plan.items[0].kv_end + 1),
        ("partial", |plan| plan.items[0].partial = plan.num_partials),
        ("query token", |plan| plan.queries[0].token = plan.num_queries),
        ("merge token", |plan| plan.merges[0].token = plan.num_queries),
        ("merge end", |plan| plan.merges[0].end = 1 << 30),
        ("merge partial", |plan| plan.merge_partials[0] = plan.num_partials),
        ("page list", |plan| plan.page_begin[1] = 0),
        ("shared", |plan| plan.shared.push((7, 8, 1))),
    ];
    for (what, change) in changes {
        let mut changed = plan(&rig.mla, &good.problem, FIXED);
        change(&mut changed);
        let refused = rig.mla.prepare(&mut step, (&changed, pages(&good.problem)));
        assert!(matches!(refused, Err(Error::Shape { what: "plan of items", .. })), "{what}: {refused:?}");
    }
    rig.prepare(&mut step, &good.problem, FIXED);
    rig.run(&step, &good);
    rig.check(&good, &good.problem);
    Ok(())
}

/// Commands of a step that grew keep its old buffers: they run the batch that they were recorded with.
fn growth_leaves_recorded_commands_alone() -> Outcome {
    let rig = Rig::shared()?;
    let long = rig.load(small(&[(300, 2), (200, 2)]));
    let short = shortened(&long.problem, &[20, 40]);
    let mut step = rig.step(&short, SplitPolicy::OneSplit);
    let before = step.capacity();
    let mut encoder = rig.encoder();
    rig.mla.record(&mut encoder, &step, &long.binding).expect("recorded");
    rig.prepare(&mut step, &long.problem, SplitPolicy::FixedTokens(16));
    assert!(!before.holds(step.capacity()));
    rig.submit(encoder);
    rig.check(&long, &short);
    rig.run(&step, &long);
    rig.check(&long, &long.problem);
    Ok(())
}

/// A refused plan changes nothing on the device: commands recorded before it run, new ones need another prepare.
fn a_refused_plan_changes_nothing() -> Outcome {
    let rig = Rig::shared()?;
    let good = rig.load(small(&[(37, 1), (90, 2)]));
    let mut step = rig.step(&good.problem, FIXED);
    let mut encoder = rig.encoder();
    rig.mla.record(&mut encoder, &step, &good.binding).expect("recorded");
    let mut bad = shortened(&good.problem, &[37, 60]);
    bad.block_table[1] = -5;
    let refused = rig.mla.prepare(&mut step, (&plan(&rig.mla, &bad, FIXED), pages(&bad)));
    assert!(matches!(refused, Err(Error::PageOutOfRange { seq: 0, block: 1, page: -5, .. })), "{refused:?}");
    rig.submit(encoder);
    rig.check(&good, &good.problem);

    rig.poison(&good);
    assert_refused(rig, &rig.mla, &step, &good, &good.binding, "its last prepare failed");
    rig.prepare(&mut step, &good.problem, FIXED);
    rig.run(&step, &good);
    rig.check(&good, &good.problem);
    Ok(())
}

fn slice_budget(work: f64) -> Option<SliceBudget> {
    Some(SliceBudget { milliseconds: 1.0, work_per_millisecond: work })
}

/// Each slice with a submit of its own gives the bits of the whole.
fn slices_give_the_bits_of_the_whole() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(300, 1), (90, 3), (0, 1)]));
    let mut step = rig.step(&loaded.problem, FIXED);
    assert_eq!(step.num_slices(), 1);
    rig.run(&step, &loaded);
    let whole = rig.bits(&loaded);
    rig.check(&loaded, &loaded.problem);

    // One item a slice; several; more items than there may be slices.
    for (budget, policy) in [(1.0, FIXED), (500.0, FIXED), (1.0, SplitPolicy::FixedTokens(4))] {
        step.set_slice_budget(slice_budget(budget));
        rig.prepare(&mut step, &loaded.problem, policy);
        let (items, slices) = (plan(&rig.mla, &loaded.problem, policy).items.len(), step.num_slices());
        assert!(slices > 1 && slices <= MAX_SLICES.min(items), "{slices} slices of {items} items");
        rig.poison(&loaded);
        rig.run(&step, &loaded);
        let whole = if policy == FIXED { whole.clone() } else { rig.bits(&loaded) };
        rig.poison(&loaded);
        for index in 0..slices {
            let mut encoder = rig.encoder();
            rig.mla.record_slice(&mut encoder, &step, &loaded.binding, index).expect("recorded");
            rig.submit(encoder);
        }
        assert_eq!(rig.bits(&loaded), whole, "{slices} slices of {items} items");
    }
    let mut encoder = rig.encoder();
    rig.poison(&loaded);
    let error = rig.mla.record_slice(&mut encoder, &step, &loaded.binding, step.num_slices());
    let error = error.expect_err("there is no such slice");
    assert!(error.to_string().contains("Step::num_slices"), "{error}");
    rig.submit(encoder);
    assert!(rig.untouched(&loaded), "there is no such slice");

    step.set_slice_budget(None);
    rig.prepare(&mut step, &loaded.problem, FIXED);
    assert_eq!(step.num_slices(), 1);
    Ok(())
}

/// Absurd budgets still give slices that run.
fn odd_budgets_make_slices_that_run() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(90, 2)]));
    let mut step = rig.step(&loaded.problem, FIXED);
    for work in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        step.set_slice_budget(slice_budget(work));
        rig.prepare(&mut step, &loaded.problem, FIXED);
        rig.poison(&loaded);
        let mut encoder = rig.encoder();
        for index in 0..step.num_slices() {
            rig.mla.record_slice(&mut encoder, &step, &loaded.binding, index).expect("recorded");
        }
        rig.submit(encoder);
        rig.check(&loaded, &loaded.problem);
    }
    Ok(())
}

/// A host kernel that copies words.
const HOST_WGSL: &str = "
@group(0) @binding(0) var<storage, read> from_words: array<u32>;
@group(0) @binding(1) var<storage, read_write> to_words: array<u32>;
@compute @workgroup_size(64)
fn host(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&from_words)) { to_words[id.x] = from_words[id.x]; }
}";

fn host_copy(
    rig: &Rig,
    pipeline: &wgpu::ComputePipeline,
    from: &wgpu::Buffer,
    to: &wgpu::Buffer,
) -> wgpu::BindGroup {
    rig.gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[
            wgpu::BindGroupEntry { binding: 0, resource: from.as_entire_binding() },
            wgpu::BindGroupEntry { binding: 1, resource: to.as_entire_binding() },
        ],
    })
}

/// In the host's pass, between the host's own dispatches: it makes the query before and reads the output after.
fn a_decode_in_the_hosts_pass() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let step = rig.step(&loaded.problem, FIXED);
    let device = rig.gpu.device();
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(HOST_WGSL.into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let made_query = rig.buffer(&loaded.problem.q);
    rig.gpu.upload(&loaded.q, 0, &vec![0xFF; loaded.problem.q.len()]).expect("uploaded");
    let read_out = rig.buffer(&vec![0; loaded.out.size() as usize]);
    let before = host_copy(rig, &pipeline, &made_query, &loaded.q);
    let after = host_copy(rig, &pipeline, &loaded.out, &read_out);

    let mut encoder = rig.encoder();
    encoder.clear_buffer(&loaded.lse, 0, None);
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &before, &[]);
        pass.dispatch_workgroups(loaded.q.size().div_ceil(256) as u32, 1, 1);
        rig.mla.record_on(&mut pass, &step, &loaded.binding).expect("recorded");
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &after, &[]);
        pass.dispatch_workgroups(loaded.out.size().div_ceil(256) as u32, 1, 1);
    }
    rig.submit(encoder);
    rig.check(&loaded, &loaded.problem);
    let read = rig.gpu.download(&read_out, read_out.size()).expect("downloaded");
    assert_eq!(read, rig.bits(&loaded)[0]);
    Ok(())
}

/// Each way to record or run a step is the same error, before anything is recorded.
fn assert_refused(
    rig: &Rig,
    mla: &Compiled<MlaDecode, Gpu>,
    step: &Step<MlaDecode, Gpu>,
    loaded: &Loaded,
    binding: &Binding<MlaDecode, Gpu>,
    why: &str,
) {
    let error = mla.check(step, binding).expect_err(why);
    assert!(matches!(error, Error::LayoutMismatch { detail } if detail.contains(why)), "{why}: {error}");
    let mut encoder = rig.encoder();
    assert_eq!(mla.record(&mut encoder, step, binding), Err(error.clone()));
    assert_eq!(mla.record_slice(&mut encoder, step, binding, 0), Err(error.clone()));
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert_eq!(mla.record_on(&mut pass, step, binding), Err(error.clone()));
        assert_eq!(mla.record_slice_on(&mut pass, step, binding, 0), Err(error.clone()));
    }
    rig.submit(encoder);
    assert_eq!(mla.run(step, binding), Err(error));
    assert!(rig.untouched(loaded), "{why}");
}

/// A step and a binding that do not belong together: another compiled op's, or one too small for the other.
fn what_does_not_belong_together_records_nothing() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let step = rig.step(&loaded.problem, FIXED);
    let other = rig.gpu.compile(*rig.mla.op()).expect("the same kernels");
    let layer = MlaDecodeArgs::dense(rig.mla.op(), &loaded.q, &loaded.kv, &loaded.out, &loaded.lse, 1.0);
    let other_binding = other.bind(&layer, 3).expect("a binding");
    let mut other_step = other.step(Capacity::default()).expect("a step");
    let plan = plan(&other, &loaded.problem, FIXED);
    other.prepare(&mut other_step, (&plan, pages(&loaded.problem))).expect("prepared");
    let more_step = rig.step(&small(&[(37, 1), (90, 3)]), FIXED);

    for (mla, step, binding, why) in [
        (&other, &step, &loaded.binding, "made by another op"),
        (&rig.mla, &other_step, &loaded.binding, "made by another op"),
        (&rig.mla, &step, &other_binding, "made by another op"),
        (&rig.mla, &more_step, &loaded.binding, "more query tokens"),
    ] {
        assert_refused(rig, mla, step, &loaded, binding, why);
    }
    // It is refused before the step changes, which stays prepared for the op that made it.
    let refused = rig.mla.prepare(&mut other_step, (&plan, pages(&loaded.problem)));
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    for (mla, step, binding) in [(&rig.mla, &step, &loaded.binding), (&other, &other_step, &other_binding)] {
        assert_eq!(mla.check(step, binding), Ok(()));
    }
    Ok(())
}

/// A step that was never prepared, with room or without.
fn a_step_that_was_not_prepared_records_nothing() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(37, 1)]));
    for capacity in [Capacity::default(), Capacity { items: 4, merges: 4, ..Capacity::default() }] {
        let step = rig.mla.step(capacity).expect("a step");
        assert_refused(rig, &rig.mla, &step, &loaded, &loaded.binding, "the step was not prepared");
    }
    Ok(())
}

/// A step that is a range of tokens depends on no spec: any op of the type may record it, but only on the device that made it.
fn steps_of_a_range_serve_every_op_of_their_device() -> Outcome {
    let rig = Rig::shared()?;
    let spec = Rope { dtype: Dtype::F32, num_heads: 2, rope_dim: 8, layout: RopeLayout::Interleaved };
    let keys = Rope { num_heads: 1, layout: RopeLayout::HalfSplit, ..spec };
    let (queries, keys) =
        (rig.gpu.compile(spec).expect("compiles"), rig.gpu.compile(keys).expect("compiles"));
    // Turned by half a circle at each position.
    let turns = [[-1f32; 4], [0.0; 4]].concat();
    let cos_sin = rig.buffer(bytemuck::cast_slice(&turns));
    let positions = rig.buffer(&[0; 4 * 4]);
    let x = rig.buffer(bytemuck::cast_slice(&[1f32; 4 * 2 * 8]));
    let [many, one] = [2, 1].map(|heads| rig.gpu.buffer(4 * heads * 8 * 4).expect("a buffer"));
    let args = |y, heads| RopeArgs {
        x: View::dense(&x, heads, 8),
        y: View::dense(y, heads, 8),
        positions: &positions,
        cos_sin: &cos_sin,
        max_position: 1,
        scale: 1.0,
    };
    let of_queries = queries.bind(&args(&many, 2), 4).expect("binds");
    let of_keys = keys.bind(&args(&one, 1), 4).expect("binds");
    let mut step = queries.step(0).expect("a step");
    for refused in [queries.run(&step, &of_queries), keys.run(&step, &of_keys)] {
        assert!(matches!(refused, Err(Error::LayoutMismatch { detail }) if detail.contains("not prepared")));
    }
    queries.prepare(&mut step, 1..3).expect("prepares");
    queries.run(&step, &of_queries).expect("runs");
    keys.run(&step, &of_keys).expect("runs");
    for (y, row) in [(&many, 16), (&one, 8)] {
        let got = Dtype::F32.decode_all(&rig.gpu.download(y, y.size()).expect("downloads"));
        assert_eq!(got, [vec![0.0; row], vec![-1.0; 2 * row], vec![0.0; row]].concat());
    }
    // Bindings hold what the spec says.
    assert!(matches!(keys.run(&step, &of_queries), Err(Error::LayoutMismatch { .. })));
    let (device, queue) = wgpu::Device::noop(&wgpu::DeviceDescriptor::default());
    let elsewhere = Gpu::without_adapter(&device, &queue, &Setup::default()).compile(spec).expect("compiles");
    let refused = elsewhere.prepare(&mut step, 0..1).expect_err("of another device");
    assert!(refused.to_string().contains("another device"), "{refused}");
    Ok(())
}

/// A step with room for many rows merges with the other shape of workgroups. Counts of partial results where either shape takes
/// another path: 1, fewer than 16 and more, and more than a workgroup holds at a time.
fn the_room_for_merges_changes_no_bit() -> Outcome {
    let rig = Rig::shared()?;
    let policy = SplitPolicy::FixedTokens(1);
    let loaded = rig.load(small(&[(1, 1), (9, 1), (16, 2), (17, 1), (300, 1), (600, 1)]));
    let few = rig.step(&loaded.problem, policy);
    rig.run(&few, &loaded);
    rig.check(&loaded, &loaded.problem);
    let expected = rig.bits(&loaded);
    let mut many = rig.mla.step(Capacity { merges: 100, ..few.capacity() }).expect("a step");
    rig.prepare(&mut many, &loaded.problem, policy);
    assert!(few.capacity().merges * 6 <= 128 && many.capacity().merges * 6 > 128, "one shape");
    rig.poison(&loaded);
    rig.run(&many, &loaded);
    assert!(rig.bits(&loaded) == expected, "the bits differ");
    Ok(())
}

/// A decode loop within its capacity: a hundred steps in the same buffers.
fn a_steady_loop_makes_no_buffers() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(140, 1), (110, 1), (101, 1)]));
    let longest = &loaded.problem;
    // Room for what the host knows it will need.
    let room = Capacity::of(&plan(&rig.mla, longest, FIXED));
    let mut step = rig.mla.step(room).expect("a step");
    for token in 0..=100 {
        let now = shortened(longest, &[40 + token, 10 + token, 1 + token]);
        rig.prepare(&mut step, &now, FIXED);
        assert_eq!(step.capacity(), room, "token {token}");
        rig.run(&step, &loaded);
        if token % 25 == 0 {
            rig.check(&loaded, &now);
        }
    }
    Ok(())
}

crate::tests![
    two_steps_in_one_submit,
    recorded_commands_keep_their_tables,
    a_later_prepare_stays_out_of_what_was_recorded,
    a_changed_plan_is_refused,
    growth_leaves_recorded_commands_alone,
    a_refused_plan_changes_nothing,
    slices_give_the_bits_of_the_whole,
    odd_budgets_make_slices_that_run,
    a_decode_in_the_hosts_pass,
    what_does_not_belong_together_records_nothing,
    a_step_that_was_not_prepared_records_nothing,
    steps_of_a_range_serve_every_op_of_their_device,
    the_room_for_merges_changes_no_bit,
    a_steady_loop_makes_no_buffers,
];
