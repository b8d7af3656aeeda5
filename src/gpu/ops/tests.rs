//! Every kernel of the ops besides the decode: how many there are, that each is valid, and that it reads the parameters that the
//! host writes.

use super::*;
use crate::base::dtype::Dtype;
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::project::DIRECT_GROUP;
use crate::gpu::kernels::tests::{PLAIN, valid};

/// Offsets of the fields of a WGSL struct, and its size.
fn wgsl_layout(module: &naga::Module, name: &str) -> (Vec<(String, usize)>, usize) {
    let (_, ty) = module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some(name)).expect(name);
    let naga::TypeInner::Struct { members, span } = &ty.inner else { panic!("{name} is no struct") };
    let field = |m: &naga::StructMember| (m.name.clone().unwrap_or_default(), m.offset as usize);
    (members.iter().map(field).collect(), *span as usize)
}

#[test]
fn every_variant_is_valid_without_any_feature() {
    let mut labels: std::collections::BTreeMap<_, std::collections::BTreeSet<_>> = Default::default();
    for source in every_source() {
        labels.entry(source.entry).or_default().insert(source.label);
    }
    let counts: Vec<_> = labels.iter().map(|(entry, labels)| (*entry, labels.len())).collect();
    let want = [
        ("batch_lists", 1),
        ("batch_slots", 1),
        ("correct_attn_out", 3 * 2), // quads and words
        // Tiles of two variants, with orders of: dtypes; e4m3 and Q8_0 weights; outputs in codes, of absorb and v_up; and guards.
        ("head_project", 2 * 2 * (27 * 2 + 2 * 3 * 2 + 3 * 2 + 4)),
        ("indexer_append", 3 * 4),     // inputs into caches
        ("indexer_logits", 4 * 4 * 2), // keys and queries, heads
        ("indexer_query", 3 * 4),      // inputs to outputs
        ("kv_append", 3 * 6 + 4),      // inputs into caches, two of records; guards
        ("kv_calibrate", 3),
        ("kv_copy_pages", 2 * 2 * (Dtype::ALL.len() + 3)), // widths, places; two of records, one of index keys
        ("kv_gather", 13 + 2 * 3),                         // all pairs but three into e4m3, and records
        ("merge_state", 3 * 2),                            // units and words
        ("merge_states", 3 * 2),                           // quads and words
        ("mla_prefill", 5 * 3 * 3),                        // dims, inputs to outputs
        ("reorg_kvcache", 3),                              // widths
        ("rope", 2 * 2 * 3),                               // layouts, places, dtypes
        ("rope_append", 2 * 3 * 3 * 3 * 5 + 3 * 3), // layouts, dtypes, places or codes; inputs into caches, one of records; guards
        ("top_k", 2 * (1 + 4)),                     // indices and slots; the dispatches of slices
    ];
    assert_eq!(counts, want);
    for source in every_source() {
        assert!(!source.text.contains("// unroll"), "{}: a loop is left rolled", source.label);
        let valid = valid(&source, PLAIN);
        let entry = &valid.0.entry_points[0];
        assert_eq!((entry.name.as_str(), valid.0.entry_points.len()), (source.entry, 1));
        let group = if source.label.contains("direct") { DIRECT_GROUP } else { GROUP };
        assert_eq!(entry.workgroup_size, [group, 1, 1]);
        assert_eq!(source.threads(), group);
    }
}

#[test]
fn host_and_shader_agree_on_the_parameters() {
    for (source, layouts) in every_shader() {
        assert!(!layouts.is_empty(), "{} has no layout", source.label);
        let valid = valid(&source, PLAIN);
        for (name, host, size) in layouts {
            let host: Vec<_> = host.into_iter().map(|(field, at)| (field.to_owned(), at)).collect();
            assert_eq!(wgsl_layout(&valid.0, name), (host, size), "{}", source.label);
        }
    }
}
