//! Recording on wgpu: what a step holds and when, slices, the host's pass.

use mla_support::paint::POISON;
use mla_support::rig::{Rig, pages, plan, shortened, small};
use mla_support::{Outcome, logged};
use wgpu_mla::gpu::{MAX_SLICES, MlaDecode, Options, SliceBudget};
use wgpu_mla::{Backend, Capacity, Error, Layer, Plan, Policy, wgpu};

const FIXED: Policy = Policy::FixedTokens(32);

/// Preparing a second step must not disturb a first one that is recorded and not yet submitted.
fn two_steps_in_one_submit() -> Outcome {
    let rig = Rig::shared()?;
    let first = rig.load(small(&[(37, 1), (90, 2)]));
    let second = rig.load(small(&[(5, 1), (0, 1), (71, 3)]));
    let mut encoder = rig.encoder();
    let first_step = rig.step(&first.problem, FIXED);
    rig.mla.record(&mut encoder, &first_step, &first.binding);
    let second_step = rig.step(&second.problem, FIXED);
    rig.mla.record(&mut encoder, &second_step, &second.binding);
    rig.submit(encoder);
    rig.check(&first, &first.problem);
    rig.check(&second, &second.problem);
    Ok(())
}

/// A step that is prepared again before the submit: the commands run with the new lengths.
fn a_replay_sees_the_new_lengths() -> Outcome {
    let rig = Rig::shared()?;
    let long = rig.load(small(&[(90, 1), (150, 2)]));
    let short = shortened(&long.problem, &[33, 2]);
    let room = Capacity::of(&plan(&rig.mla, &long.problem, FIXED));
    let mut step = rig.mla.step(room).expect("a step");
    rig.prepare(&mut step, &short, FIXED);
    let mut encoder = rig.encoder();
    rig.mla.record(&mut encoder, &step, &long.binding);
    rig.prepare(&mut step, &long.problem, FIXED);
    assert_eq!(step.capacity(), room, "the grid that was recorded");
    rig.submit(encoder);
    rig.check(&long, &long.problem);
    // And back: items that were in use must not run again.
    rig.prepare(&mut step, &short, FIXED);
    rig.run(&step, &long);
    rig.check(&long, &short);
    Ok(())
}

/// A replay of more query tokens than its binding has breaks the contract; what is past the binding stays untouched.
fn a_replay_stays_inside_of_its_binding() -> Outcome {
    let rig = Rig::shared()?;
    let wide = rig.load(small(&[(90, 1), (150, 2)]));
    let narrow = small(&[(90, 1), (150, 0)]);
    let layer = Layer::dense(rig.mla.spec(), &wide.q, &wide.kv, &wide.out, &wide.lse, 1.0);
    let binding = rig.mla.bind(1, &layer).expect("a binding of one token");
    for policy in [FIXED, Policy::OneSplit] {
        let room = Capacity::of(&plan(&rig.mla, &wide.problem, policy));
        let mut step = rig.mla.step(room).expect("a step");
        rig.prepare(&mut step, &narrow, policy);
        let mut encoder = rig.encoder();
        rig.mla.record(&mut encoder, &step, &binding);
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

/// A plan's fields are public: what a kernel would follow out of its buffers is refused.
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
        ("slot", |plan| plan.items[0].slot = plan.num_slots),
        ("query token", |plan| plan.queries[0].token = plan.num_queries),
        ("merge token", |plan| plan.merges[0].token = plan.num_queries),
        ("merge end", |plan| plan.merges[0].end = 1 << 30),
        ("merge slot", |plan| plan.merge_slots[0] = plan.num_slots),
        ("page list", |plan| plan.page_begin[1] = 0),
        ("shared", |plan| plan.shared.push((7, 8, 1))),
    ];
    for (what, change) in changes {
        let mut changed = plan(&rig.mla, &good.problem, FIXED);
        change(&mut changed);
        let refused = rig.mla.prepare(&rig.gpu.queue, &mut step, &changed, pages(&good.problem));
        assert!(matches!(refused, Err(Error::Shape { what: "plan of items", .. })), "{what}: {refused:?}");
    }
    rig.run(&step, &good);
    rig.check(&good, &good.problem);
    Ok(())
}

/// Commands of a step that grew keep its old buffers: they run the batch that they were recorded with.
fn growth_leaves_recorded_commands_alone() -> Outcome {
    let rig = Rig::shared()?;
    let long = rig.load(small(&[(300, 2), (200, 2)]));
    let short = shortened(&long.problem, &[20, 40]);
    let mut step = rig.step(&short, Policy::OneSplit);
    let before = step.capacity();
    let mut encoder = rig.encoder();
    rig.mla.record(&mut encoder, &step, &long.binding);
    rig.prepare(&mut step, &long.problem, Policy::FixedTokens(16));
    assert!(!before.holds(step.capacity()));
    rig.submit(encoder);
    rig.check(&long, &short);
    rig.run(&step, &long);
    rig.check(&long, &long.problem);
    Ok(())
}

