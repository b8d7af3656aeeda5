//! The pipeline cache on disk, on a real driver: it is kept and checked, and a bad file never fails a call.
use mla_support::cache::shape_of_row;
use mla_support::{Ignored, Outcome, ignored_unless_required, logged};
use std::fs;
use std::path::{Path, PathBuf};
use wgpu_mla::gpu::disk_cache::{DiskCache, MAX_FILE_BYTES, Rejection, Status};
use wgpu_mla::gpu::{self, Setup};
use wgpu_mla::{Device, Dtype, KvCopyPages, KvSpec, KvView, Slabs};

/// The adapter, unless there is none that keeps pipelines.
fn adapter() -> Result<wgpu::Adapter, Ignored> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: wgpu::Backends::VULKAN,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let why = match pollster::block_on(instance.request_adapter(&Default::default())) {
        Ok(adapter) if adapter.features().contains(wgpu::Features::PIPELINE_CACHE) => return Ok(adapter),
        Ok(adapter) => format!("{} has no PIPELINE_CACHE", adapter.get_info().name),
        Err(e) => e.to_string(),
    };
    Err(ignored_unless_required("MLA_REQUIRE_GPU", why))
}

type Gpu = (wgpu::Device, wgpu::Queue);

fn gpu_with(adapter: &wgpu::Adapter, required_features: wgpu::Features) -> Gpu {
    let descriptor = wgpu::DeviceDescriptor { required_features, ..Default::default() };
    pollster::block_on(adapter.request_device(&descriptor)).expect("the adapter makes a device")
}

fn gpu() -> Result<Gpu, Ignored> {
    Ok(gpu_with(&adapter()?, wgpu::Features::PIPELINE_CACHE))
}

/// A directory that does not exist yet, and is removed afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("wgpu-mla-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("the directory is readable");
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
    }

    /// Exactly the cache's file: no temporary one beside it.
    fn assert_only(&self, cache: &DiskCache) {
        assert_eq!(self.names(), [cache.path().file_name().expect("a name").to_string_lossy()]);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a pipeline with the cache, runs it and looks at what it wrote.
fn assert_pipelines_work((device, queue): &Gpu, cache: &DiskCache, value: u32) {
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(
            format!(
                "@group(0) @binding(0) var<storage, read_write> out: array<u32>;
                 @compute @workgroup_size(1) fn main() {{ out[0] = {value}u; }}"
            )
            .into(),
        ),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: Default::default(),
        cache: cache.as_wgpu(),
    });
    let buffer = |usage| {
        let descriptor = wgpu::BufferDescriptor { label: None, size: 4, usage, mapped_at_creation: false };
        device.create_buffer(&descriptor)
    };
    let out = buffer(wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC);
    let host = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: out.as_entire_binding() }],
    });
    // Dispatched, since lavapipe compiles only then.
    let mut encoder = device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(1, 1, 1);
    }
    encoder.copy_buffer_to_buffer(&out, 0, &host, 0, 4);
    queue.submit([encoder.finish()]);
    host.map_async(wgpu::MapMode::Read, .., |mapped| mapped.expect("the buffer maps"));
    device.poll(wgpu::PollType::wait_indefinitely()).expect("the device finishes");
    assert_eq!(pollster::block_on(scope.pop()).map(|e| e.to_string()), None);
    assert_eq!(host.get_mapped_range(..).expect("mapped")[..], value.to_le_bytes());
}

/// A saved file of a device, and its contents.
fn saved(gpu: &Gpu, scratch: &Scratch) -> (PathBuf, Vec<u8>) {
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert_pipelines_work(gpu, &cache, 1);
    assert!(cache.save().expect("the scratch directory is writable"));
    (cache.path().to_owned(), fs::read(cache.path()).expect("the file was just written"))
}

fn rejection(cache: &DiskCache) -> &Rejection {
    match cache.status() {
        Status::Rejected(why) => why,
        other => panic!("not rejected: {other:?}"),
    }
}

/// Bytes of the payload, and the same length in the file's header.
fn payload_range(file: &[u8]) -> std::ops::Range<usize> {
    let len = u64::from_le_bytes(file[16..24].try_into().expect("8 bytes")) as usize;
    file.len() - len..file.len()
}

/// Corrects the checksum after a test changed the file, so that only later checks find the change.
fn reseal(file: &mut [u8]) {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for &byte in file[..24].iter().chain(&file[32..]) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    file[24..32].copy_from_slice(&hash.to_le_bytes());
}

