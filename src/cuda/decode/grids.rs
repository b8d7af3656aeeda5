//! Blocks of a step's grids: those of the split kernel are the items; those of the merge are chosen here.

use crate::base::error::{Error, Result};
use crate::cache::decode_spec::MlaDecode;
use crate::plan::tables::Capacity;

/// Columns and threads of a block of `mla_merge_few`.
const FEW_COLUMNS: u32 = 32;
pub(super) const FEW_THREADS: u32 = 64;
/// Columns of a warp of `mla_merge_many`, and threads of its blocks.
const MANY_COLUMNS: u32 = 128;
pub(super) const MANY_THREADS: u32 = 256;
/// Blocks of `mla_merge_few` for each multiprocessor, beyond which `mla_merge_many` is faster.
const FEW_BLOCKS: u32 = 16;

/// A merge's kernel, and its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MergeBlocks {
    Few(u32),
    Many(u32),
}

/// The merge's grid of a step with room for so many merges. Its kernels count rows, and warps of columns, in 32 bits.
///
/// # Errors
/// [`Error::Limit`].
pub(super) fn merge_blocks(spec: &MlaDecode, merges: u32, multiprocessors: u32) -> Result<MergeBlocks> {
    let rows = u64::from(merges) * u64::from(spec.shape.num_heads);
    let units = |columns: u32| rows * u64::from(spec.shape.kv_lora_rank / columns);
    let few = u64::from(FEW_BLOCKS) * u64::from(multiprocessors);
    if let Ok(blocks) = u32::try_from(units(FEW_COLUMNS))
        && u64::from(blocks) <= few
    {
        return Ok(MergeBlocks::Few(blocks));
    }
    let (need, warps) = (units(MANY_COLUMNS), MANY_THREADS / 32);
    // The last block may have warps past the last unit.
    let limit = u64::from(u32::MAX / warps * warps);
    match u32::try_from(need.div_ceil(warps.into())) {
        Ok(blocks) if need <= limit => Ok(MergeBlocks::Many(blocks)),
        _ => {
            let cure = "make the step with a smaller Capacity::merges, such as `Capacity::of` the plan";
            Err(Error::Limit { what: "128-column parts of a step's merges", need, limit, cure })
        }
    }
}

/// Blocks of a step's grids.
///
/// # Errors
/// [`Error::Limit`] where the driver would refuse them, or the merge's kernels miscount.
pub(super) fn check_grids(spec: &MlaDecode, capacity: &Capacity, multiprocessors: u32) -> Result<()> {
    let (need, limit) = (capacity.items.into(), i32::MAX as u64);
    if need > limit {
        let cure = "make the step with a smaller Capacity::items, such as `Capacity::of` the plan";
        return Err(Error::Limit { what: "work items of a step", need, limit, cure });
    }
    merge_blocks(spec, capacity.merges, multiprocessors).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::cache::{KvSpec, MlaShape};

    #[test]
    fn a_merge_has_a_block_for_all_or_is_refused() {
        let spec = |num_heads, kv_lora_rank| MlaDecode {
            shape: MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim: 64 },
            kv: KvSpec { layout: Dtype::Bf16.into(), page_size: 64, num_pages: 4 },
            query: Dtype::Bf16,
            out: Dtype::Bf16,
        };
        let blocks = |spec: MlaDecode, merges| merge_blocks(&spec, merges, 132);
        assert_eq!(blocks(spec(16, 512), 0), Ok(MergeBlocks::Few(0)));
        assert_eq!(blocks(spec(16, 512), 8), Ok(MergeBlocks::Few(8 * 16 * 16)));
        assert_eq!(blocks(spec(16, 512), 9), Ok(MergeBlocks::Many(9 * 16 * 4 / 8)));
        assert_eq!(blocks(spec(1, 256), 265), Ok(MergeBlocks::Many(67)), "265 * 2 / 8, rounded up");
        // 2^32 / (128 * 4) merges: counted in 32 bits their warps would wrap to 0, as would those of 2^32 / (128 * 16) merges for the few
        // kernel.
        for merges in [1 << 23, 1 << 21, (1 << 21) + 1, u32::MAX] {
            let need = u64::from(merges) * 128 * 4;
            match blocks(spec(128, 512), merges) {
                Ok(got) => assert_eq!((got, need < 1 << 32), (MergeBlocks::Many((need / 8) as u32), true)),
                Err(error) => {
                    assert!(need >= 1 << 32, "{merges}: {error}");
                    let text = format!(
                        "128-column parts of a step's merges: {need} needed, the limit is 4294967288: \
                         make the step with a smaller Capacity::merges, such as `Capacity::of` the plan"
                    );
                    assert_eq!(error.to_string(), text);
                }
            }
        }
        let room = Capacity { items: 1 << 31, ..Capacity::default() };
        let error = check_grids(&spec(16, 512), &room, 132).expect_err("no grid has so many blocks");
        assert!(error.to_string().contains("smaller Capacity::items"), "{error}");
        assert_eq!(check_grids(&spec(16, 512), &Capacity { items: u32::MAX >> 1, ..room }, 132), Ok(()));
    }
}