/// A refused plan leaves the step as it was.
fn a_refused_plan_changes_nothing() -> Outcome {
    let rig = Rig::shared()?;
    let good = rig.load(small(&[(37, 1), (90, 2)]));
    let mut step = rig.step(&good.problem, FIXED);
    let mut bad = shortened(&good.problem, &[37, 60]);
    bad.block_table[1] = -5;
    let refused = rig.mla.prepare(&rig.gpu.queue, &mut step, &plan(&rig.mla, &bad, FIXED), pages(&bad));
    assert!(matches!(refused, Err(Error::PageOutOfRange { seq: 0, block: 1, page: -5, .. })), "{refused:?}");
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
    for (budget, policy) in [(1.0, FIXED), (500.0, FIXED), (1.0, Policy::FixedTokens(4))] {
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
            rig.mla.record_slice(&mut encoder, &step, &loaded.binding, index);
            rig.submit(encoder);
        }
        assert_eq!(rig.bits(&loaded), whole, "{slices} slices of {items} items");
    }
    let mut encoder = rig.encoder();
    rig.poison(&loaded);
    rig.mla.record_slice(&mut encoder, &step, &loaded.binding, step.num_slices());
    rig.submit(encoder);
    assert!(rig.untouched(&loaded), "there is no such slice");

    step.set_slice_budget(None);
    rig.prepare(&mut step, &loaded.problem, FIXED);
    assert_eq!(step.num_slices(), 1);
    Ok(())
}

/// Budgets that make no sense still cut something that runs.
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
            rig.mla.record_slice(&mut encoder, &step, &loaded.binding, index);
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
    rig.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
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
    let device = &rig.gpu.device;
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
        rig.mla.record_in(&mut pass, &step, &loaded.binding);
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

/// A step and a binding that do not belong together: nothing is recorded, a line says so, and `check` names it.
fn what_does_not_belong_together_records_nothing() -> Outcome {
    let rig = Rig::shared()?;
    logged::start();
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let step = rig.step(&loaded.problem, FIXED);
    let other =
        MlaDecode::new(&rig.gpu.pipelines, rig.mla.spec(), &Options::default()).expect("the same kernels");
    let more = small(&[(37, 1), (90, 3)]);
    let more_step = rig.step(&more, FIXED);

    for (mla, step, why) in [(&other, &step, "another decode"), (&rig.mla, &more_step, "more query tokens")] {
        let error = mla.check(step, &loaded.binding).expect_err(why);
        assert!(matches!(error, Error::LayoutMismatch { detail } if detail.contains(why)), "{error}");
        let mut encoder = rig.encoder();
        mla.record(&mut encoder, step, &loaded.binding);
        mla.record_slice(&mut encoder, step, &loaded.binding, 0);
        rig.submit(encoder);
        assert!(rig.untouched(&loaded), "{why}");
        assert!(logged::about(why) > 0, "{why} was not logged");
    }
    assert_eq!(rig.mla.check(&step, &loaded.binding), Ok(()));
    let refused = other.prepare(
        &rig.gpu.queue,
        &mut rig.step(&loaded.problem, FIXED),
        &plan(&other, &loaded.problem, FIXED),
        pages(&loaded.problem),
    );
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    Ok(())
}

/// A step that was never prepared attends nothing, and says nothing wrong.
fn a_step_that_holds_no_plan_does_nothing() -> Outcome {
    let rig = Rig::shared()?;
    let loaded = rig.load(small(&[(37, 1)]));
    for capacity in [Capacity::default(), Capacity { items: 4, merges: 4, ..Capacity::default() }] {
        let step = rig.mla.step(capacity).expect("a step");
        rig.run(&step, &loaded);
        assert!(rig.untouched(&loaded));
    }
    Ok(())
}

/// A step with room for many rows merges them with workgroups of another shape. Counts of partial results around those at which
/// either goes on differently: 1, fewer than 16 and more, and more than a workgroup holds at a time.
fn the_room_for_merges_changes_no_bit() -> Outcome {
    let rig = Rig::shared()?;
    let policy = Policy::FixedTokens(1);
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
    a_replay_sees_the_new_lengths,
    a_replay_stays_inside_of_its_binding,
    a_changed_plan_is_refused,
    growth_leaves_recorded_commands_alone,
    a_refused_plan_changes_nothing,
    slices_give_the_bits_of_the_whole,
    odd_budgets_make_slices_that_run,
    a_decode_in_the_hosts_pass,
    what_does_not_belong_together_records_nothing,
    a_step_that_holds_no_plan_does_nothing,
    the_room_for_merges_changes_no_bit,
    a_steady_loop_makes_no_buffers,
];
