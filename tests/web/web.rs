//! The crate in a browser: every shader that it would get, and a part of the conformance suite against the oracle.
#![cfg(target_arch = "wasm32")]

mod case_files;
mod cpu;
mod decode;
mod must_fail;
mod ops;
mod page;
mod shaders;

wasm_bindgen_test::wasm_bindgen_test_configure!(run_in_browser);
