//! A pipeline cache on disk whose folder goes away or turns into a file between calls, and one that processes share.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mla_support::{Ignored, Outcome, ignored_unless_required};
use wgpu_mla::gpu::disk_cache::Status;
use wgpu_mla::gpu::{Gpu, Setup};
use wgpu_mla::{
    Device, Dtype, Kernel, KvCopyPages, KvSpec, KvView, MlaDecode, MlaShape, Rope, RopeLayout, wgpu,
};

/// The folder of a process that this test starts.
const FOLDER: &str = "MLA_TEST_CACHE_FOLDER";
const CHILD: &str = "faults::cache_folder::a_process_of_two";

fn kept(folder: &Path) -> Result<Gpu, Ignored> {
    let shared = mla_support::gpu()?;
    let adapter = shared.adapter().expect("this crate made it");
    if !adapter.features().contains(wgpu::Features::PIPELINE_CACHE) {
        let why = format!("{} has no PIPELINE_CACHE", adapter.get_info().name);
        return Err(ignored_unless_required("MLA_REQUIRE_GPU", why));
    }
    let required_features = wgpu::Features::PIPELINE_CACHE;
    let descriptor = wgpu::DeviceDescriptor { required_features, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
    Ok(Gpu::with(adapter, &device, &queue, &Setup { disk_cache: Some(folder), ..Setup::default() }))
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("wgpu-mla-faults-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

/// Copies a page, and looks at it: a dispatch, since lavapipe compiles only then.
fn copies(gpu: &Gpu) {
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 1, num_pages: 2 };
    let cache = gpu.buffer(2 * 288 * 4).expect("a buffer");
    gpu.upload(&cache, 0, &[7; 288 * 4]).expect("uploads");
    let view = KvView::dense(&cache, &MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 });
    gpu.once(KvCopyPages { shape, kv }, &[(0, 1)], &view).expect("copies");
    assert!(gpu.download(&cache, 2 * 288 * 4).expect("downloads").iter().all(|&byte| byte == 7));
}

fn compiles(gpu: &Gpu)
where
    Gpu: Kernel<Rope>,
{
    let rope = Rope { dtype: Dtype::F32, num_heads: 1, rope_dim: 32, layout: RopeLayout::HalfSplit };
    gpu.compile(rope).expect("compiles");
}

fn a_folder_that_goes_away_between_calls() -> Outcome {
    let scratch = Scratch::new("gone");
    let gpu = kept(&scratch.0)?;
    copies(&gpu);
    assert!(gpu.save().expect("writable"));
    fs::remove_dir_all(&scratch.0).expect("it was made");
    compiles(&gpu);
    copies(&gpu);
    assert!(gpu.save().expect("made again"), "what went missing is written again");
    assert!(matches!(kept(&scratch.0)?.disk().expect("asked for").status(), Status::Loaded { .. }));

    // In its place is a file, so nothing can be written.
    fs::remove_dir_all(&scratch.0).expect("it was made");
    fs::write(&scratch.0, "no folder").expect("writable");
    compiles(&gpu);
    copies(&gpu);
    assert!(gpu.save().is_err());
    assert_eq!(fs::read(&scratch.0).expect("still there"), b"no folder");
    let next = kept(&scratch.0)?;
    copies(&next);
    assert!(next.save().is_err());

    fs::remove_file(&scratch.0).expect("it is there");
    assert!(gpu.save().expect("made again"));
    Ok(())
}

/// Loads, compiles, runs and saves again and again, in a process that [`two_processes_share_a_folder`] starts.
fn a_process_of_two() -> Outcome {
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("set by its parent"));
    for _ in 0..6 {
        let gpu = kept(&folder)?;
        let status = gpu.disk().expect("asked for").status();
        assert!(matches!(status, Status::Empty | Status::Loaded { .. }), "{status:?}");
        compiles(&gpu);
        copies(&gpu);
        // Forces a write, where the driver's data never change.
        let _ = fs::remove_file(gpu.disk().expect("asked for").path());
        gpu.save().expect("writable");
    }
    Ok(())
}

fn two_processes_share_a_folder() -> Outcome {
    let scratch = Scratch::new("shared");
    kept(&scratch.0)?;
    let start = || {
        Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", CHILD, "--nocapture"])
            .env(FOLDER, &scratch.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts")
    };
    for child in [start(), start()] {
        let ended = child.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&ended.stdout);
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() && said.contains("1 passed"), "{said}\n{error}");
    }
    let gpu = kept(&scratch.0)?;
    assert!(matches!(gpu.disk().expect("asked for").status(), Status::Loaded { .. }));
    copies(&gpu);
    assert_eq!(fs::read_dir(&scratch.0).expect("made").count(), 1, "a temporary file is left");
    Ok(())
}

pub fn tests() -> Vec<crate::harness::Test> {
    let mut tests = in_this_process();
    if std::env::var_os(FOLDER).is_some() {
        tests.push(crate::harness::Test::new(CHILD, a_process_of_two));
    }
    tests
}

mod listed {
    use super::{a_folder_that_goes_away_between_calls, two_processes_share_a_folder};
    crate::tests![a_folder_that_goes_away_between_calls, two_processes_share_a_folder];
}
use listed::tests as in_this_process;
