//! Every shader that this browser gets, through its own compiler. Making a pipeline of a decode costs a software device
//! about a second in its own code generator, so decodes are compiled as modules, which is all of the browser's WGSL
//! compiler; the small ops, and every decode that another test runs, are made into pipelines too.

use std::collections::HashSet;

use wasm_bindgen_test::{console_log, wasm_bindgen_test};
use wgpu_mla::gpu::ops::{
    BatchTables, CopySpec, HeadProject, KvAppend, KvCalibrate, KvCopyPages, KvGather, MergeAttnStates,
    MlaPrefill, Rotate, RotateAppend,
};
use wgpu_mla::gpu::{Gpu, MlaDecode, Options, Source, checked};
use wgpu_mla::ops::HeadDims;
use wgpu_mla::{
    AppendSpec, CalibrateSpec, Caps, Dtype, GatherSpec, KvSpec, MergeStatesSpec, MlaShape, MlaSpec,
    PrefillSpec, ProjectSpec, Result, RopeAppendSpec, RopeLayout, RopeSpec, SUPPORTED_DIMS, wgpu,
};

use crate::page::gpu;

const OUTS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const INPUTS: [Dtype; 3] = OUTS;

const ANY: MlaSpec = spec((512, 64), 16, Dtype::Bf16, Dtype::Bf16, Dtype::F32);

const fn spec(dims: (u32, u32), num_heads: u32, query: Dtype, cache: Dtype, out: Dtype) -> MlaSpec {
    let shape = MlaShape { num_heads, kv_lora_rank: dims.0, qk_rope_head_dim: dims.1 };
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

/// Options for each row that runs here, with page lists of the host and of the device.
fn rows(gpu: &Gpu, spec: &MlaSpec) -> Vec<Options> {
    let runs = gpu.pipelines.ladder(spec).into_iter().filter(|(_, lacks)| lacks.is_none());
    let options = |variant: &str, device_page_list| Options {
        variant: Some(variant.into()),
        device_page_list,
        ..Default::default()
    };
    runs.flat_map(|(variant, _)| [false, true].map(|device| options(variant, device))).collect()
}

/// Texts that were compiled.
#[derive(Default)]
struct Modules(HashSet<String>);

impl Modules {
    async fn compile(&mut self, gpu: &Gpu, caps: &Caps, spec: &MlaSpec) {
        for options in rows(gpu, spec) {
            match MlaDecode::sources(caps, spec, &options) {
                Ok(sources) => {
                    for source in sources {
                        self.compile_one(gpu, source, spec).await;
                    }
                }
                Err(error) => assert_ne!(caps, gpu.pipelines.caps(), "{options:?}, {spec:?}: {error}"),
            }
        }
    }

    async fn compile_one(&mut self, gpu: &Gpu, source: Source, spec: &MlaSpec) {
        if self.0.contains(&source.text) {
            return;
        }
        let make = || {
            Ok(gpu.device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(&source.label),
                source: wgpu::ShaderSource::Wgsl(source.text.as_str().into()),
            }))
        };
        compile(gpu, &format!("{}, {spec:?}", source.label), make).await;
        self.0.insert(source.text);
    }
}

/// Every tile and every triple of dtypes of every shape, on every row that runs here, for this device, weaker ones and a
/// larger one.
#[wasm_bindgen_test]
async fn every_module_compiles() {
    let gpu = gpu().await;
    let own = *gpu.pipelines.caps();
    let large = Caps { workgroup_memory_bytes: 48 << 10, max_invocations: 1024, ..own };
    let mut modules = Modules::default();
    for caps in own.downgrades().into_iter().map(|(_, caps)| caps).chain([large]) {
        for dims in all_dims() {
            for heads in 1..=128 {
                let spec = spec(dims, heads, Dtype::Bf16, Dtype::Bf16, Dtype::F32);
                modules.compile(&gpu, &caps, &spec).await;
            }
            for query in Dtype::ALL {
                for cache in Dtype::ALL {
                    for out in OUTS {
                        modules.compile(&gpu, &caps, &spec(dims, 16, query, cache, out)).await;
                    }
                }
            }
        }
    }
    console_log!("{} modules of decodes; {:?}", modules.0.len(), gpu.pipelines.ladder(&ANY));
    assert!(modules.0.len() > 500, "only {} modules", modules.0.len());
}

/// The small ops.
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
                if rope == 0 {
                    continue;
                }
                for layout in [RopeLayout::Interleaved, RopeLayout::HalfSplit] {
                    let query = if latent == 512 { input } else { Dtype::Bf16 };
                    let spec = RopeAppendSpec { append: spec, query, num_heads: 16, layout };
                    compile(&gpu, &format!("{spec:?}"), || RotateAppend::new(pipelines, spec)).await;
                    let spec = RopeSpec { dtype: input, num_heads: 16, rope_dim: rope, layout };
                    compile(&gpu, &format!("{spec:?}"), || Rotate::new(pipelines, spec)).await;
                }
            }
        }
    }
    let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
    for input in INPUTS {
        let spec = CalibrateSpec { shape, input };
        compile(&gpu, &format!("{spec:?}"), || KvCalibrate::new(pipelines, spec)).await;
    }
    for cache in Dtype::ALL {
        let kv = KvSpec { dtype: cache, page_size: 48, num_pages: 7 };
        for output in Dtype::ALL.into_iter().filter(|&output| output != Dtype::E4m3 || cache == output) {
            let spec = GatherSpec { shape, kv, output };
            compile(&gpu, &format!("{spec:?}"), || KvGather::new(pipelines, spec)).await;
        }
    }
    let kv = KvSpec { dtype: Dtype::F16, page_size: 48, num_pages: 7 };
    compile(&gpu, "tables of a batch", || BatchTables::new(pipelines, kv)).await;
    for dtype in OUTS {
        let dims = HeadDims { num_heads: 16, kv_lora_rank: 512, qk_nope_head_dim: 128, v_head_dim: 128 };
        for of in [ProjectSpec::absorb, ProjectSpec::v_up] {
            let spec = of(&dims, dtype, dtype, dtype);
            compile(&gpu, &format!("{spec:?}"), || HeadProject::new(pipelines, spec)).await;
        }
        let spec = PrefillSpec {
            num_heads: 16,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            dtype,
            out: dtype,
        };
        compile(&gpu, &format!("{spec:?}"), || MlaPrefill::new(pipelines, spec)).await;
    }
}
