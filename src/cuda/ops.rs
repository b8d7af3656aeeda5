//! The ops besides the decode on CUDA, a file each; and [`BatchTables`], which makes tables for them and for decodes on the card.

mod array;
mod batch_tables;
mod codes;
mod correct_attn_out;
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

pub use batch_tables::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};

use super::kernels::address;
use crate::base::error::{Error, Result};
use crate::cuda::formats::code;

/// `THREADS` of the kernels.
const THREADS: u32 = 256;
/// The kernels divide numbers below 2^31, those of the last block's idle threads included.
const MAX_ITEMS: u32 = (1 << 31) - 1024;

/// `Divisor` of divisor.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Divisor {
    magic: u32,
    shift: u32,
}

impl Divisor {
    /// The divisor `by`, at least 1. The magic number fits 32 bits: `2^shift / by` is below 2^32, and below 2^32 - 1 unless `by` is a power
    /// of two.
    pub(super) fn new(by: u32) -> Self {
        let shift = 31 + by.next_power_of_two().trailing_zeros();
        Self { magic: (1u64 << shift).div_ceil(by.into()) as u32, shift }
    }
}

fn checked_items(what: &'static str, items: u64, cure: &'static str) -> Result<u32> {
    let limit = MAX_ITEMS.into();
    if items > limit {
        return Err(Error::Limit { what, need: items, limit, cure });
    }
    Ok(items as u32)
}

/// A stride in bytes. That of a dimension of one is unused and may be anything, as may all of an array without elements.
fn stride(count: u32, stride: u64, bytes: usize) -> u64 {
    if count > 1 { stride.wrapping_mul(bytes as u64) } else { 0 }
}

#[cfg(test)]
pub(super) mod tests {
    use wgpu_mla_ptx::Entry;

    use super::batch_tables::{self, BatchParams};
    use super::head_project::{self, ProjectParams};
    use super::indexer_logits::{self, LogitsParams};
    use super::merge_state::MergeStateParams;
    use super::mla_prefill::{self, PrefillParams};
    use super::single::SingleOp;
    use super::top_k::{self, TopKParams};
    use super::*;
    use crate::cuda::manifest_test::takes;
    use crate::ops::{HeadProject, IndexerLogits, MergeState, MlaPrefill, Op, TopK};

    /// An op besides the decode.
    trait Launches: Sized {
        /// The entries that these specs launch, each compared with the struct that it is given.
        fn entries_of(samples: &[Self]) -> Vec<&'static Entry>;
    }

    impl<O: SingleOp> Launches for O {
        fn entries_of(samples: &[Self]) -> Vec<&'static Entry> {
            samples.iter().flat_map(Self::entries).map(|name| takes::<O::Params>(&name)).collect()
        }
    }

    impl Launches for MergeState {
        fn entries_of(samples: &[Self]) -> Vec<&'static Entry> {
            let of = |spec: &Self| {
                let [one, two, elements] =
                    ["units1", "units2", "elements"].map(|by| format!("merge_state_{by}_{}", spec.dtype));
                [
                    takes::<MergeStateParams<u32>>(&one),
                    takes::<MergeStateParams<u32>>(&two),
                    takes::<MergeStateParams<u64>>(&elements),
                ]
            };
            samples.iter().flat_map(of).collect()
        }
    }

    impl Launches for HeadProject {
        fn entries_of(_: &[Self]) -> Vec<&'static Entry> {
            head_project::entries().iter().map(|name| takes::<ProjectParams>(name)).collect()
        }
    }

    impl Launches for IndexerLogits {
        fn entries_of(_: &[Self]) -> Vec<&'static Entry> {
            indexer_logits::entries().iter().map(|name| takes::<LogitsParams>(name)).collect()
        }
    }

    impl Launches for MlaPrefill {
        fn entries_of(_: &[Self]) -> Vec<&'static Entry> {
            mla_prefill::entries().iter().map(|name| takes::<PrefillParams>(name)).collect()
        }
    }

    impl Launches for TopK {
        fn entries_of(_: &[Self]) -> Vec<&'static Entry> {
            top_k::entries().iter().map(|name| takes::<TopKParams>(name)).collect()
        }
    }

    /// The entries that these ops launch, each compared with the struct that it is given.
    pub(in crate::cuda) fn entries() -> Vec<&'static Entry> {
        let mut found: Vec<_> = batch_tables::ENTRIES.map(takes::<BatchParams>).into();
        macro_rules! add {
            ($_decode:ty, $($op:ty),*) => {
                $(found.extend(<$op>::entries_of(&<$op>::samples()));)*
            };
        }
        crate::ops::for_each_op!(add);
        found
    }

    #[test]
    fn a_divisor_divides_everything_below_2_to_31() {
        let max = (1u64 << 31) - 1;
        let powers = (0..31).flat_map(|e| [(1u64 << e).saturating_sub(1), 1 << e, (1 << e) + 1]);
        for by in (1..600).chain(powers).chain([max, 1 << 31]).filter(|&by| by > 0) {
            let Divisor { magic, shift } = Divisor::new(by as u32);
            let multiples = [0, by, 2 * by, 77 * by, max / by * by];
            let numbers = multiples.iter().flat_map(|&n| [n.saturating_sub(1), n, n + 1]).chain([max]);
            for n in numbers.filter(|&n| n <= max) {
                assert_eq!((n * u64::from(magic)) >> shift, n / by, "{n} / {by}");
            }
        }
    }
}
