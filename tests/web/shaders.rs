//! Every shader that this browser gets, through its own compiler. Making a pipeline of a decode costs a software device
//! about a second in its own code generator, so decodes are compiled as modules, which is all of the browser's WGSL
//! compiler; the small ops, and every decode that another test runs, are made into pipelines too.

use std::collections::HashSet;

use wasm_bindgen_test::{console_log, wasm_bindgen_test};
use wgpu_mla::gpu::ops::BatchTables;
use wgpu_mla::gpu::{Gpu, Source, checked, decode_sources};
use wgpu_mla::{
    Caps, CorrectAttnOut, DecodeOptions, Device, Dtype, Kernel, KvAppend, KvCopyPages, KvSpec, MergeState,
    MergeStates, MlaDecode, MlaShape, Op, ReorgKvCache, Result, Rope, RopeAppend, RopeLayout, SUPPORTED_DIMS,
    for_each_op, wgpu,
};

use crate::page::gpu;

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

const ANY: MlaDecode = spec((512, 64), 16, Dtype::Bf16, Dtype::Bf16, Dtype::F32);

const fn spec(dims: (u32, u32), num_heads: u32, query: Dtype, cache: Dtype, out: Dtype) -> MlaDecode {
    let shape = MlaShape { num_heads, kv_lora_rank: dims.0, qk_rope_head_dim: dims.1 };
    MlaDecode {
        shape,
        kv: KvSpec { layout: wgpu_mla::KvLayout::Plain(cache), page_size: 16, num_pages: 64 },
        query,
        out,
    }
}

fn all_dims() -> impl Iterator<Item = (u32, u32)> + Clone {
    SUPPORTED_DIMS.iter().map(|&(latent, rope, _)| (latent, rope))
}

/// Runs `make`, and panics with the browser's error.
async fn make<T>(gpu: &Gpu, what: &str, make: impl FnOnce() -> Result<T>) {
    if let Err(error) = checked(gpu.device(), "a pipeline", make).await {
        panic!("{what}: {error}");
    }
}

/// Compiles an op.
async fn compile<O: Op>(gpu: &Gpu, spec: O)
where
    Gpu: Kernel<O>,
{
    make(gpu, &format!("{spec:?}"), || gpu.compile(spec)).await;
}

/// Options for each variant that runs here, with page lists of the host and of the device.
fn options(gpu: &Gpu, spec: &MlaDecode) -> Vec<DecodeOptions> {
    let runs = gpu.variants(spec).into_iter().filter(|candidate| candidate.lacks.is_none());
    let options = |variant: &str, device_page_list| DecodeOptions {
        variant: Some(variant.into()),
        device_page_list,
        ..Default::default()
    };
    runs.flat_map(|candidate| [false, true].map(|device| options(candidate.name, device))).collect()
}

/// Modules that were compiled, by their source.
#[derive(Default)]
struct Modules(HashSet<String>);

impl Modules {
    async fn compile(&mut self, gpu: &Gpu, caps: &Caps, spec: &MlaDecode) {
        for options in options(gpu, spec) {
            match decode_sources(caps, spec, &options) {
                Ok(sources) => {
                    for source in sources {
                        self.compile_one(gpu, source, spec).await;
                    }
                }
                Err(error) => assert_ne!(caps, gpu.caps(), "{options:?}, {spec:?}: {error}"),
            }
        }
    }

    async fn compile_one(&mut self, gpu: &Gpu, source: Source, spec: &MlaDecode) {
        if self.0.contains(&source.text) {
            return;
        }
        let module = || {
            Ok(gpu.device().create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(&source.label),
                source: wgpu::ShaderSource::Wgsl(source.text.as_str().into()),
            }))
        };
        make(gpu, &format!("{}, {spec:?}", source.label), module).await;
        self.0.insert(source.text);
    }
}

/// Every tile and every triple of dtypes of every shape, on every variant that runs here, for this device, weaker ones and a
/// larger one.
#[wasm_bindgen_test]
async fn every_module_compiles() {
    let gpu = gpu().await;
    let own = *gpu.caps();
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
                    for out in FLOATS {
                        modules.compile(&gpu, &caps, &spec(dims, 16, query, cache, out)).await;
                    }
                }
            }
        }
    }
    console_log!("{} modules of decodes; {:?}", modules.0.len(), gpu.variants(&ANY));
    assert!(modules.0.len() > 500, "only {} modules", modules.0.len());
}

/// Compiles the samples of an op.
async fn compile_samples<O: Op>(gpu: &Gpu)
where
    Gpu: Kernel<O>,
{
    for spec in O::samples() {
        compile(gpu, spec).await;
    }
}

/// Every op besides the decode; the tables of a batch; and more rows and dims of the ops that are compiled for them.
#[wasm_bindgen_test]
async fn every_small_op_compiles() {
    let gpu = gpu().await;
    macro_rules! samples {
        ($_decode:ty, $($op:ty),*) => { $(compile_samples::<$op>(&gpu).await;)* };
    }
    for_each_op!(samples);
    let kv = |dtype: Dtype| KvSpec { layout: dtype.into(), page_size: 48, num_pages: 7 };
    make(&gpu, "tables of a batch", || BatchTables::new(&gpu, kv(Dtype::F16))).await;
    for dtype in FLOATS {
        for head_size in [64, 96, 127, 512] {
            compile(&gpu, MergeState { dtype, head_size }).await;
            compile(&gpu, MergeStates { dtype, head_size }).await;
            compile(&gpu, CorrectAttnOut { dtype, head_size }).await;
        }
    }
    for cache in Dtype::ALL {
        for (latent, rope) in all_dims() {
            let shape = MlaShape { num_heads: 1, kv_lora_rank: latent, qk_rope_head_dim: rope };
            compile(&gpu, KvCopyPages { shape, kv: kv(cache) }).await;
            compile(&gpu, ReorgKvCache { dtype: cache, row_elems: latent + rope }).await;
            for input in FLOATS {
                let append = KvAppend { shape, kv: kv(cache), input, guard: false };
                compile(&gpu, append).await;
                if rope == 0 {
                    continue;
                }
                for layout in [RopeLayout::Interleaved, RopeLayout::HalfSplit] {
                    compile(
                        &gpu,
                        RopeAppend {
                            append,
                            query: Dtype::Bf16,
                            query_out: Dtype::Bf16,
                            num_heads: 16,
                            layout,
                        },
                    )
                    .await;
                    compile(&gpu, Rope { dtype: input, num_heads: 16, rope_dim: rope, layout }).await;
                }
            }
        }
    }
}
