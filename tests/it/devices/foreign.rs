//! Buffers and queues of other devices, without usages, mapped or destroyed: errors that name the cure.

use mla_support::Outcome;
use mla_support::rig::{Rig, small};
use wgpu_mla::gpu::{Gpu, read, wanted};
use wgpu_mla::{Device, Dtype, Error, KvAppend, KvAppendArgs, KvView, MlaDecodeArgs, Result, View, wgpu};

const ALL: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);

fn buffer(gpu: &Gpu, usage: wgpu::BufferUsages, mapped: bool) -> wgpu::Buffer {
    gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some("the host's"),
        size: 1 << 16,
        usage,
        mapped_at_creation: mapped,
    })
}

fn read_of(gpu: &Gpu, buffer: &wgpu::Buffer) -> Result<Vec<u8>> {
    pollster::block_on(read(gpu.device(), gpu.queue(), buffer, 64))
}

fn refuses<T: std::fmt::Debug>(result: Result<T>, why: &str) {
    let error = result.expect_err(why);
    assert!(!matches!(error, Error::Internal { .. }), "{error}");
    assert!(error.to_string().contains(why), "{error}");
}

const CURE: &str =
    "use buffers and the queue of the device that the `Gpu` was made on, neither mapped nor destroyed";

fn copies_of_what_cannot_be_copied() -> Outcome {
    let gpu = &mla_support::gpu()?;
    let no_copies = buffer(gpu, wgpu::BufferUsages::STORAGE, false);
    refuses(read_of(gpu, &no_copies), "lacks usage COPY_SRC");
    refuses(gpu.download(&no_copies, 64), "lacks usage COPY_SRC");
    refuses(gpu.upload(&no_copies, 0, &[0; 4]), "lacks usage COPY_DST");
    let mapped = buffer(gpu, ALL, true);
    refuses(read_of(gpu, &mapped), CURE);
    refuses(gpu.upload(&mapped, 0, &[0; 4]), CURE);
    let destroyed = buffer(gpu, ALL, false);
    destroyed.destroy();
    refuses(read_of(gpu, &destroyed), CURE);
    refuses(gpu.upload(&destroyed, 0, &[0; 4]), CURE);
    Ok(())
}

/// A second device of the same adapter, as an application that makes one for each of its parts has.
fn what_is_of_another_device() -> Outcome {
    let rig = Rig::shared()?;
    let (gpu, adapter) = (&rig.gpu, rig.gpu.adapter().expect("ours").clone());
    let wanted = wanted(&adapter, wgpu::ExperimentalFeatures::disabled());
    let other = pollster::block_on(Gpu::from_adapter(adapter.clone(), &wanted)).expect("a second device");
    let foreign = buffer(&other, ALL, false);
    refuses(read_of(gpu, &foreign), CURE);
    refuses(gpu.upload(&foreign, 0, &[0; 4]), CURE);
    let loaded = rig.load(small(&[(3, 1)]));
    let args = MlaDecodeArgs::dense(rig.mla.op(), &loaded.q, &loaded.kv, &foreign, &loaded.lse, 1.0);
    refuses(rig.mla.bind(&args, 1), CURE);
    let destroyed = buffer(gpu, ALL, false);
    destroyed.destroy();
    refuses(
        rig.mla.bind(&MlaDecodeArgs { out: wgpu_mla::View { buffer: &destroyed, ..args.out }, ..args }, 1),
        CURE,
    );
    // The adapter of another card.
    let (noop, noop_queue) = wgpu::Device::noop(&wgpu::DeviceDescriptor::default());
    let mixed = Gpu::on(&adapter, &noop, &noop_queue);
    refuses(mixed.compile(*rig.mla.op()), "the adapter that the `Gpu` was made on");
    refuses(mixed.buffer(64), "the adapter that the `Gpu` was made on");
    Ok(())
}

/// `run` submits by itself, so it tells what became of a buffer after it was bound.
fn buffers_given_up_after_bind() -> Outcome {
    let rig = Rig::shared()?;
    let gpu = &rig.gpu;
    let loaded = rig.load(small(&[(3, 1)]));
    let step = rig.step(&loaded.problem, wgpu_mla::SplitPolicy::OneSplit);
    for mapped in [false, true] {
        let out = buffer(gpu, ALL, mapped);
        let args = MlaDecodeArgs::dense(rig.mla.op(), &loaded.q, &loaded.kv, &out, &loaded.lse, 1.0);
        let binding = rig.mla.bind(&args, 1).expect("bound");
        if !mapped {
            rig.mla.run(&step, &binding).expect("runs");
            out.destroy();
        }
        refuses(rig.mla.run(&step, &binding), CURE);
        // Again, and the device is as before.
        refuses(rig.mla.run(&step, &binding), CURE);
        if mapped {
            out.unmap();
            rig.mla.run(&step, &binding).expect("runs once it is unmapped");
        }
        rig.mla.run(&step, &loaded.binding).expect("runs");
        rig.check(&loaded, &loaded.problem);
    }

    let append = gpu.compile(KvAppend {
        shape: rig.mla.op().shape,
        kv: rig.mla.op().kv,
        input: Dtype::F32,
        guard: false,
    });
    let append = append.expect("compiles");
    let rows = buffer(gpu, ALL, false);
    let args = KvAppendArgs {
        kv_c: View::dense(&rows, 1, 256),
        k_pe: View { offset: 512, ..View::dense(&rows, 1, 32) },
        kv: KvView::dense(&loaded.kv, rig.mla.op()),
        k_scale: 1.0,
        guard: None,
    };
    let mut step = append.step(0).expect("a step");
    append.prepare(&mut step, &[0, 1]).expect("prepared");
    let binding = append.bind(&args, 2).expect("bound");
    rows.destroy();
    refuses(append.run(&step, &binding), CURE);
    Ok(())
}

crate::tests![copies_of_what_cannot_be_copied, what_is_of_another_device, buffers_given_up_after_bind];
