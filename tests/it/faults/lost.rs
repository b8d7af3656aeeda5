//! A device that is lost between any two calls of each op and of the layer; one that refuses to make a pipeline or to give memory.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use mla_support::rig::{Rig, pages, plan, small};
use mla_support::{Ignored, Outcome};
use wgpu_mla::gpu::{DeviceKind, Gpu, Setup, wanted};
use wgpu_mla::{
    Binding, Caps, Compiled, Device, Dtype, Error, Kernel, KvSpec, MergeState, Op, PagePool, SplitPolicy,
    Step, wgpu,
};

use crate::every_op::{Uses, Visit, names};

/// A device of its own.
fn device() -> Result<Gpu, Ignored> {
    let shared = mla_support::gpu()?;
    let adapter = shared.adapter().expect("this crate made it").clone();
    let wanted = wanted(&adapter, wgpu::ExperimentalFeatures::disabled());
    Ok(pollster::block_on(Gpu::from_adapter(adapter, &wanted)).expect("another device"))
}

/// A device that validates all and computes nothing.
fn noop(limits: impl FnOnce(&mut wgpu::Limits)) -> Gpu {
    let mut required_limits = wgpu::Limits::default();
    limits(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    let (device, queue) = wgpu::Device::noop(&descriptor);
    let card = Caps { kind: DeviceKind::Discrete, ..Caps::WEBGPU };
    Gpu::without_adapter(&device, &queue, &Setup { no_better_than: Some(card), ..Setup::default() })
}

/// What a use of an op has before the loss.
struct Before<O: Op>
where
    Gpu: Kernel<O>,
{
    op: Compiled<O, Gpu>,
    prepared: Step<O, Gpu>,
    fresh: Step<O, Gpu>,
    binding: Binding<O, Gpu>,
    /// Commands that are not submitted yet.
    recorded: wgpu::CommandEncoder,
}

/// Makes all that an op needs, and runs none.
struct Make(Gpu, Vec<Box<dyn Any>>);

impl Visit<Gpu> for Make {
    fn visit<'a, O: Op>(
        &mut self,
        op: O,
        options: &O::Options,
        input: O::Input<'a>,
        args: &O::Args<&wgpu::Buffer>,
    ) where
        Gpu: Kernel<O>,
        O::Input<'a>: Clone,
    {
        let op = self.0.compile_with(op, options).expect("compiles");
        let [mut prepared, fresh] = [(); 2].map(|()| op.step(O::Capacity::default()).expect("a step"));
        op.prepare(&mut prepared, input).expect("prepared");
        let binding = op.bind(args, prepared.used()).expect("binds");
        let mut recorded = self.0.device().create_command_encoder(&Default::default());
        op.record(&mut recorded, &prepared, &binding).expect("recorded");
        self.1.push(Box::new(Before { op, prepared, fresh, binding, recorded }));
    }
}

fn is_lost<T>(what: &str, result: Result<T, Error>) {
    let error = result.err();
    assert!(matches!(error, Some(Error::DeviceLost { .. })), "{what}: {error:?}");
}

/// Makes every call with what [`Make`] made, in the same order.
struct Lost {
    gpu: Gpu,
    before: std::vec::IntoIter<Box<dyn Any>>,
    seen: BTreeSet<&'static str>,
}

impl Visit<Gpu> for Lost {
    fn visit<'a, O: Op>(
        &mut self,
        spec: O,
        options: &O::Options,
        input: O::Input<'a>,
        args: &O::Args<&wgpu::Buffer>,
    ) where
        Gpu: Kernel<O>,
        O::Input<'a>: Clone,
    {
        self.seen.insert(O::NAME);
        let before = self.before.next().expect("as many as before").downcast::<Before<O>>();
        let Before { op, mut prepared, mut fresh, binding, mut recorded } = *before.expect("in this order");
        let what = |call: &str| format!("{call} of {}", O::NAME);
        is_lost(&what("run"), op.run(&prepared, &binding));
        // Recording asks nothing of the device.
        op.record(&mut recorded, &prepared, &binding).expect("recorded");
        self.gpu.queue().submit([recorded.finish()]);
        let mut after = self.gpu.device().create_command_encoder(&Default::default());
        op.record(&mut after, &prepared, &binding).expect("recorded");
        self.gpu.queue().submit([after.finish()]);

        is_lost(&what("compile"), self.gpu.compile_with(spec, options));
        is_lost(&what("bind"), op.bind(args, prepared.used()));
        let stepped = op.step(O::Capacity::default());
        let stepped = stepped.and_then(|mut step| op.prepare(&mut step, input.clone()));
        let again = op.prepare(&mut prepared, input.clone());
        let run = op.run(&prepared, &binding);
        if O::NAME == MergeState::NAME {
            // Its steps have nothing on the device.
            is_lost(&what("run"), run);
        } else {
            is_lost(&what("step"), stepped);
            is_lost(&what("prepare of a step that is new"), op.prepare(&mut fresh, input.clone()));
            is_lost(&what("prepare of one that was prepared"), again);
            // Such a step cannot be recorded any more.
            assert!(matches!(run, Err(Error::LayoutMismatch { .. })), "{}: {run:?}", what("run"));
        }
        is_lost(&what("once"), self.gpu.once_with(spec, options, input, args));
    }
}

