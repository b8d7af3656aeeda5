//! Tests that must fail, left out of an ordinary run: `scripts/web.sh` runs them by themselves and requires that each fails,
//! which shows that the other tests can fail too.

use wasm_bindgen_test::wasm_bindgen_test;
use wgpu_mla::Dtype;
use wgpu_mla::gpu::checked;
use wgpu_mla::wgpu;

use crate::decode::run_expecting;
use crate::page::gpu;
use mla_support::paint::Make;

/// One element of the expected output is off by more than is allowed.
#[wasm_bindgen_test]
#[ignore = "it must fail"]
async fn a_wrong_result() {
    let problem = Make { cache: Dtype::F32, query: Dtype::F32, ..Make::default() }.build();
    let (mut out, lse) = problem.expected();
    assert_eq!(run_expecting(&problem, &out, &lse).await, Ok(()));
    *out.last_mut().expect("an output") += 1e-3;
    run_expecting(&problem, &out, &lse).await.expect("deliberate: a wrong result");
}

/// A shader that naga accepts and a browser must refuse: subgroups without `enable subgroups;`.
#[wasm_bindgen_test]
#[ignore = "it must fail"]
async fn a_wrong_shader() {
    let gpu = gpu().await;
    let text = "@compute @workgroup_size(32) fn main() { _ = subgroupAdd(1u); }";
    let make = || {
        let source = wgpu::ShaderSource::Wgsl(text.into());
        Ok(gpu.device().create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source }))
    };
    checked(gpu.device(), "a shader", make).await.expect("deliberate: a wrong shader");
}
