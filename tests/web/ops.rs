//! The small ops in the browser against the oracle.

use mla_support::reference::copy_pages;
use wasm_bindgen_test::wasm_bindgen_test;
use wgpu_mla::gpu::{Gpu, checked};
use wgpu_mla::{Device, Dtype, KvAppendArgs, KvCopyPages, KvSpec, MergeStateArgs};

use crate::page::{download, gpu, upload};
use mla_support::cache::{same_cache, shape_of_row};
use mla_support::case::{AppendCase, MergeCase};
use mla_support::close::{Tolerance, close};
use mla_support::paint::{POISON, Rng};
use mla_support::suite::memory::{Pages, Strides, gather, page_dims, scatter};
use mla_support::suite::ops::{random_append, random_merge};
use mla_support::suite::run::Layout;

fn wrong(error: wgpu_mla::Error) -> String {
    error.to_string()
}

/// Both bodies, heads of any size, states with LSEs that are far apart, infinite or NaN.
#[wasm_bindgen_test]
async fn merges() {
    let gpu = gpu().await;
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (tokens, heads, head_size) in [(33, 6, 96), (7, 3, 3), (4, 5, 127), (5, 16, 512)] {
            let case = random_merge(dtype, tokens, heads, head_size);
            for layout in [Layout::Dense, Layout::Gaps] {
                let result = check_merge(&gpu, &case, layout).await;
                assert_eq!(result, Ok(()), "{dtype} {:?} {layout:?}", (tokens, heads, head_size));
            }
        }
    }
}

/// Runs a merge and compares with what its case expects.
pub async fn check_merge(gpu: &Gpu, case: &MergeCase, layout: Layout) -> Result<(), String> {
    let MergeCase { spec, num_tokens, num_heads, .. } = *case;
    let elem = spec.dtype.bytes();
    let dims = [num_tokens, num_heads, spec.head_size as usize];
    let strides = layout.strides(dims, 1);
    // `[heads, tokens]`, as it lies in the case.
    let (lse_dims, lse_strides) =
        ([num_heads, num_tokens, 1], Strides { offset: 0, token: num_tokens, head: 1 });
    let lse_view = Strides { offset: 0, token: 1, head: num_tokens };
    let [prefix, suffix] = [&case.prefix_output, &case.suffix_output]
        .map(|state| upload(gpu, &scatter(state, dims, elem, strides)));
    let [prefix_lse, suffix_lse] =
        [&case.prefix_lse, &case.suffix_lse].map(|lse| upload(gpu, &Dtype::F32.encode_all(lse)));
    let (out_len, lse_len) = (strides.end(dims) * elem, num_tokens * num_heads * 4);
    let (output, output_lse) = (upload(gpu, &vec![POISON; out_len]), upload(gpu, &vec![POISON; lse_len]));
    let args = MergeStateArgs {
        prefix_output: strides.view(&prefix),
        prefix_lse: lse_view.view(&prefix_lse),
        suffix_output: strides.view(&suffix),
        suffix_lse: lse_view.view(&suffix_lse),
        output: strides.view(&output),
        output_lse: Some(lse_view.view(&output_lse)),
        num_tokens: num_tokens as u32,
        num_heads: num_heads as u32,
        output_scale: 1.0,
    };
    checked(gpu.device(), "a merge", || gpu.once(spec, (), &args)).await.map_err(wrong)?;

    let compare = async |what, buffer, len, (dims, strides), dtype: Dtype, want: &[f32], tolerance| {
        let bytes = download(gpu, buffer, len).await.map_err(wrong)?;
        let (dense, intact) = gather(&bytes, dims, dtype.bytes(), strides);
        intact.map_err(|error| format!("{what}: {error}"))?;
        let want: Vec<f64> = want.iter().map(|&x| x.into()).collect();
        close(what, &dtype.decode_all(&dense), &want, &tolerance).into_result().map(drop)
    };
    let (out_at, lse_at) = ((dims, strides), (lse_dims, lse_strides));
    compare("output", &output, out_len, out_at, spec.dtype, &case.output, Tolerance::merge(spec.dtype))
        .await?;
    compare("output_lse", &output_lse, lse_len, lse_at, Dtype::F32, &case.output_lse, Tolerance::merge_lse())
        .await
}

