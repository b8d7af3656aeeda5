//! The ops besides the decode on wgpu, a file each; and [`BatchTables`], which makes tables for them and for decodes on the device.

mod batch_tables;
mod correct_attn_out;
mod e4m3_scale;
mod guard;
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
mod tests;
