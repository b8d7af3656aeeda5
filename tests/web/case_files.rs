//! The case files of `tests/cases`, which carry what is expected.

use wasm_bindgen_test::wasm_bindgen_test;

use crate::decode::run_expecting;
use crate::ops::{check_append, check_merge};
use crate::page::gpu;
use mla_support::case::Case;
use mla_support::paint::Problem;
use mla_support::suite::run::Layout;

/// A file and its bytes: a page has no file system.
macro_rules! files {
    ($($name:literal),+ $(,)?) => {
        [$(($name, include_bytes!(concat!("../cases/", $name, ".safetensors")).as_slice())),+]
    };
}

#[wasm_bindgen_test]
async fn case_files() {
    let gpu = gpu().await;
    for (name, bytes) in files![
        "append_bf16",
        "append_fp8_pow2",
        "decode_bf16_h16_page32_ragged",
        "decode_bf16_mtp_varlen",
        "decode_f16_h20_page16_glm",
        "decode_f32_h16_page64",
        "decode_f32_needle",
        "decode_fp8_h16_page64",
        "decode_fp8_minicpm3_h40",
        "merge_bf16_d96",
        "merge_f32",
    ] {
        let result = match &Case::parse(bytes).expect("a case file") {
            Case::Decode(case) => {
                let wide = |xs: &[f32]| xs.iter().map(|&x| x.into()).collect::<Vec<f64>>();
                run_expecting(&Problem::of_case(name, case), &wide(&case.out), &wide(&case.lse)).await
            }
            Case::Merge(case) => check_merge(&gpu, case, Layout::Dense).await,
            Case::Append(case) => check_append(&gpu, case, false).await,
            // Cut into ranks by tests of other devices: a browser cannot wait for one after the other.
            Case::DcpDecode(_) | Case::DcpCombine(_) => Ok(()),
            Case::Sparse(_)
            | Case::IndexAppend(_)
            | Case::IndexQuery(_)
            | Case::IndexLogits(_)
            | Case::TopK(_) => unreachable!("none is in the list"),
        };
        assert_eq!(result, Ok(()), "{name}");
    }
}