/// Every input into every cache, byte for byte.
#[wasm_bindgen_test]
async fn appends() {
    let gpu = gpu().await;
    let mut turn = 0;
    for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for cache in Dtype::ALL {
            let dims = [(512, 64), (256, 32), (512, 0), (256, 64)][turn % 4];
            let page_size = [16, 3, 1, 48][turn % 4];
            turn += 1;
            let k_scale = if cache == Dtype::E4m3 { 0.37 } else { 1.0 };
            let case = random_append(dims, page_size, input, cache, k_scale);
            for gaps in [false, true] {
                let result = check_append(&gpu, &case, gaps).await;
                assert_eq!(result, Ok(()), "{input} to {cache} {dims:?} gaps {gaps}");
            }
        }
    }
}

/// Runs an append and compares every byte of the cache and around it.
pub async fn check_append(gpu: &Gpu, case: &AppendCase, gaps: bool) -> Result<(), String> {
    let (spec, shape, kv) = (case.spec, case.spec.shape, case.spec.kv);
    let row = shape.row_elems() as usize;
    let [latent, rope] =
        [shape.kv_lora_rank, shape.qk_rope_head_dim].map(|dim| Strides::dense(1, dim as usize));
    let (kv_c, k_pe) = (upload(gpu, &case.kv_c), upload(gpu, &case.k_pe));
    let pages = if gaps { Pages::gaps(&kv, row) } else { Pages::dense(&kv, row) };
    let (dims, elem) = (page_dims(&kv, row), kv.dtype().bytes());
    let before = scatter(&case.kv_cache_before, dims, elem, pages.strides());
    let cache = upload(gpu, &before);
    let layer = KvAppendArgs {
        kv_c: latent.view(&kv_c),
        k_pe: rope.view(&k_pe),
        kv: pages.view(&cache),
        k_scale: case.k_scale,
        guard: None,
    };
    let run = || gpu.once(spec, &case.slot_mapping, &layer);
    checked(gpu.device(), "an append", run).await.map_err(wrong)?;
    let bytes = download(gpu, &cache, before.len()).await.map_err(wrong)?;
    let (got, intact) = gather(&bytes, dims, elem, pages.strides());
    intact?;
    same_cache(case, &got).map(drop)
}

/// Pages of every element width, by words and by 16 bytes.
#[wasm_bindgen_test]
async fn page_copies() {
    let gpu = gpu().await;
    for (dtype, page_size, row) in
        [(Dtype::F32, 16, 576), (Dtype::Bf16, 3, 288), (Dtype::F16, 64, 576), (Dtype::E4m3, 1, 288)]
    {
        let kv = KvSpec { layout: dtype.into(), page_size, num_pages: 12 };
        for gaps in [false, true] {
            let result = check_copies(&gpu, &kv, row, gaps).await;
            assert_eq!(result, Ok(()), "{dtype} page {page_size} gaps {gaps}");
        }
    }
}

async fn check_copies(gpu: &Gpu, kv: &KvSpec, row: usize, gaps: bool) -> Result<(), String> {
    let copies = [(0, 11), (3, 7), (0, 2), (10, 1)];
    let pages = if gaps { Pages::gaps(kv, row) } else { Pages::dense(kv, row) };
    let (dims, elem) = (page_dims(kv, row), kv.dtype().bytes());
    let page_bytes = dims[2] * elem;
    let mut rng = Rng(page_bytes as u64);
    let mut cache: Vec<u8> = (0..dims[0] * page_bytes).map(|_| rng.next() as u8).collect();
    let before = scatter(&cache, dims, elem, pages.strides());
    let buffer = upload(gpu, &before);
    let spec = KvCopyPages { shape: shape_of_row(row), kv: *kv };
    let run = || gpu.once(spec, &copies, &pages.view(&buffer));
    checked(gpu.device(), "a copy", run).await.map_err(wrong)?;
    copy_pages(&mut cache, page_bytes, &copies);
    let bytes = download(gpu, &buffer, before.len()).await.map_err(wrong)?;
    let (got, intact) = gather(&bytes, dims, elem, pages.strides());
    intact?;
    if got == cache { Ok(()) } else { Err("a byte of the cache is wrong".into()) }
}
