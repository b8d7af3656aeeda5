//! Page lists written on the device.

use mla_support::Outcome;
use mla_support::rig::{Loaded, Rig, plan, shortened, small};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Capacity, DecodeOptions, Device, Dtype, Error, MlaDecode, PageTable, SplitPolicy, Step};

const FIXED: SplitPolicy = SplitPolicy::FixedTokens(32);

/// A decode that takes page lists from the device, on kernels of its own.
fn device_lists(rig: &Rig) -> Rig {
    let options = DecodeOptions { device_page_list: true, ..Default::default() };
    let mla = rig.gpu.compile_with(*rig.mla.op(), &options).expect("a decode");
    Rig { gpu: rig.gpu.clone(), mla }
}

fn prepare_device(rig: &Rig, step: &mut Step<MlaDecode, Gpu>, loaded: &Loaded) {
    let plan = plan(&rig.mla, &loaded.problem, FIXED);
    rig.mla.prepare(step, (&plan, PageTable::Device)).expect("prepared");
}

/// Writes the page list of a problem where the step has it.
fn write_list(rig: &Rig, step: &Step<MlaDecode, Gpu>, loaded: &Loaded, by_copy: bool) {
    let problem = &loaded.problem;
    let plan = plan(&rig.mla, problem, FIXED);
    let list = step.page_list().expect("a list of the device");
    for (seq, &len) in plan.seq_lens.iter().enumerate() {
        let used = problem.spec.kv.pages_for(len) as usize;
        let row: &[u8] = bytemuck::cast_slice(&problem.block_table[seq * problem.max_pages..][..used]);
        let at = u64::from(plan.page_begin[seq]) * 4;
        if by_copy && !row.is_empty() {
            let mut encoder = rig.encoder();
            encoder.copy_buffer_to_buffer(&rig.buffer(row), 0, list, at, row.len() as u64);
            rig.submit(encoder);
        } else {
            rig.gpu.upload(list, at, row).expect("uploaded");
        }
    }
}

fn page_lists_written_on_the_device() -> Outcome {
    let shared = Rig::shared()?;
    let rig = device_lists(shared);
    let loaded = rig.load(small(&[(37, 1), (90, 2), (0, 1)]));
    let mut step = rig.mla.step(Capacity::default()).expect("a step");
    prepare_device(&rig, &mut step, &loaded);
    for by_copy in [false, true] {
        write_list(&rig, &step, &loaded, by_copy);
        rig.poison(&loaded);
        rig.run(&step, &loaded);
        rig.check(&loaded, &loaded.problem);
    }
    // The next token of a sequence needs no new list.
    let shorter = shortened(&loaded.problem, &[36, 89, 0]);
    let plan = plan(&rig.mla, &shorter, FIXED);
    rig.mla.prepare(&mut step, (&plan, PageTable::Device)).expect("prepared");
    rig.run(&step, &loaded);
    rig.check(&loaded, &shorter);

    let mut other = shared.mla.step(Capacity::default()).expect("a step");
    let refused = other.page_list().map(|_| ());
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    let refused = shared.mla.prepare(&mut other, (&plan, PageTable::Device));
    assert!(matches!(refused, Err(Error::LayoutMismatch { .. })), "{refused:?}");
    Ok(())
}

/// Page ids outside of the pool are clamped into it.
fn wild_pages_of_a_device_list_stay_in_the_pool() -> Outcome {
    let shared = Rig::shared()?;
    let rig = device_lists(shared);
    let mut problem = small(&[(37, 1), (90, 2)]);
    // A pool without poison: whatever page is read, the output is finite.
    problem.kv.chunks_exact_mut(2).filter(|code| **code == [0xFF, 0xFF]).for_each(|code| code.fill(0));
    let loaded = rig.load(problem);
    let mut step = rig.mla.step(Capacity::default()).expect("a step");
    prepare_device(&rig, &mut step, &loaded);
    let list = step.page_list().expect("a list of the device");
    let pages = rig.mla.op().kv.num_pages;
    for wild in [u32::MAX, pages, 1 << 31, 0x7FFF_FFFF] {
        let words = vec![wild; (list.size() / 4) as usize];
        rig.gpu.upload(list, 0, bytemuck::cast_slice(&words)).expect("uploaded");
        rig.poison(&loaded);
        let scope = rig.gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        rig.run(&step, &loaded);
        assert_eq!(pollster::block_on(scope.pop()).map(|error| error.to_string()), None);
        let got = rig.bits(&loaded);
        for bytes in &got {
            assert!(Dtype::F32.decode_all(bytes).iter().all(|x| x.is_finite()), "page {wild:#x}");
        }
        // Not any page, and no zeros of the driver's: the last one.
        let words = vec![pages - 1; (list.size() / 4) as usize];
        rig.gpu.upload(list, 0, bytemuck::cast_slice(&words)).expect("uploaded");
        rig.poison(&loaded);
        rig.run(&step, &loaded);
        assert_eq!(rig.bits(&loaded), got, "page {wild:#x}");
    }
    Ok(())
}

/// The page list's buffer holds nothing else: after every byte of it was overwritten, a new list restores the step.
fn the_buffer_of_a_device_list_holds_nothing_else() -> Outcome {
    let shared = Rig::shared()?;
    let rig = device_lists(shared);
    let loaded = rig.load(small(&[(37, 1), (90, 2), (300, 1)]));
    let mut step = rig.mla.step(Capacity { pages: 5, ..Capacity::default() }).expect("a step");
    for _ in 0..2 {
        let list = step.page_list().expect("a list of the device");
        assert_eq!(list.size(), u64::from(step.capacity().pages).next_multiple_of(4) * 4);
        // The second time it is another buffer, as the step grew.
        prepare_device(&rig, &mut step, &loaded);
    }
    let list = step.page_list().expect("a list of the device");
    for byte in [0xFF, 0x00, 0x7F] {
        rig.gpu.upload(list, 0, &vec![byte; list.size() as usize]).expect("uploaded");
        write_list(&rig, &step, &loaded, false);
        rig.poison(&loaded);
        rig.run(&step, &loaded);
        rig.check(&loaded, &loaded.problem);
    }
    Ok(())
}

/// What a device wrote over an uploaded list is uploaded again when the host's lists are back.
fn a_host_list_after_a_device_list() -> Outcome {
    let shared = Rig::shared()?;
    let rig = device_lists(shared);
    let loaded = rig.load(small(&[(37, 1), (90, 2)]));
    let mut step = rig.step(&loaded.problem, FIXED);
    rig.run(&step, &loaded);
    rig.check(&loaded, &loaded.problem);

    prepare_device(&rig, &mut step, &loaded);
    let list = step.page_list().expect("a list of the device");
    rig.gpu.upload(list, 0, &vec![0xFF; list.size() as usize]).expect("uploaded");

    rig.prepare(&mut step, &loaded.problem, FIXED);
    rig.poison(&loaded);
    rig.run(&step, &loaded);
    rig.check(&loaded, &loaded.problem);
    Ok(())
}

crate::tests![
    page_lists_written_on_the_device,
    wild_pages_of_a_device_list_stay_in_the_pool,
    the_buffer_of_a_device_list_holds_nothing_else,
    a_host_list_after_a_device_list,
];
