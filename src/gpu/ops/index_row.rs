//! What `indexer_append` and `indexer_query` have in common on wgpu: the format as shaders read it, and the files of a row.

use super::single::uniform;
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::gpu::kernels::GROUP;
use crate::gpu::kernels::compose::Source;
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::unrolled;
use crate::ops::{IndexFormat, RopeLayout};

/// `PARTS` of index_row.wgsl: invocations of a row.
pub(super) const PARTS: u64 = 16;

/// A bit of a table's count, set if positions follow the table's words. A step has far fewer tokens.
pub(super) const POSITIONS_FOLLOW: u32 = 1 << 31;

/// The most items of a dispatch, so that the shader numbers its invocations in a `u32`.
const MAX_ITEMS: u64 = 1 << 30;

uniform! {
    "IndexParams":
    pub struct Index {
        rope: u32,
        hadamard: u32,
        ue8m0: u32,
        max_position: u32,
        two_to_24: f32,
        reserved_0: u32,
        reserved_1: u32,
        reserved_2: u32,
    }
}

impl Index {
    pub(super) fn new(format: &IndexFormat, max_position: u32) -> Self {
        Self {
            rope: match format.rope {
                None => 0,
                Some(RopeLayout::Interleaved) => 1,
                Some(RopeLayout::HalfSplit) => 2,
            },
            hadamard: format.hadamard.into(),
            ue8m0: format.ue8m0.into(),
            max_position,
            two_to_24: 24f32.exp2(),
            ..Self::default()
        }
    }
}

/// # Errors
/// [`Error::Limit`] where a grid does not reach all items of so many tokens.
pub(super) fn checked_tokens(tokens: u64, rows_per_token: u64) -> Result<()> {
    let limit = MAX_ITEMS / (rows_per_token * PARTS);
    if tokens > limit {
        let cure = "take fewer tokens a step, and bind a part of them for each";
        return Err(Error::Limit { what: "tokens of an indexer", need: tokens, limit, cure });
    }
    Ok(())
}

/// The kernel of rows of a dtype into another.
pub(super) fn source(entry: &'static str, input: Dtype, output: Dtype, files: &[&str]) -> Source {
    let mut all = vec![("GROUP", GROUP), ("POSITIONS_FOLLOW", POSITIONS_FOLLOW), ("PARTS", PARTS as u32)];
    all.push(("HAS_SCALES", output.is_fp8().into()));
    let mut texts = vec![
        include_str!("../../../shaders/lib/grid.wgsl"),
        include_str!("../../../shaders/lib/round.wgsl"),
        Format::of(input).element,
        Format::of(output).out,
        include_str!("../../../shaders/lib/index_row.wgsl"),
    ];
    texts.extend(files);
    unrolled(entry, &format!("from_{input}.{output}"), &all, &[], &texts)
}
