//! The small ops on wgpu: [`MergeAttnStates`], [`KvAppend`], [`KvCalibrate`], [`KvCopyPages`], [`KvGather`], [`Rotate`], [`RotateAppend`],
//! [`HeadProject`], [`MlaPrefill`]; and [`BatchTables`], which makes tables for them and for decodes on the device.
//!
//! Each has the same verbs. `new` compiles; `prepare` uploads what changes with a step; `bind` checks one layer's
//! buffers, once; `record` adds dispatches to a pass of the host, making nothing. The host submits.

mod args;
mod batch_tables;
mod e4m3_scale;
mod head_project;
mod kv_append;
mod kv_calibrate;
mod kv_copy_pages;
mod kv_gather;
mod merge_attn_states;
mod merge_states;
mod prefill;
mod rope;
mod rope_append;
mod table;

pub use crate::ops::CopySpec;
pub use batch_tables::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};
pub use head_project::{HeadProject, ProjectBinding, ProjectStep};
pub use kv_append::{AppendBinding, AppendStep, KvAppend};
pub use kv_calibrate::{CalibrateBinding, CalibrateStep, KvCalibrate};
pub use kv_copy_pages::{CopyBinding, CopyStep, KvCopyPages};
pub use kv_gather::{GatherBinding, GatherStep, KvGather};
pub use merge_attn_states::{MergeAttnStates, MergeBinding};
pub use merge_states::{MergeSetsBinding, MergeSetsStep, MergeStateSets};
pub use rope::{Rotate, RotateBinding, RotateStep};
pub use rope_append::{RotateAppend, RotateAppendBinding};

pub use prefill::{MlaPrefill, PrefillBinding, PrefillStep};

use super::Pipelines;
use super::scope::scoped;
use crate::compose::{Const, Source, compose};
use crate::unroll::unroll;
use crate::{Dtype, Result};

/// Invocations in a workgroup: WebGPU's default limit.
const GROUP: u32 = 256;

/// A pipeline over explicit layouts, so that a bind group fits every pipeline of its op. Every op's indices and loops are
/// proved to be in bounds, next to where it is compiled.
fn pipeline(
    pipelines: &Pipelines,
    source: &Source,
    groups: &[&wgpu::BindGroupLayout],
) -> Result<wgpu::ComputePipeline> {
    let groups: Vec<_> = groups.iter().map(|&group| Some(group)).collect();
    let layout = scoped(pipelines.device(), "a pipeline layout", || {
        pipelines.device().create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(source.entry),
            bind_group_layouts: &groups,
            immediate_size: 0,
        })
    })?;
    pipelines.get(source, &layout)
}

/// A module of constants and files whose marked loops are unrolled.
fn unrolled(entry: &'static str, variant: &str, consts: &[(&str, u32)], files: &[&str]) -> Source {
    let prelude: Vec<_> = consts.iter().map(|&(name, value)| (name, Const::U32(value))).collect();
    let value = |name: &str| consts.iter().find(|(known, _)| *known == name).map(|&(_, value)| value);
    let mut source = compose(entry, variant, &prelude, files);
    // A marked loop with an unknown bound would be left rolled, which is right and slow; a test walks all shaders.
    if let Ok(text) = unroll(&source.text, &value) {
        source.text = text;
    }
    source
}

/// Workgroups for `items` items, folded in two: a dimension is limited. `limit` is that of the device.
///
/// A shader numbers the lanes in a `u32`. They are at most twice the items and a workgroup, and every op's items are at
/// most 2^30: words, or more bytes, of a binding of at most 4 GiB.
fn grid(items: u64, limit: u32) -> (u32, u32) {
    let groups = items.div_ceil(u64::from(GROUP));
    let x = groups.min(u64::from(limit)).max(1);
    (x as u32, groups.div_ceil(x) as u32)
}

fn pass<'a>(encoder: &'a mut wgpu::CommandEncoder, label: &'static str) -> wgpu::ComputePass<'a> {
    let label = Some(label);
    encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label, timestamp_writes: None })
}

/// How an input of f32, f16 or bf16 is read. No op reads e4m3: their specs refuse it, and tests compile all others.
fn lib_in(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => include_str!("../../../shaders/lib/in_f32.wgsl"),
        Dtype::F16 => include_str!("../../../shaders/lib/in_f16.wgsl"),
        Dtype::Bf16 => include_str!("../../../shaders/lib/in_bf16.wgsl"),
        Dtype::E4m3 => "",
    }
}

/// How an output is rounded and written.
fn lib_out(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => include_str!("../../../shaders/lib/out_f32.wgsl"),
        Dtype::F16 => include_str!("../../../shaders/lib/out_f16.wgsl"),
        Dtype::Bf16 => include_str!("../../../shaders/lib/out_bf16.wgsl"),
        Dtype::E4m3 => include_str!("../../../shaders/lib/out_e4m3.wgsl"),
    }
}