/// Each call after a loss, whatever was made before it, on a device of each kind.
fn lose(gpu: Gpu) {
    let uses = Uses::new(&gpu).expect("memory");
    let mut make = Make(gpu.clone(), Vec::new());
    uses.each(&mut make);

    gpu.device().destroy();

    let mut lost = Lost { gpu: gpu.clone(), before: make.1.into_iter(), seen: BTreeSet::new() };
    uses.each(&mut lost);
    assert_eq!(lost.seen, names());
    for buffer in &uses.buffers {
        is_lost("download", gpu.download(buffer, 16));
        is_lost("upload", gpu.upload(buffer, 0, &[0; 4]));
    }
    is_lost("all that is made first", Uses::new(&gpu));
    is_lost("check_lost", gpu.check_lost());
}

fn every_op_on_a_lost_device() -> Outcome {
    lose(device()?);
    Ok(())
}

fn every_op_on_a_device_of_another_kind_that_is_lost() {
    lose(noop(|_| ()));
}

/// While threads run and read: each result is the right one or [`Error::DeviceLost`]. The next device works, and a host that gives back
/// what the lost step took has its whole pool.
fn a_device_that_is_lost_while_it_runs() -> Outcome {
    let rig = Rig::on(device()?, &small(&[(1, 1)]).spec);
    let problem = || small(&[(37, 1), (90, 2)]);
    let kv = KvSpec { layout: Dtype::F16.into(), page_size: 16, num_pages: 40 };
    let mut pool = PagePool::new(kv).expect("a pool");
    let (long, short) = (pool.add(), pool.add());
    pool.append_batch(&[(long, 90), (short, 37)]).expect("pages");
    let fork = pool.fork(long).expect("it is there");
    let before = pool.clone();
    let taken = pool.append_batch(&[(fork, 20), (short, 20)]).expect("pages");
    assert!(pool.num_free_pages() < before.num_free_pages() && taken.copies.len() == 1);

    let runs = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (rig, runs) = (&rig, &runs);
                scope.spawn(move || {
                    let loaded = rig.load(problem());
                    let step = rig.step(&loaded.problem, SplitPolicy::FixedTokens(32));
                    let mut first = None;
                    loop {
                        let done = rig.mla.run(&step, &loaded.binding);
                        match done.and_then(|()| rig.gpu.download(&loaded.out, 256)) {
                            Ok(out) => assert_eq!(*first.get_or_insert(out.clone()), out),
                            Err(error) => return error,
                        }
                        runs.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        // A thread that ended early has failed, which its join tells.
        while runs.load(Ordering::Relaxed) < 12 && !threads.iter().any(|thread| thread.is_finished()) {
            std::thread::yield_now();
        }
        rig.gpu.device().destroy();
        for thread in threads {
            is_lost("a run or a download", Err::<(), _>(thread.join().expect("no panic")));
        }
    });

    for (seq, tokens) in taken.tokens {
        pool.truncate(seq, tokens.start).expect("its own");
    }
    // The fork has a copy of the page that it was to write to; all else is as before.
    assert_eq!(pool.num_free_pages() + 1, before.num_free_pages());
    for seq in [long, short, fork] {
        assert_eq!(pool.len(seq), before.len(seq));
        assert!(seq == fork || pool.pages(seq) == before.pages(seq));
        pool.free(seq).expect("it is there");
    }
    assert_eq!((pool.num_free_pages(), pool.num_sequences()), (40, 0));

    let next = Rig::on(device()?, &small(&[(1, 1)]).spec);
    let loaded = next.load(problem());
    let step = next.step(&loaded.problem, SplitPolicy::FixedTokens(32));
    next.run(&step, &loaded);
    next.check(&loaded, &loaded.problem);
    // What the lost device made stays an error there too.
    let mut old = rig.mla.step(Default::default());
    if let Ok(old) = &mut old {
        let plan = plan(&next.mla, &loaded.problem, SplitPolicy::OneSplit);
        let other = next.mla.prepare(old, (&plan, pages(&loaded.problem)));
        assert!(matches!(other, Err(Error::LayoutMismatch { .. })), "{other:?}");
    }
    Ok(())
}

/// Counts the ops that a device refuses to compile: with an error, and again the same.
struct Refused(Gpu, BTreeSet<&'static str>);

impl Visit<Gpu> for Refused {
    fn visit<'a, O: Op>(&mut self, op: O, options: &O::Options, _: O::Input<'a>, _: &O::Args<&wgpu::Buffer>)
    where
        Gpu: Kernel<O>,
        O::Input<'a>: Clone,
    {
        let [once, again] = [(); 2].map(|()| self.0.compile_with(op, options).err());
        assert_eq!(once, again, "{}", O::NAME);
        match once {
            Some(Error::Internal { .. } | Error::Limit { .. } | Error::NoVariant { .. }) => {
                self.1.insert(O::NAME)
            }
            None => false,
            Some(error) => panic!("{}: {error}", O::NAME),
        };
    }
}

/// Limits that this crate does not ask about: wgpu refuses the layout or the pipeline.
fn pipelines_that_are_not_made_are_errors() {
    let uses = Uses::new(&noop(|_| ())).expect("memory");
    let changes: [fn(&mut wgpu::Limits); 3] = [
        |limits| limits.max_bindings_per_bind_group = 1,
        |limits| limits.max_bind_groups = 0,
        |limits| limits.max_storage_buffers_per_shader_stage = 0,
    ];
    for change in changes {
        let gpu = noop(change);
        let mut refused = Refused(gpu.clone(), BTreeSet::new());
        uses.each(&mut refused);
        assert_eq!(refused.1, names());
        assert_eq!(gpu.check_lost(), Ok(()));
    }
}

crate::tests![
    every_op_on_a_lost_device,
    every_op_on_a_device_of_another_kind_that_is_lost,
    a_device_that_is_lost_while_it_runs,
    pipelines_that_are_not_made_are_errors,
];
