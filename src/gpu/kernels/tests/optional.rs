//! Kernels of sparse decodes, of sinks, and of caches of records.

use super::*;
use crate::cache::KvLayout;

/// Every variant and tile with lists, sinks and both, for every layout.
#[test]
fn lists_sinks_and_records_are_valid_and_fit() {
    let layouts = Dtype::ALL.map(KvLayout::from).into_iter().chain([KvLayout::Ds656, KvLayout::Ds528]);
    let layouts: Vec<_> = layouts.collect();
    let mut at = 0;
    for (variant, caps) in runs_somewhere() {
        for &layout in &layouts {
            for heads in [6, 20, 128] {
                let rope = if layout == KvLayout::Ds528 { 0 } else { 64 };
                let (query, _, out) = all_dtypes()[at % 48];
                at += 7; // coprime to their number
                let spec = spec((512, rope), heads, query, Dtype::E4m3, out);
                let spec = MlaDecode { kv: KvSpec { layout, ..spec.kv }, ..spec };
                if !serves(&variant, &caps, &spec) {
                    continue;
                }
                for (topk, attn_sink) in [(0, true), (64, false), (64, true)] {
                    let options = DecodeOptions { topk, attn_sink, ..DecodeOptions::default() };
                    let request = DecodeRequest::new(&spec, &options);
                    // The second has a binding for the lengths of lists.
                    for max_storage_buffers in [8, 9] {
                        check(&variant, &Caps { max_storage_buffers, ..caps }, &request);
                    }
                }
            }
        }
    }
}

fn check(variant: &Body, caps: &Caps, request: &DecodeRequest) {
    let source = split(*variant, caps, request).expect("composed only where it runs");
    let valid = valid(&source, capabilities(variant));
    let (module, _) = &*valid;
    let is_listed = request.features.contains(Features::INDICES);
    let storage = sizes(module, |space| matches!(space, AddressSpace::Storage { .. })).len() as u32;
    let more = u32::from(is_listed && caps.max_storage_buffers > 8);
    assert_eq!(storage, STORAGE_BUFFERS + more, "{}", source.label);
    let has_sinks = module.global_variables.iter().any(|(_, one)| one.name.as_deref() == Some("sinks"));
    assert_eq!(has_sinks, request.features.contains(Features::ATTN_SINK), "{}", source.label);
    if more == 0 {
        check_module(&source, module, caps);
    }
    let marks = ["// lists", "// records", "// pages", "// one dtype"];
    let is_marked = |line: &str| marks.iter().any(|mark| line.ends_with(mark));
    assert!(!source.text.lines().any(is_marked), "{}", source.label);
}
