//! The ops besides the decode on CUDA, a file each; and [`BatchTables`], which makes tables for them and for decodes on the card.

mod array;
mod batch_tables;
mod correct_attn_out;
mod head_project;
mod kv_append;
mod kv_calibrate;
mod kv_copy_pages;
mod kv_gather;
mod merge_state;
mod merge_states;
mod mla_prefill;
mod range;
mod reorg_kvcache;
mod rope;
mod rope_append;
mod table;

pub use batch_tables::{BatchBinding, BatchTables, DecodeLists, DeviceSlots};

use super::kernels::address;
use crate::cuda::formats::code;
use crate::{Error, Result};

/// `THREADS` of the kernels.
const THREADS: u32 = 256;
/// The kernels divide numbers below 2^31, those of the last block's idle threads included.
const MAX_ITEMS: u32 = (1 << 31) - 1024;

/// `Divisor` of divisor.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Divisor {
    magic: u32,
    shift: u32,
}

impl Divisor {
    /// Of at least 1. The magic fits: `2^shift / by` is below 2^32, and below 2^32 - 1 unless `by` is a power of two.
    fn new(by: u32) -> Self {
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
    use super::correct_attn_out::{self, CorrectParams};
    use super::head_project::{self, ProjectParams};
    use super::kv_append::{AppendParams, append_entry};
    use super::kv_calibrate::{CalibrateParams, calibrate_entry};
    use super::kv_copy_pages::CopyParams;
    use super::kv_gather::{GatherParams, gather_entry};
    use super::merge_state::MergeStateParams;
    use super::merge_states::{self, MergeStatesParams};
    use super::mla_prefill::{self, PrefillParams};
    use super::reorg_kvcache::{ReorgParams, reorg_entry};
    use super::rope::{RopeParams, rope_entry};
    use super::rope_append::{RopeAppendParams, rope_append_entry};
    use super::*;
    use crate::cuda::manifest_test::takes;
    use crate::{Dtype, KvAppend, KvCalibrate, KvGather, KvSpec, MlaShape, RopeAppend, RopeLayout};

    /// The entries that these ops launch, each compared with the struct that it is given.
    pub(in crate::cuda) fn entries() -> Vec<&'static Entry> {
        let mut found = Vec::new();
        for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            found.extend([
                takes::<MergeStateParams<u32>>(&format!("merge_state_units1_{input}")),
                takes::<MergeStateParams<u32>>(&format!("merge_state_units2_{input}")),
                takes::<MergeStateParams<u64>>(&format!("merge_state_elements_{input}")),
            ]);
            let shape = MlaShape { num_heads: 1, kv_lora_rank: 512, qk_rope_head_dim: 64 };
            found.push(takes::<CalibrateParams>(&calibrate_entry(&KvCalibrate { shape, input })));
            for dtype in Dtype::ALL {
                let kv = KvSpec { layout: dtype.into(), page_size: 64, num_pages: 1 };
                let append = KvAppend { shape, kv, input };
                found.push(takes::<AppendParams>(&append_entry(&append)));
                let layout = RopeLayout::Interleaved;
                let rope = RopeAppend { append, query: input, num_heads: 1, layout };
                found.push(takes::<RopeAppendParams>(&rope_append_entry(&rope)));
                if dtype == Dtype::F32 {
                    found.push(takes::<RopeParams>(&rope_entry(&rope.rope())));
                }
                let gather = KvGather { shape, kv, output: input };
                found.push(takes::<GatherParams>(&gather_entry(&gather)));
            }
        }
        found.push(takes::<GatherParams>("kv_gather_e4m3_e4m3"));
        found.extend(["kv_copy_pages_wide", "kv_copy_pages_words"].map(takes::<CopyParams>));
        found.extend(Dtype::ALL.map(|dtype| takes::<ReorgParams>(&reorg_entry(dtype))));
        found.extend(batch_tables::ENTRIES.map(takes::<BatchParams>));
        found.extend(head_project::entries().iter().map(|name| takes::<ProjectParams>(name)));
        found.extend(correct_attn_out::ENTRIES.map(takes::<CorrectParams>));
        found.extend(merge_states::ENTRIES.map(takes::<MergeStatesParams>));
        found.extend(mla_prefill::entries().iter().map(|name| takes::<PrefillParams>(name)));
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