/// Whether a bad file was reported in the log.
fn warnings_about(path: &Path) -> usize {
    logged::about(&format!("{path:?}"))
}

fn round_trip() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("round-trip");
    let cache = DiskCache::open(&gpu.0, &scratch.0.join("made/on/demand"));
    assert_eq!(cache.status(), &Status::Empty);
    assert!(!scratch.0.exists(), "opening writes nothing");
    assert_pipelines_work(&gpu, &cache, 7);
    assert!(cache.save().expect("writable"));
    assert!(!cache.save().expect("writable"), "nothing changed");

    // Another device of the adapter, as in the next run of a program.
    let next = self::gpu()?;
    let again = DiskCache::open(&next.0, &scratch.0.join("made/on/demand"));
    let bytes = payload_range(&fs::read(again.path()).expect("saved")).len() as u64;
    assert_eq!(again.status(), &Status::Loaded { bytes });
    assert_pipelines_work(&next, &again, 7);
    assert_eq!(fs::read_dir(scratch.0.join("made/on/demand")).expect("made").count(), 1);
    assert!(again.save().is_ok());
    Ok(())
}

fn what_a_device_compiles_is_kept() -> Outcome {
    let adapter = adapter()?;
    let scratch = Scratch::new("compiled");
    let setup = Setup { disk_cache: Some(&scratch.0), ..Default::default() };
    let made = |kept: bool| {
        let (device, queue) = gpu_with(&adapter, wgpu::Features::PIPELINE_CACHE);
        let gpu = gpu::Gpu::with(&adapter, &device, &queue, &setup);
        let status = gpu.disk().expect("asked for").status();
        assert_eq!(matches!(status, Status::Loaded { .. }), kept, "{status:?}");
        let kv = KvSpec { layout: Dtype::F32.into(), page_size: 1, num_pages: 2 };
        let cache = gpu.buffer(2 * 288 * 4).expect("a buffer");
        gpu.upload(&cache, 0, &[7; 32]).expect("uploads");
        let view = KvView {
            buffer: &cache,
            offset: 0,
            layer_stride: 0,
            layer: 0,
            block_stride: 288 * 4,
            slabs: Slabs::ONE,
        };
        gpu.once(KvCopyPages { shape: shape_of_row(288), kv }, &[(0, 1)], &view).expect("copies");
        let all = gpu.download(&cache, 2 * 288 * 4).expect("downloads");
        assert!(all.chunks(288 * 4).all(|page| page[..32] == [7; 32] && page[32..].iter().all(|&x| x == 0)));
        gpu
    };
    let first = made(false);
    assert!(first.save().expect("writable"));
    assert!(!first.clone().save().expect("writable"), "nothing changed");
    scratch.assert_only(first.disk().expect("asked for"));
    made(true).save().expect("writable");
    let (device, queue) = gpu_with(&adapter, wgpu::Features::PIPELINE_CACHE);
    let without = gpu::Gpu::on(&adapter, &device, &queue);
    assert!(without.disk().is_none() && !without.save().expect("nothing to write"));
    Ok(())
}

fn unchanged_since_load_is_not_written() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("unchanged");
    let (path, _) = saved(&gpu, &scratch);
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert!(matches!(cache.status(), Status::Loaded { .. }));
    assert!(!cache.save().expect("writable"));
    fs::remove_file(&path).expect("it is there");
    assert!(cache.save().expect("writable"), "a file that went missing is written again");
    scratch.assert_only(&cache);
    Ok(())
}

fn truncated_files_are_rejected() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("truncated");
    let (path, file) = saved(&gpu, &scratch);
    // All cuts in the header and the first of the payload, then a few: a real driver's payload is large.
    let start = payload_range(&file).start;
    let cuts = (0..start + 32).chain((start..file.len()).step_by(file.len().div_ceil(64)));
    for cut in cuts.filter(|&cut| cut < file.len()) {
        fs::write(&path, &file[..cut]).expect("writable");
        let cache = DiskCache::open(&gpu.0, &scratch.0);
        assert!(matches!(rejection(&cache), Rejection::Length { .. }), "cut at {cut}");
    }
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert_pipelines_work(&gpu, &cache, 2);
    assert!(cache.save().expect("writable"), "a bad file is replaced");
    assert!(matches!(DiskCache::open(&gpu.0, &scratch.0).status(), Status::Loaded { .. }));
    scratch.assert_only(&cache);
    Ok(())
}

