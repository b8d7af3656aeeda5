//! The HLSL of every pipeline that wgpu may make on DX12. `scripts/vendors.sh` has it written to the folder `MLA_HLSL`, and compiles it by
//! Microsoft's compilers.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;

use naga::back::hlsl::{self, BindTarget, ShaderModel};

use super::*;
use crate::gpu::kernels::prefill;
use crate::ops::MlaPrefill;

/// What wgpu reports of a DX12 card with DXC. Without DXC wgpu compiles by FXC and reports no feature: [`Caps::WEBGPU`].
const CARD: Caps = Caps {
    kind: DeviceKind::Discrete,
    subgroups: true,
    min_subgroup_size: 32,
    max_subgroup_size: 32,
    shader_f16: true,
    workgroup_memory_bytes: 32 << 10,
    max_invocations: 1024,
    ..Caps::WEBGPU
};
const INTEL: Caps =
    Caps { kind: DeviceKind::Integrated, min_subgroup_size: 8, max_subgroup_size: 32, ..CARD };
const DEVICES: [(&str, Caps); 4] = [
    ("card", CARD),
    ("intel", INTEL),
    ("integrated", Caps { kind: DeviceKind::Integrated, ..CARD }),
    ("webgpu", Caps::WEBGPU),
];

/// A kernel that some device compiles, and what it may use there.
struct Pipeline {
    /// The name in `examples/pipelines`: `chosen` or `offered`, shape, variant or op, dtypes.
    name: String,
    capabilities: Capabilities,
    source: Source,
}

/// The HLSL, by the options that wgpu-hal 30 passes to naga for a module without run-time checks.
fn write(
    Pipeline { name, source, .. }: &Pipeline,
    (module, info): &(Module, ModuleInfo),
    shader_model: ShaderModel,
) -> String {
    let options = hlsl::Options {
        shader_model,
        zero_initialize_workgroup_memory: false,
        restrict_indexing: false,
        force_loop_bounding: false,
        special_constants_binding: Some(BindTarget { space: 255, ..BindTarget::default() }),
        ..Default::default()
    };
    let entry = Some((naga::ShaderStage::Compute, source.entry.to_owned()));
    let (mut text, entry) = (String::new(), hlsl::PipelineOptions { entry_point: entry });
    let written = hlsl::Writer::new(&mut text, &options, &entry).write(module, info, None);
    let written = written.unwrap_or_else(|error| panic!("{name}: HLSL: {error}"));
    assert_eq!(written.entry_point_names, [Ok(source.entry.to_owned())], "{name}");
    text
}

/// Every variant that runs on a device, by the walk of `examples/pipelines`; unless `MLA_FULL`, all pairs of dtypes for one shape only,
/// since FXC takes seconds for each.
fn decodes(caps: &Caps) -> Vec<Pipeline> {
    let full = std::env::var_os("MLA_FULL").is_some();
    let mut all = Vec::new();
    for (dims, heads) in all_dims().flat_map(|dims| [(dims, 16), (dims, 20)]) {
        // The other dims have the same variants in the same tiles.
        if heads == 20 && dims != (512, 64) {
            continue;
        }
        for (query, cache) in Dtype::ALL.into_iter().flat_map(|query| Dtype::ALL.map(|cache| (query, cache)))
        {
            let usual = dims == (512, 64) && heads == 16;
            if !(usual || query == cache || full) {
                continue;
            }
            let out = if query == Dtype::E4m3 { Dtype::Bf16 } else { query };
            let spec = spec(dims, heads, query, cache, out);
            let (chosen, _) = choose(None, caps, &spec).expect("some variant runs everywhere");
            for variant in Body::ALL {
                for clamp_pages in
                    if query == cache && (usual || full) { &[false, true][..] } else { &[false] }
                {
                    let Some(source) = variant
                        .runs_on(caps, &spec)
                        .ok()
                        .and_then(|()| decode(&variant, caps, &spec, 1, *clamp_pages))
                    else {
                        continue;
                    };
                    let name = format!(
                        "{} {}/{}x{heads} {} q_{query}.kv_{cache}.out_{out}{}",
                        if variant == chosen { "chosen" } else { "offered" },
                        dims.0,
                        dims.1,
                        variant.name(),
                        if *clamp_pages { " device_page_list" } else { "" },
                    );
                    all.push(Pipeline { name, capabilities: capabilities(&variant), source });
                }
            }
        }
    }
    all
}

