//! The ops besides the decode on wgpu, a file each; and [`BatchTables`], which makes tables for them and for decodes on the device.

mod batch_tables;
mod correct_attn_out;
mod e4m3_scale;
mod head_project;
mod kv_append;
mod kv_calibrate;
mod kv_copy_pages;
mod kv_gather;
mod merge_state;
mod merge_states;
mod mla_prefill;
mod reorg_kvcache;
mod rope;
mod rope_append;
mod table;
mod words;

pub use batch_tables::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};

#[cfg(test)]
use super::kernels::compose::Source;

#[cfg(test)]
/// Every kernel of every small op.
pub(crate) fn every_source() -> Vec<Source> {
    let mut all = merge_state::every_source();
    all.extend(merge_states::every_source());
    all.extend(correct_attn_out::every_source());
    all.extend(kv_append::every_source());
    all.extend(kv_copy_pages::every_source());
    all.extend(kv_gather::every_source());
    all.extend(head_project::every_source());
    all.extend(crate::gpu::kernels::prefill::every_source());
    all.extend(kv_calibrate::every_source());
    all.extend(reorg_kvcache::every_source());
    all.extend(rope::every_source());
    all.extend(rope_append::every_source());
    all.extend(batch_tables::every_source());
    all
}

/// A struct's name in WGSL, where its fields are, and its bytes.
#[cfg(test)]
type HostLayout = (&'static str, Vec<(&'static str, usize)>, usize);

/// The [`HostLayout`] of a struct of the host's, by its fields; what is one array here is words of other names in WGSL.
#[cfg(test)]
macro_rules! layout_of {
    ($wgsl:literal, $host:ident: $($field:ident),* $(; $array:ident: $($word:ident),*)?) => {{
        use std::mem::offset_of;
        #[allow(unused_mut)] // where there is no array
        let mut fields = vec![$((stringify!($field), offset_of!($host, $field))),*];
        $(fields.extend([$(stringify!($word)),*].iter().enumerate().map(|(i, &word)| (word, offset_of!($host, $array) + 4 * i)));)?
        ($wgsl, fields, size_of::<$host>())
    }};
}
#[cfg(test)]
use layout_of;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;
    use crate::gpu::kernels::GROUP;
    use crate::gpu::kernels::project::DIRECT_GROUP;

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
            ("correct_attn_out", 3 * 2),      // quads and words
            ("head_project", 27 * 2 * 2 * 2), // dtypes, rows, tiles, orders
            ("kv_append", 3 * 4),             // inputs into caches
            ("kv_calibrate", 3),
            ("kv_copy_pages", 2 * 2 * Dtype::ALL.len()), // widths, places
            ("kv_gather", 13),                           // all pairs but three into e4m3
            ("merge_state", 3 * 2),                      // units and words
            ("merge_states", 3 * 2),                     // quads and words
            ("mla_prefill", 5 * 3 * 3),                  // dims, inputs to outputs
            ("reorg_kvcache", 3),                        // widths
            ("rope", 2 * 2 * 3),                         // layouts, places, dtypes
            ("rope_append", 2 * 2 * 3 * 3 * 4),          // the same, and inputs into caches
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
            assert_eq!(source.threads(), group);
        }
    }

    #[test]
    fn host_and_shader_agree_on_the_parameters() {
        for source in every_source() {
            let scale = e4m3_scale::host_layout();
            let append = [kv_append::host_layout(), scale.clone()];
            let layouts = match source.entry {
                "batch_lists" | "batch_slots" => vec![batch_tables::host_layout()],
                "correct_attn_out" => vec![correct_attn_out::host_layout()],
                "head_project" => vec![head_project::host_layout()],
                "kv_append" => append.into(),
                "kv_calibrate" => vec![kv_calibrate::host_layout()],
                "kv_gather" => vec![kv_gather::host_layout(), scale],
                "merge_state" => vec![merge_state::host_layout()],
                "merge_states" => vec![merge_states::host_layout()],
                "mla_prefill" => vec![mla_prefill::host_layout()],
                "reorg_kvcache" => vec![reorg_kvcache::host_layout()],
                "rope" => vec![rope::host_layout()],
                "rope_append" => [&append[..], &[rope::host_layout(), rope_append::host_layout()]].concat(),
                "kv_copy_pages" => vec![kv_copy_pages::host_layout()],
                other => panic!("{other} has no layout here"),
            };
            for (name, host, size) in layouts {
                let host: Vec<_> = host.into_iter().map(|(field, at)| (field.to_owned(), at)).collect();
                assert_eq!(wgsl_layout(&source, name), (host, size), "{}", source.label);
            }
        }
    }
}