fn flipped_bits_are_rejected_with_a_warning() -> Outcome {
    let gpu = gpu()?;
    logged::start();
    let scratch = Scratch::new("flipped");
    let (path, file) = saved(&gpu, &scratch);
    let step = file.len().div_ceil(256);
    for (n, at) in (0..file.len()).step_by(step).enumerate() {
        let mut bad = file.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, &bad).expect("writable");
        rejection(&DiskCache::open(&gpu.0, &scratch.0));
        assert_eq!(warnings_about(&path), n + 1, "byte {at}");
    }
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert_pipelines_work(&gpu, &cache, 3);
    Ok(())
}

fn foreign_and_strange_files_are_rejected() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("foreign");
    let (path, file) = saved(&gpu, &scratch);
    let start = payload_range(&file).start;

    // Another driver's: a byte of the key, with a checksum that is right.
    let mut other = file.clone();
    other[start - 2] ^= 1;
    reseal(&mut other);
    let mut newer = file.clone();
    newer[8] += 1;
    reseal(&mut newer);
    let mut long = file.clone();
    long.push(0);
    type Expected = fn(&Rejection) -> bool;
    let cases: [(&str, &[u8], Expected); 5] = [
        ("foreign", &other, |r| matches!(r, Rejection::Foreign(_))),
        ("newer", &newer, |r| *r == Rejection::Version(2)),
        ("trailing", &long, |r| matches!(r, Rejection::Length { .. })),
        ("bare wgpu data", &file[start..], |r| *r == Rejection::NotOurs),
        ("text", b"not a cache at all, but long enough to be one", |r| *r == Rejection::NotOurs),
    ];
    for (name, contents, expected) in cases {
        fs::write(&path, contents).expect("writable");
        let cache = DiskCache::open(&gpu.0, &scratch.0);
        assert!(expected(rejection(&cache)), "{name}: {:?}", cache.status());
        assert_pipelines_work(&gpu, &cache, 4);
    }

    let mut resealed = file.clone();
    reseal(&mut resealed);
    assert_eq!(resealed, file, "this test's checksum is the crate's");
    Ok(())
}

fn what_wgpu_refuses_does_not_reach_the_host() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("refused");
    let (path, mut file) = saved(&gpu, &scratch);
    // The adapter key in wgpu's own header: magic 8, version 4, ABI 4, backend 1, then the key.
    let at = payload_range(&file).start + 17 + 3;
    file[at] ^= 1;
    reseal(&mut file);
    fs::write(&path, &file).expect("writable");
    // Without an error scope around the unsafe call, the default handler would panic here.
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert!(matches!(rejection(&cache), Rejection::Refused(_)), "{:?}", cache.status());
    assert_pipelines_work(&gpu, &cache, 5);
    assert!(cache.save().expect("writable"));
    Ok(())
}

fn oversized_files_are_not_read() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("oversized");
    let (path, _) = saved(&gpu, &scratch);
    // Sparse: a terabyte that takes no disk.
    let file = fs::OpenOptions::new().write(true).open(&path).expect("it is there");
    let got = if file.set_len(1 << 40).is_ok() { 1 << 40 } else { MAX_FILE_BYTES + 1 };
    file.set_len(got).expect("sparse files");
    // Not every file system replaces a file that is open.
    drop(file);
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert_eq!(rejection(&cache), &Rejection::TooLarge { got, max: MAX_FILE_BYTES });
    assert_pipelines_work(&gpu, &cache, 6);
    assert!(cache.save().expect("writable"));
    assert!(fs::metadata(&path).expect("saved").len() < MAX_FILE_BYTES);
    Ok(())
}

fn impossible_directories_are_errors_of_save() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("impossible");
    fs::create_dir_all(&scratch.0).expect("writable");
    let file = scratch.0.join("a-file");
    fs::write(&file, b"in the way").expect("writable");
    let mut impossible = vec![file.clone(), file.join("below"), scratch.0.join("nul\0")];
    if cfg!(target_os = "linux") {
        // Refuses new names even to root, whom file modes do not stop.
        impossible.push("/proc/wgpu-mla".into());
    }
    for directory in impossible {
        let cache = DiskCache::open(&gpu.0, &directory);
        assert!(!matches!(cache.status(), Status::Loaded { .. } | Status::Unsupported), "{directory:?}");
        assert_pipelines_work(&gpu, &cache, 8);
        assert!(cache.save().is_err(), "{directory:?}");
    }
    assert_eq!(scratch.names(), ["a-file"]);
    Ok(())
}