/// The pipelines that are the same on all devices without cooperative matrices: merges and small ops.
fn others() -> Vec<Pipeline> {
    let merges = all_dims().flat_map(|dims| {
        Merging::ALL.into_iter().flat_map(move |merging| {
            OUTS.map(|out| {
                merging.source(&spec(dims, 16, Dtype::F16, Dtype::F16, out), Features::NONE, false)
            })
        })
    });
    let sources = crate::gpu::ops::every_source().into_iter().filter(|source| source.entry != "mla_prefill");
    let pipeline = |source: Source| {
        let name = format!("chosen any {} {}", source.entry, source.label);
        Pipeline { name, capabilities: PLAIN, source }
    };
    merges.chain(sources).map(pipeline).collect()
}

fn prefills(caps: &Caps) -> Vec<Pipeline> {
    let dims = [[128, 64, 128], [192, 64, 256], [64, 32, 64]];
    let specs = dims.into_iter().flat_map(|[p, r, v]| {
        OUTS.map(|dtype| MlaPrefill {
            num_heads: 16,
            qk_nope_head_dim: p,
            qk_rope_head_dim: r,
            v_head_dim: v,
            dtype,
            out: dtype,
        })
    });
    let pipeline = |spec: MlaPrefill| {
        let (kernel, choice) =
            variants::choose(&prefill::VARIANTS, caps, &(spec, 0), None).expect("some variant runs");
        let MlaPrefill { qk_nope_head_dim, qk_rope_head_dim, v_head_dim, dtype, .. } = spec;
        let name = format!(
            "chosen {qk_nope_head_dim}/{qk_rope_head_dim}/{v_head_dim} {} mla_prefill {dtype}",
            choice.variant
        );
        Pipeline { name, capabilities: PLAIN, source: kernel.source }
    };
    specs.map(pipeline).collect()
}

/// Writes into a folder: HLSL files, and of each a line `file, entry point, profile, device, pipeline, label, features` in `list.tsv`.
fn save(folder: &Path, written: &[(&'static str, ShaderModel, &Pipeline, String)]) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut list = String::new();
    for (at, (device, model, pipeline, text)) in written.iter().enumerate() {
        let file = format!("{at:05}.hlsl");
        std::fs::write(folder.join(&file), text)?;
        let (entry, name) = (pipeline.source.entry, &pipeline.name);
        // What scripts/vendors/dx12.py lets a device be asked for.
        let features = if pipeline.capabilities.contains(Capabilities::SUBGROUP) { "waves" } else { "" };
        let (model, label) = (model.to_str(), &pipeline.source.label);
        writeln!(list, "{file}\t{entry}\tcs_{model}\t{device}\t{name}\t{label}\t{features}")
            .expect("a string takes all");
    }
    std::fs::write(folder.join("list.tsv"), list)
}

/// Shader model 5.1 is FXC's, 6.0 and 6.2 are DXC's; wgpu asks for 6.2 or more where a device has f16.
#[test]
#[ignore = "scripts/vendors.sh runs it; other tests write fewer"]
fn every_pipeline_is_written_for_both_of_microsofts_compilers() {
    let everywhere = others();
    let of_devices = DEVICES.map(|(name, caps)| {
        let mut pipelines = decodes(&caps);
        pipelines.extend(prefills(&caps));
        (name, pipelines)
    });
    let mut seen = HashSet::new();
    let mut written = Vec::new();
    for (device, pipelines) in of_devices.iter().map(|(name, all)| (*name, all)).chain([("any", &everywhere)])
    {
        for pipeline in pipelines {
            let models = match device {
                "webgpu" => &[ShaderModel::V5_1][..],
                "any" => &[ShaderModel::V5_1, ShaderModel::V6_0, ShaderModel::V6_2],
                _ => &[ShaderModel::V6_0, ShaderModel::V6_2],
            };
            // Devices of one kind get the same kernels.
            if seen.insert((models.len(), &pipeline.source.text)) {
                let module = valid(&pipeline.source, pipeline.capabilities);
                written.extend(
                    models.iter().map(|&model| (device, model, pipeline, write(pipeline, &module, model))),
                );
            }
        }
    }
    let folder = std::env::var_os("MLA_HLSL").expect("MLA_HLSL names a folder");
    save(folder.as_ref(), &written).expect("the folder takes files");
}
