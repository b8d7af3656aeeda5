//! naga writes every kernel for Metal and for DX12, as wgpu has it do there.

use naga::back::{hlsl, msl};
use naga::ir::CooperativeSize;
use naga::proc::BoundsCheckPolicy;

use super::*;

/// Whether a module uses cooperative matrices: all of one size.
fn matrices(module: &Module) -> Option<CooperativeSize> {
    module.types.iter().find_map(|(_, ty)| match ty.inner {
        TypeInner::CooperativeMatrix { columns, .. } => Some(columns),
        _ => None,
    })
}

/// The MSL of a macOS 12, which has `simd_shuffle_xor` and the matrices of 8x8.
fn metal(label: &str, module: &Module, info: &ModuleInfo) {
    let policy = BoundsCheckPolicy::Restrict;
    let options = msl::Options {
        lang_version: (2, 4),
        zero_initialize_workgroup_memory: false,
        bounds_check_policies: naga::proc::BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            ..Default::default()
        },
        ..Default::default()
    };
    let written = msl::write_string(module, info, &options, &msl::PipelineOptions::default());
    let (text, entries) = written.unwrap_or_else(|error| panic!("{label}: MSL: {error}"));
    let entry = entries.entry_point_names.first().unwrap_or_else(|| panic!("{label}: no entry point"));
    let entry = entry.as_ref().unwrap_or_else(|error| panic!("{label}: MSL: {error}"));
    assert!(text.contains(&format!("kernel void {entry}(")), "{label}: MSL without its kernel");
}

/// Shader model 6.0 has wave operations.
fn dx12(label: &str, module: &Module, info: &ModuleInfo) {
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_0,
        zero_initialize_workgroup_memory: false,
        ..Default::default()
    };
    let (mut text, pipeline) = (String::new(), hlsl::PipelineOptions::default());
    let written = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
    let written = written.unwrap_or_else(|error| panic!("{label}: HLSL: {error}"));
    let entry = written.entry_point_names.first().unwrap_or_else(|| panic!("{label}: no entry point"));
    let entry = entry.as_ref().unwrap_or_else(|error| panic!("{label}: HLSL: {error}"));
    assert!(text.contains(&format!("void {entry}(")), "{label}: HLSL without its kernel");
    let found = literals::selection_of_literals(&text);
    assert_eq!(found, None, "{label}: a selection of float literals alone, which DXC makes doubles of");
}

/// naga 30 writes cooperative matrices for Metal only, of 8x8 only.
fn write(source: &Source, module: &Module, info: &ModuleInfo) {
    let matrices = matrices(module);
    if !matches!(matrices, Some(CooperativeSize::Sixteen)) {
        metal(&source.label, module, info);
    }
    if matrices.is_none() {
        dx12(&source.label, module, info);
    }
}

/// Every variant for every pair of cache and query dtypes, with dims and outputs walked so that all are met.
#[test]
fn every_row_is_written_for_metal_and_dx12() {
    let mut at = 0;
    for (variant, caps) in runs_somewhere() {
        for (query, cache, out) in all_dtypes() {
            let dims = all_dims().nth(at % SUPPORTED_DIMS.len()).expect("in range");
            let spec = spec(dims, HEADS[at % HEADS.len()], query, cache, out);
            at += 1;
            if !serves(&variant, &caps, &spec) {
                continue;
            }
            let source =
                decode(&variant, &caps, &spec, 1, at.is_multiple_of(2)).expect("composed where it runs");
            let valid = valid(&source, capabilities(&variant));
            write(&source, &valid.0, &valid.1);
        }
    }
}

#[test]
fn merges_and_small_ops_are_written_for_metal_and_dx12() {
    let mut sources = crate::gpu::ops::every_source();
    for dims in all_dims() {
        for merging in Merging::ALL {
            sources.extend(OUTS.map(|out| {
                merging.source(&spec(dims, 16, Dtype::F16, Dtype::F16, out), Features::NONE, false)
            }));
        }
    }
    for source in sources {
        let valid = valid(&source, PLAIN);
        write(&source, &valid.0, &valid.1);
    }
}
