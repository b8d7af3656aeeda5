//! What only the CUDA backend promises: an error without a driver, graphs that replay with new lengths, slots and copies, or refuse to, and
//! calls from any thread, with memory of any kind.

mod decodes;
mod host;
mod layers;
mod lists;
mod lists_of_layers;
mod memory;
mod ops;
mod projections;
mod stale;
mod sums;
mod threads;

use mla_support::Outcome;
use wgpu_mla::cuda::{Buffer, Cuda};
use wgpu_mla::{Device, Dtype, Error, KvCopyPages, KvSpec, KvView, Slabs};

/// A buffer of bytes, whole words.
fn uploaded(cuda: &Cuda, bytes: &[u8]) -> Buffer {
    let buffer = cuda.buffer(bytes.len() as u64).expect("memory");
    cuda.upload(&buffer, 0, bytes).expect("uploaded");
    buffer
}

fn no_card_is_an_error_that_names_the_cure() {
    // There is none of that number, with a driver or without.
    let error = Cuda::new(1_000).expect_err("no machine has so many cards");
    assert!(matches!(error, Error::NoCuda { .. }), "{error:?}");
    assert!(error.to_string().contains("install NVIDIA's driver"), "{error}");
    println!("{error}");
}

/// A capture goes on while another thread makes a device of the same card.
fn devices_are_made_beside_a_capture() -> Outcome {
    let cuda = mla_support::graph::cuda()?;
    let bytes = cuda.buffer(4 * 288 * 4).expect("memory");
    let kv = KvSpec { layout: Dtype::F32.into(), page_size: 2, num_pages: 2 };
    let copy =
        cuda.compile(KvCopyPages { shape: mla_support::cache::shape_of_row(288), kv }).expect("a copy");
    let cache = KvView {
        buffer: &bytes,
        offset: 0,
        layer_stride: 0,
        layer: 0,
        block_stride: 2 * 288 * 4,
        slabs: Slabs::ONE,
    };
    let mut step = copy.step(1).expect("a step");
    copy.prepare(&mut step, &[(0, 1)]).expect("prepared");
    let binding = copy.bind(&cache, ()).expect("binds");
    let graph = mla_support::graph::captured(&cuda, || {
        std::thread::spawn(|| Cuda::new(0).map(drop)).join().expect("no panic")?;
        copy.record(&step, &binding)
    });
    graph.launch().expect("launched");
    Ok(())
}

/// In place of an old driver, a library without the driver's functions. This program runs itself with it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn a_driver_without_what_is_called_is_an_error_too() {
    use std::{path::Path, process::Command};
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a list of what is mapped");
    let other =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("libgcc_s"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-not-a-driver");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::copy(other.expect("every program has it"), folder.join("libcuda.so")).expect("a copy");

    let mut again = Command::new(std::env::current_exe().expect("a path"));
    again.args(["--exact", "cuda::no_card_is_an_error_that_names_the_cure", "--nocapture"]);
    let ran = again.env("LD_LIBRARY_PATH", folder).output().expect("it runs");
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{text}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(text.contains("no CUDA device: the driver's library has no cuInit; install"), "{text}");
}

crate::tests![
    (in decodes, host, layers, lists, lists_of_layers, memory, ops, projections, stale, sums, threads)
    no_card_is_an_error_that_names_the_cure,
    devices_are_made_beside_a_capture,
    #[cfg(all(target_os = "linux", target_env = "gnu"))] a_driver_without_what_is_called_is_an_error_too,
];
