//! The ops besides the decode on wgpu, a file each; and [`BatchTables`], which makes tables for them and for decodes on the device.

mod batch_tables;
mod correct_attn_out;
mod e4m3_scale;
mod head_project;
mod index_row;
mod indexer_append;
mod indexer_logits;
mod indexer_query;
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
mod single;
mod table;
mod top_k;
mod words;

pub use batch_tables::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};

#[cfg(test)]
use super::kernels::compose::Source;

#[cfg(test)]
use single::{HostLayout, SingleOp, Uniform};

/// What tests look at of an op besides the decode.
#[cfg(test)]
trait Shaders: Sized {
    /// The kernels of these specs that run without any feature.
    fn every_source(samples: &[Self]) -> Vec<Source>;

    /// The structs that they share with the host.
    fn layouts() -> Vec<HostLayout>;
}

#[cfg(test)]
impl<O: SingleOp> Shaders for O {
    fn every_source(samples: &[Self]) -> Vec<Source> {
        samples.iter().flat_map(SingleOp::sources).collect()
    }

    fn layouts() -> Vec<HostLayout> {
        layouts_of::<O::Params>()
    }
}

#[cfg(test)]
fn layouts_of<U: Uniform>() -> Vec<HostLayout> {
    let mut all = Vec::new();
    U::layouts(&mut all);
    all
}

/// The kernels of every op besides the decode, and the structs that they share with the host.
#[cfg(test)]
fn every_shader() -> Vec<(Source, Vec<HostLayout>)> {
    let mut all = Vec::new();
    macro_rules! add {
        ($_decode:ty, $($op:ty),*) => {
            $(let sources = <$op>::every_source(&<$op as crate::ops::Op>::samples());
            all.extend(sources.into_iter().map(|source| (source, <$op>::layouts())));)*
        };
    }
    crate::ops::for_each_op!(add);
    all.extend(batch_tables::every_source().into_iter().map(|source| (source, batch_tables::layouts())));
    all
}

/// The kernels of every op besides the decode.
#[cfg(test)]
pub(crate) fn every_source() -> Vec<Source> {
    every_shader().into_iter().map(|(source, _)| source).collect()
}

#[cfg(test)]
mod tests {
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
            ("correct_attn_out", 3 * 2),             // quads and words
            ("head_project", 3 * 3 * 4 * 2 * 2 * 2), // dtypes of x, weights and outputs, rows, tiles, orders
            ("indexer_append", 3 * 4),               // inputs into caches
            ("indexer_logits", 4 * 4 * 2),           // keys and queries, heads
            ("indexer_query", 3 * 4),                // inputs to outputs
            ("kv_append", 3 * 6),                    // inputs into caches, two of records
            ("kv_calibrate", 3),
            ("kv_copy_pages", 2 * 2 * (Dtype::ALL.len() + 3)), // widths, places; two of records, one of index keys
            ("kv_gather", 13 + 2 * 3),                         // all pairs but three into e4m3, and records
            ("merge_state", 3 * 2),                            // units and words
            ("merge_states", 3 * 2),                           // quads and words
            ("mla_prefill", 5 * 3 * 3),                        // dims, inputs to outputs
            ("reorg_kvcache", 3),                              // widths
            ("rope", 2 * 2 * 3),                               // layouts, places, dtypes
            ("rope_append", 2 * 3 * 3 * 3 * 5), // the same, but places or codes, and inputs into caches, one of records
            ("top_k", 2 * (1 + 4)),             // indices and slots; the dispatches of slices
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
}
