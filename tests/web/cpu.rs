//! The CPU backend in a browser, for pages without WebGPU.

use wasm_bindgen_test::wasm_bindgen_test;
use wgpu_mla::cpu::Cpu;

use mla_support::suite::{Session, decode, ops};

#[wasm_bindgen_test]
fn runs_where_there_is_no_gpu() {
    let backend = Cpu::new();
    let session = Session::new(&backend);
    decode::shared_prefixes(&session);
    decode::layouts(&session);
    ops::merges(&session);
    ops::appends(&session);
    ops::page_copies(&session);
}
