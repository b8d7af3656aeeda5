//! All integration tests in one program, since each links wgpu, and since it compiles each pipeline once.
//!
//! ```text
//! cargo test --test it -- [FILTER]...      the tests whose names contain one of the filters; --list names all
//! ```
//! A kernel takes seconds to compile on a software device, so the tests on wgpu take one representative of each variant, dtype and
//! dims; `MLA_CASES=product` takes every variant by every group, `MLA_FULL=1` every pair of dtypes too. A test that cannot run
//! here is ignored, with its reason; `MLA_REQUIRE_GPU=1` and `MLA_REQUIRE_CUDA=1` make the lack of a device a failure.

mod harness;

mod allocator;
mod any;
mod batch_tables;
mod bounds;
mod codes;
mod comments;
mod communicator;
mod conformance;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "wgpu")]
mod devices;
mod differential;
#[cfg(feature = "wgpu")]
mod disk_cache;
mod eight_threads;
mod every_op;
mod examples;
#[cfg(all(feature = "cuda", feature = "wgpu"))]
mod fastest;
mod faults;
#[cfg(feature = "wgpu")]
mod head_project;
mod imports;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod large_pool;
mod layer_plan;
#[cfg(feature = "wgpu")]
mod layer_wgpu;
mod limits;
mod long;
#[cfg(feature = "wgpu")]
mod matrix;
mod mutants;
#[cfg(feature = "nccl")]
mod nccl;
mod no_alloc;
mod oracle;
#[cfg(feature = "wgpu")]
mod page_list;
mod pages;
mod plan;
mod problems;
#[cfg(feature = "wgpu")]
mod record;
mod tables;
mod threads;
#[cfg(feature = "wgpu")]
mod wgpu_ops;

use harness::tests;

/// A function that gives the tests of a module.
type Tests = fn() -> Vec<harness::Test>;

fn main() -> std::process::ExitCode {
    let everywhere: &[Tests] = &[
        any::tests,
        batch_tables::tests,
        bounds::tests,
        codes::tests,
        comments::tests,
        communicator::tests,
        conformance::tests,
        cpu::tests,
        differential::tests,
        eight_threads::tests,
        examples::tests,
        faults::tests,
        imports::tests,
        layer_plan::tests,
        limits::tests,
        long::tests,
        mutants::tests,
        no_alloc::tests,
        oracle::tests,
        pages::tests,
        plan::tests,
        problems::tests,
        tables::tests,
        threads::tests,
    ];
    #[cfg(feature = "cuda")]
    let on_cuda: &[Tests] = &[cuda::tests];
    #[cfg(not(feature = "cuda"))]
    let on_cuda: &[Tests] = &[];
    #[cfg(feature = "wgpu")]
    let on_wgpu: &[Tests] = &[
        devices::tests,
        disk_cache::tests,
        head_project::tests,
        layer_wgpu::tests,
        matrix::tests,
        page_list::tests,
        record::tests,
        wgpu_ops::tests,
    ];
    #[cfg(not(feature = "wgpu"))]
    let on_wgpu: &[Tests] = &[];
    #[cfg(all(feature = "cuda", feature = "wgpu"))]
    let on_both: &[Tests] = &[fastest::tests];
    #[cfg(not(all(feature = "cuda", feature = "wgpu")))]
    let on_both: &[Tests] = &[];
    #[cfg(feature = "nccl")]
    let on_nccl: &[Tests] = &[nccl::tests];
    #[cfg(not(feature = "nccl"))]
    let on_nccl: &[Tests] = &[];
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    let on_either: &[Tests] = &[large_pool::tests];
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    let on_either: &[Tests] = &[];
    let modules = [everywhere, on_cuda, on_wgpu, on_both, on_nccl, on_either].concat();
    harness::run(modules.into_iter().flat_map(|tests| tests()).collect())
}