#[cfg(unix)]
fn read_only_directory_still_loads() -> Outcome {
    use std::os::unix::fs::PermissionsExt;
    let gpu = gpu()?;
    let scratch = Scratch::new("read-only");
    saved(&gpu, &scratch);
    fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o555)).expect("ours");
    let stopped = fs::write(scratch.0.join("probe"), b"").is_err();
    let _ = fs::remove_file(scratch.0.join("probe"));
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert!(matches!(cache.status(), Status::Loaded { .. }));
    // Unchanged, so that nothing is to be written; then nothing can be.
    assert!(!cache.save().expect("nothing to do"));
    if stopped {
        fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o755)).expect("ours");
        fs::remove_file(cache.path()).expect("ours");
        fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o555)).expect("ours");
        assert!(cache.save().is_err());
    }
    fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o755)).expect("ours");
    if stopped { Ok(()) } else { Err(Ignored("this user may write to read-only directories".into())) }
}

fn failed_rename_leaves_no_temporary_file() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("rename");
    let path = DiskCache::open(&gpu.0, &scratch.0).path().to_owned();
    fs::create_dir_all(path.join("a directory where the file belongs")).expect("writable");
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert!(matches!(rejection(&cache), Rejection::Unreadable(_)));
    assert_pipelines_work(&gpu, &cache, 9);
    assert!(cache.save().is_err());
    scratch.assert_only(&cache);
    Ok(())
}

fn concurrent_savers_leave_a_whole_file() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("concurrent");
    std::thread::scope(|threads| {
        for thread in 0..4 {
            let (gpu, scratch) = (&gpu, &scratch);
            threads.spawn(move || {
                for round in 0..8 {
                    let cache = DiskCache::open(&gpu.0, &scratch.0);
                    assert!(matches!(cache.status(), Status::Empty | Status::Loaded { .. }));
                    assert_pipelines_work(gpu, &cache, thread * 8 + round);
                    // Forces a write, where the driver's data never change.
                    let _ = fs::remove_file(cache.path());
                    cache.save().expect("writable");
                }
            });
        }
    });
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert!(matches!(cache.status(), Status::Loaded { .. }), "{:?}", cache.status());
    scratch.assert_only(&cache);
    Ok(())
}

fn device_without_the_feature_is_unsupported() -> Outcome {
    let adapter = adapter()?;
    let gpu = gpu_with(&adapter, wgpu::Features::empty());
    let scratch = Scratch::new("unsupported");
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert_eq!(cache.status(), &Status::Unsupported);
    assert!(cache.as_wgpu().is_none());
    assert_pipelines_work(&gpu, &cache, 10);
    assert!(!cache.save().expect("nothing to write"));
    assert!(!scratch.0.exists());
    Ok(())
}

fn backend_without_caches_is_unsupported() {
    // It grants the feature and keeps nothing. Needs no GPU.
    let required_features = wgpu::Features::PIPELINE_CACHE;
    let gpu = wgpu::Device::noop(&wgpu::DeviceDescriptor { required_features, ..Default::default() });
    let scratch = Scratch::new("noop");
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    assert_eq!(cache.status(), &Status::Unsupported);
    assert!(cache.as_wgpu().is_none());
    assert!(!cache.save().expect("nothing to write"));
    assert!(!scratch.0.exists());
}

fn lost_device_saves_nothing() -> Outcome {
    let gpu = gpu()?;
    let scratch = Scratch::new("lost");
    let cache = DiskCache::open(&gpu.0, &scratch.0);
    gpu.0.destroy();
    assert!(!cache.save().expect("nothing to write"));
    assert_eq!(DiskCache::open(&gpu.0, &scratch.0).save().ok(), Some(false));
    assert!(!scratch.0.exists());
    Ok(())
}

crate::tests![
    round_trip,
    what_a_device_compiles_is_kept,
    unchanged_since_load_is_not_written,
    truncated_files_are_rejected,
    flipped_bits_are_rejected_with_a_warning,
    foreign_and_strange_files_are_rejected,
    what_wgpu_refuses_does_not_reach_the_host,
    oversized_files_are_not_read,
    impossible_directories_are_errors_of_save,
    #[cfg(unix)]
    read_only_directory_still_loads,
    failed_rename_leaves_no_temporary_file,
    concurrent_savers_leave_a_whole_file,
    device_without_the_feature_is_unsupported,
    backend_without_caches_is_unsupported,
    lost_device_saves_nothing,
];
