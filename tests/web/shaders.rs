//! Every pipeline that this browser gets, through its own compiler. The pipelines of equal texts are one, so all head
//! counts cost no more than their tiles.

use wasm_bindgen_test::{console_log, wasm_bindgen_test};
use wgpu_mla::gpu::ops::{CopySpec, KvAppend, KvCopyPages, MergeAttnStates};
use wgpu_mla::gpu::{Gpu, MlaDecode, Options, checked};
use wgpu_mla::{AppendSpec, Dtype, KvSpec, MergeStatesSpec, MlaShape, MlaSpec, Result, SUPPORTED_DIMS};

use crate::page::gpu;

const OUTS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const INPUTS: [Dtype; 3] = OUTS;

fn spec((latent, rope): (u32, u32), num_heads: u32, query: Dtype, cache: Dtype, out: Dtype) -> MlaSpec {
    let shape = MlaShape { num_heads, kv_lora_rank: latent, qk_rope_head_dim: rope };
    MlaSpec { shape, kv: KvSpec { dtype: cache, page_size: 16, num_pages: 64 }, query, out }
}

fn all_dims() -> impl Iterator<Item = (u32, u32)> + Clone {
    SUPPORTED_DIMS.iter().map(|&(latent, rope, _)| (latent, rope))
}

/// Makes something, and panics with what the browser has against it.
async fn compile<T>(gpu: &Gpu, what: &str, make: impl FnOnce() -> Result<T>) {
    if let Err(error) = checked(&gpu.device, "a pipeline", make).await {
        panic!("{what}: {error}");
    }
}

/// Split and merge of a spec, on every row that runs here, with page lists of the host and of the device.
async fn compile_decode(gpu: &Gpu, spec: &MlaSpec) {
    for (variant, lacks) in gpu.pipelines.ladder(spec) {
        for device_page_list in [false, true] {
            if lacks.is_none() {
                let options =
                    Options { variant: Some(variant.into()), device_page_list, ..Default::default() };
                let what = format!("{variant}, {device_page_list}, {spec:?}");
                compile(gpu, &what, || MlaDecode::new(&gpu.pipelines, spec, &options)).await;
            }
        }
    }
}

/// Every tile of every row.
#[wasm_bindgen_test]
async fn every_tile_compiles() {
    let gpu = gpu().await;
    for dims in all_dims() {
        for heads in 1..=128 {
            compile_decode(&gpu, &spec(dims, heads, Dtype::Bf16, Dtype::Bf16, Dtype::F32)).await;
        }
    }
    let ladder = gpu.pipelines.ladder(&spec((512, 64), 16, Dtype::Bf16, Dtype::Bf16, Dtype::F32));
    console_log!("rows: {ladder:?}");
}

/// Every triple of dtypes.
#[wasm_bindgen_test]
async fn every_dtype_compiles() {
    let gpu = gpu().await;
    let mut dims = all_dims().cycle();
    for query in Dtype::ALL {
        for cache in Dtype::ALL {
            for out in OUTS {
                let dims = dims.next().expect("endless");
                compile_decode(&gpu, &spec(dims, 16, query, cache, out)).await;
            }
        }
    }
}

/// Appends, page copies and merges of states.
#[wasm_bindgen_test]
async fn every_small_op_compiles() {
    let gpu = gpu().await;
    let pipelines = &gpu.pipelines;
    for dtype in OUTS {
        for head_size in [64, 96, 127, 128, 512] {
            let spec = MergeStatesSpec { dtype, head_size };
            compile(&gpu, &format!("{spec:?}"), || MergeAttnStates::new(pipelines, spec)).await;
        }
    }
    for cache in Dtype::ALL {
        for (latent, rope) in all_dims() {
            let kv = KvSpec { dtype: cache, page_size: 48, num_pages: 7 };
            let spec = CopySpec { kv, row_elems: latent + rope };
            compile(&gpu, &format!("{spec:?}"), || KvCopyPages::new(pipelines, spec)).await;
            for input in INPUTS {
                let shape = MlaShape { num_heads: 1, kv_lora_rank: latent, qk_rope_head_dim: rope };
                let spec = AppendSpec { shape, kv, input };
                compile(&gpu, &format!("{spec:?}"), || KvAppend::new(pipelines, spec)).await;
            }
        }
    }
}