/// Every kernel of every small op.
#[cfg(test)]
pub(crate) fn every_source() -> Vec<Source> {
    let mut all = merge_attn_states::every_source();
    all.extend(merge_states::every_source());
    all.extend(kv_append::every_source());
    all.extend(kv_copy_pages::every_source());
    all.extend(kv_gather::every_source());
    all.extend(head_project::every_source());
    all.extend(prefill::every_source());
    all.extend(kv_calibrate::every_source());
    all.extend(rope::every_source());
    all.extend(rope_append::every_source());
    all.extend(batch_tables::every_source());
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::project::DIRECT_GROUP;

    fn parse(source: &Source) -> naga::Module {
        naga::front::wgsl::parse_str(&source.text)
            .unwrap_or_else(|e| panic!("{}:\n{}", source.label, e.emit_to_string(&source.text)))
    }

    /// Offsets of the fields of a WGSL struct, and its size.
    fn wgsl_layout(source: &Source, name: &str) -> (Vec<(String, usize)>, usize) {
        let module = parse(source);
        let (_, ty) = module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some(name)).expect(name);
        let naga::TypeInner::Struct { members, span } = &ty.inner else { panic!("{name} is no struct") };
        let field = |m: &naga::StructMember| (m.name.clone().unwrap_or_default(), m.offset as usize);
        (members.iter().map(field).collect(), *span as usize)
    }

    #[test]
    fn every_variant_is_valid_without_any_feature() {
        // naga's name for `unpack2x16float`, which all of WebGPU has
        let plain = naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32;
        let mut labels: std::collections::BTreeMap<_, std::collections::BTreeSet<_>> = Default::default();
        for source in every_source() {
            labels.entry(source.entry).or_default().insert(source.label);
        }
        let counts: Vec<_> = labels.iter().map(|(entry, labels)| (*entry, labels.len())).collect();
        let want = [
            ("batch_lists", 1),
            ("batch_slots", 1),
            ("head_project", 27 * 2 * 2 * 2), // dtypes, rows, tiles, orders
            ("kv_append", 3 * 4),             // inputs into caches
            ("kv_calibrate", 3),
            ("kv_copy_pages", 2 * Dtype::ALL.len()), // two widths
            ("kv_gather", 13),                       // all pairs but three into e4m3
            ("merge_attn_states", 3 * 2),            // units and words
            ("merge_states", 3),
            ("mla_prefill", 5 * 3 * 3),         // dims, inputs to outputs
            ("rope", 2 * 2 * 3),                // layouts, places, dtypes
            ("rope_append", 2 * 2 * 3 * 3 * 4), // the same, and inputs into caches
        ];
        assert_eq!(counts, want);
        for source in every_source() {
            assert!(!source.text.contains("// unroll"), "{}: a loop is left rolled", source.label);
            let module = parse(&source);
            let flags = naga::valid::ValidationFlags::all();
            let mut validator = naga::valid::Validator::new(flags, plain);
            if let Err(e) = validator.validate(&module) {
                panic!("{}:\n{}", source.label, e.emit_to_string(&source.text));
            }
            let entry = &module.entry_points[0];
            assert_eq!((entry.name.as_str(), module.entry_points.len()), (source.entry, 1));
            let group = if source.label.contains("direct") { DIRECT_GROUP } else { GROUP };
            assert_eq!(entry.workgroup_size, [group, 1, 1]);
        }
    }

    #[test]
    fn host_and_shader_agree_on_the_parameters() {
        for source in every_source() {
            let scale = e4m3_scale::host_layout();
            let append = [kv_append::host_layout(), scale.clone()];
            let layouts = match source.entry {
                "batch_lists" | "batch_slots" => vec![batch_tables::host_layout()],
                "head_project" => vec![head_project::host_layout()],
                "kv_append" => append.into(),
                "kv_calibrate" => vec![kv_calibrate::host_layout()],
                "kv_gather" => vec![kv_gather::host_layout(), scale],
                "merge_attn_states" => vec![merge_attn_states::host_layout()],
                "merge_states" => vec![merge_states::host_layout()],
                "mla_prefill" => vec![prefill::host_layout()],
                "rope" => vec![rope::host_layout()],
                "rope_append" => [&append[..], &[rope::host_layout(), rope_append::host_layout()]].concat(),
                _ => vec![kv_copy_pages::host_layout()],
            };
            for (name, host, size) in layouts {
                let host: Vec<_> = host.into_iter().map(|(field, at)| (field.to_owned(), at)).collect();
                assert_eq!(wgsl_layout(&source, name), (host, size), "{}", source.label);
            }
        }
    }

    #[test]
    fn a_grid_covers_its_items() {
        for items in [0, 1, 256, 257, 65_535 * 256, 65_535 * 256 + 1, u64::from(u32::MAX)] {
            let (x, y) = grid(items, 65_535);
            assert!(u64::from(x) * u64::from(y) * 256 >= items && x <= 65_535 && y <= 65_535);
            assert_eq!(y == 0, items == 0);
        }
    }
}
